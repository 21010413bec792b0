"""Noise: how far a rounded array lies from the original."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from exmy.errors import DtypeError, SizeError

__all__ = ["sqnr"]

_BLOCK = 1 << 16


def sqnr(x: Any, y: Any) -> float:
    """Return the signal-to-quantization-noise ratio 10 log10(sum x^2 / sum (x-y)^2) in dB.

    x: the original, y: the approximation, real arrays of one shape (SizeError otherwise) and any real
    dtypes. Computed in float64, block by block.  Infinity where x equals y, also when both are empty;
    -infinity where x is all zero and y is not; NaN where a NaN is met.
    """
    signal = np.asarray(x)
    approximation = np.asarray(y)
    if signal.shape != approximation.shape:
        raise SizeError(f"x has shape {signal.shape} and y has {approximation.shape}; expected the same")
    for array in (signal, approximation):
        if array.dtype.kind in "cOSUmM":
            raise DtypeError(f"dtype {array.dtype.name!r} has no SQNR; expected real numbers")
    signal, approximation = signal.reshape(-1), approximation.reshape(-1)
    power = noise = 0.0
    for start in range(0, signal.size, _BLOCK):
        a = signal[start : start + _BLOCK].astype(np.float64)
        power += float(np.dot(a, a))
        a -= approximation[start : start + _BLOCK]
        noise += float(np.dot(a, a))
    if noise == 0:
        return math.inf
    if power == 0:
        return -math.inf
    return 10 * math.log10(power / noise) if math.isfinite(power + noise) else math.nan
