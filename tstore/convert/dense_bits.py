"""Convert dense elements of 4 and 6 bits, the first in the lowest bits, from and to one byte per element."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["pack_bits", "unpack_bits"]

_PER_UNIT = {4: 2, 6: 4}
"""The smallest number of elements that fills whole bytes, by the bits of an element."""


def pack_bits(codes: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint8]:
    """Pack the low 4 or 6 bits of each byte densely; the last byte is padded with zeros."""
    flat = codes.reshape(-1).view(np.uint8) & np.uint8((1 << bits) - 1)
    size = -(-flat.size * bits // 8)
    units = np.zeros((-(-flat.size // _PER_UNIT[bits]), _PER_UNIT[bits]), np.uint8)
    units.reshape(-1)[: flat.size] = flat
    if bits == 4:
        pairs: npt.NDArray[np.uint8] = units[:, 0] | units[:, 1] << np.uint8(4)
        return pairs[:size]
    out = np.empty((len(units), 3), np.uint8)
    out[:, 0] = units[:, 0] | units[:, 1] << 6
    out[:, 1] = units[:, 1] >> 2 | units[:, 2] << 4
    out[:, 2] = units[:, 2] >> 4 | units[:, 3] << 2
    return out.reshape(-1)[:size]


def unpack_bits(data: npt.NDArray[np.uint8], bits: int, count: int) -> npt.NDArray[np.uint8]:
    """Return `count` elements of 4 or 6 bits, each in the low bits of a byte; the inverse of `pack_bits`."""
    per_unit = _PER_UNIT[bits]
    width = per_unit * bits // 8
    padded = np.zeros((-(-count // per_unit), width), np.uint8)
    padded.reshape(-1)[: data.size] = data
    units = np.empty((len(padded), per_unit), np.uint8)
    if bits == 4:
        units[:, 0], units[:, 1] = padded[:, 0] & 15, padded[:, 0] >> 4
    else:
        low, middle, high = padded.T
        units[:, 0], units[:, 1] = low & 63, low >> 6 | (middle & 15) << 2
        units[:, 2], units[:, 3] = middle >> 4 | (high & 3) << 4, high >> 2
    return units.reshape(-1)[:count]
