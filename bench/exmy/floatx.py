"""The e3m2 encoding of torchao (quant_llm) in NumPy: bit manipulation, and four codes packed into three bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

EXPONENT_BITS, MANTISSA_BITS, BIAS = 3, 2, 3
LARGEST = 28.0
NORMAL = 2.0 ** (1 - BIAS)


def encode(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return packed e3m2 codes of x, whose length is a multiple of 4."""
    bits = x.view(np.uint32)
    sign = (bits >> 26) & 0x20
    magnitude = np.abs(x)
    drop = 23 - MANTISSA_BITS
    word = magnitude.view(np.uint32)
    odd = (word >> drop) & 1
    normal = ((word - ((127 - BIAS) << 23) + (1 << (drop - 1)) - 1 + odd) >> drop).astype(np.uint8)
    grid = np.float32(NORMAL * 2.0 ** (23 - MANTISSA_BITS))
    subnormal = ((magnitude + grid).view(np.uint32) - grid.view(np.uint32)).astype(np.uint8)
    codes = np.where(magnitude >= NORMAL, normal, subnormal)
    codes = np.where(magnitude >= LARGEST, np.uint8(31), codes) | sign.astype(np.uint8)
    a, b, c, d = codes.reshape(-1, 4).T
    return np.stack([(a << 2) | (b >> 4), (b << 4) | (c >> 2), (c << 6) | d], axis=1).reshape(-1)


def decode(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the values of packed e3m2 codes."""
    p, q, r = packed.reshape(-1, 3).T
    codes = np.stack([p >> 2, ((p & 3) << 4) | (q >> 4), ((q & 15) << 2) | (r >> 6), r & 63], axis=1).reshape(-1)
    wide = codes.astype(np.uint32)
    scaled = ((wide & 31) << (23 - MANTISSA_BITS)).view(np.float32) * np.float32(2.0 ** (127 - BIAS))
    values: NDArray[Any] = np.where(wide & 32, -scaled, scaled)
    return values
