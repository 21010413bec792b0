"""Noise: how far a rounded array lies from the original."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from exmy import kernels
from exmy.elements import Array, Kind, as_flat
from exmy.errors import DtypeError, SizeError
from exmy.threads import PART, check_threads, run_parts

__all__ = ["Difference", "compare", "decibels", "sqnr"]


@dataclass(frozen=True, slots=True)
class Difference:
    """How far an approximation y lies from an original x: what `exmy.compare` returns.

    Differences of the parts of an array add up to that of the whole.
    """

    count: int
    """The elements compared."""
    signal: float
    """The sum of x^2."""
    noise: float
    """The sum of (x - y)^2."""
    largest_error: float
    """The largest |x - y|; NaN where a NaN is met, 0 for no elements."""
    largest_relative: float
    """The largest |x - y| / |x| over x != 0; NaN where a NaN is met, 0 where there is none."""

    @property
    def sqnr(self) -> float:
        """The signal-to-quantization-noise ratio in dB: see `exmy.sqnr`."""
        if self.noise == 0 and self.largest_error > 0:
            return math.nan  # the squares are below the smallest float64
        return decibels(self.signal, self.noise)

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.count + other.count,
            self.signal + other.signal,
            self.noise + other.noise,
            _larger(self.largest_error, other.largest_error),
            _larger(self.largest_relative, other.largest_relative),
        )


def _larger(a: float, b: float) -> float:
    return math.nan if math.isnan(a + b) else max(a, b)


def decibels(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise): infinity without noise, else -infinity without signal; NaN is kept."""
    if noise == 0:
        return math.inf
    if signal == 0:
        return -math.inf
    return 10 * math.log10(signal / noise) if math.isfinite(signal + noise) else math.nan


def compare(x: Any, y: Any, *, threads: int = 1) -> Difference:
    """Return how far y lies from x.

    x: the original, y: the approximation, real arrays of one shape (SizeError otherwise) and any real dtypes
    (DtypeError otherwise).  Computed in float64 in a fixed order: the result is the same for any number of
    threads that may share the work on a big array.
    """
    original, approximation = np.asarray(x), np.asarray(y)
    if original.shape != approximation.shape:
        raise SizeError(f"x has shape {original.shape} and y has {approximation.shape}; expected the same")
    for array in (original, approximation):
        if array.dtype.kind in "cOSUmM":
            raise DtypeError(f"dtype {array.dtype.name!r} has no SQNR; expected real numbers")
    threads = check_threads(threads)
    a, b, kind = _alike(original, approximation)
    starts = range(0, a.size, PART)
    found: list[Difference] = [Difference(0, 0.0, 0.0, 0.0, 0.0)] * len(starts)

    def part(low: int, high: int) -> None:
        if kind is None:
            of, to = a[low:high].astype(np.float64), b[low:high].astype(np.float64)
            signal, noise, largest, relative = kernels.compare(Kind.FLOAT64, of, to)
        else:
            signal, noise, largest, relative = kernels.compare(kind, a[low:high], b[low:high])
        if math.isnan(noise):
            largest = relative = math.nan
        found[low // PART] = Difference(high - low, signal, noise, largest, relative)

    run_parts(part, ((low, min(low + PART, a.size)) for low in starts), threads)
    return sum(found, Difference(0, 0.0, 0.0, 0.0, 0.0))


def _alike(x: Array, y: Array) -> tuple[Array, Array, Kind | None]:
    """Return both flat, and their kind where the kernels take them as they are."""
    if x.dtype == y.dtype and x.dtype.name in {kind.name.lower() for kind in Kind}:
        a, kind, _ = as_flat(x)
        return a, as_flat(y)[0], kind
    return x.reshape(-1), y.reshape(-1), None


def sqnr(x: Any, y: Any) -> float:
    """Return the signal-to-quantization-noise ratio 10 log10(sum x^2 / sum (x-y)^2) in dB.

    x: the original, y: the approximation, as for `compare`.  Infinity where x equals y, also when both are
    empty; -infinity where x is all zero and y is not; NaN where a NaN is met, and where the squares lie outside of
    float64 (magnitudes beyond 1e154, errors below 1e-162).
    """
    return compare(x, y).sqnr
