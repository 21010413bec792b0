"""Checksums: xxh3-128, of a metadata object as a whole, and of each block of an encoded chunk; pure, no I/O."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from tstore.errors import Corrupt

__all__ = ["BLOCK", "CHECK_SIZE", "as_checks", "block_checks", "digest"]

BLOCK = 1 << 20
"""The largest number of bytes of an encoded chunk that one checksum covers."""

CHECK_SIZE = 16
"""Bytes of a checksum."""

digest = xxhash.xxh3_128_digest


def block_checks(data: memoryview) -> bytes:
    """Return the joined checksums of all blocks of `data`; empty data have one."""
    if len(data) <= BLOCK:
        return digest(data)
    return b"".join([digest(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)])


def as_checks(data: bytes) -> npt.NDArray[np.uint8]:
    """Return joined checksums as an array of shape (blocks, 16); raise `Corrupt` if the last is cut short."""
    if len(data) % CHECK_SIZE:
        raise Corrupt(f"{len(data)} bytes of checksums are not a multiple of {CHECK_SIZE}")
    return np.ndarray((len(data) // CHECK_SIZE, CHECK_SIZE), np.uint8, data)
