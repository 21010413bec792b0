"""Checksums: xxh3-128 of a whole metadata object, and of each block of a chunk or a request; pure, no I/O."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
import xxhash

from tstore.errors import Corrupt

try:
    from tstore.core.format import kernels
except ImportError:  # installed without a C compiler
    kernels = None  # type: ignore[assignment]

__all__ = ["BLOCK", "CHECK_SIZE", "BlockHash", "as_checks", "block_checks", "checks_in", "digest"]

BLOCK = 1 << 20
"""The bytes of an encoded chunk, or of the body of a request, that one checksum covers at most."""

CHECK_SIZE = 16
"""Bytes of a checksum."""

digest = xxhash.xxh3_128_digest


def block_checks(data: memoryview, chunk: int = sys.maxsize) -> bytes:
    """Return the joined checksums of all blocks of the chunks in `data`, each of `chunk` bytes; by default of one.

    The last block of a chunk, and the last chunk, may be shorter. Empty data are one empty block.
    """
    if len(data) <= min(chunk, BLOCK):
        return digest(data)
    if kernels is not None:
        return kernels.block_checks(data, chunk, BLOCK)
    chunks = (data[i : i + chunk] for i in range(0, len(data), chunk))
    return b"".join([digest(part[i : i + BLOCK]) for part in chunks for i in range(0, len(part), BLOCK)])


def checks_in(
    data: memoryview, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """Return the checksums of chunks in `data`; a run of equally long ones is hashed in one call."""
    stops = starts + lengths
    follows = (lengths[1:] == lengths[:-1]) & (starts[1:] == stops[:-1]) & (lengths[1:] > 0)
    first = np.concatenate([np.zeros(min(1, len(starts)), np.int64), np.flatnonzero(~follows) + 1])
    last = np.append(first[1:], len(starts)) - 1 if len(starts) else first
    runs = zip(starts[first].tolist(), stops[last].tolist(), lengths[first].tolist(), strict=True)
    return as_checks(b"".join([block_checks(data[start:stop], length) for start, stop, length in runs]))


class BlockHash:
    """The checksums of all blocks of bytes that arrive in parts, and one checksum of all the bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._checks = bytearray()  # checksums of all blocks before the last
        self._block = xxhash.xxh3_128()  # the last block, of 1 to `BLOCK` bytes, or empty if there are no bytes
        self._room = BLOCK  # bytes until the last block ends

    def update(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        rest = memoryview(data).cast("B")
        self.size += len(rest)
        while len(rest):
            if not self._room:
                self._checks += self._block.digest()
                self._block.reset()
                self._room = BLOCK
            part, rest = rest[: self._room], rest[self._room :]
            self._block.update(part)
            self._room -= len(part)

    def checks(self) -> bytes:
        """Return the joined checksums of all blocks; empty data are one empty block."""
        return bytes(self._checks) + self._block.digest()

    def hexdigest(self) -> str:
        """Return the checksum of the only block, or of the joined checksums of several, in hexadecimal."""
        checks = self.checks()
        return (checks if len(checks) == CHECK_SIZE else digest(checks)).hex()


def as_checks(data: bytes) -> npt.NDArray[np.uint8]:
    """Return joined checksums as an array of shape (blocks, 16); raise `Corrupt` if the last is cut short."""
    if len(data) % CHECK_SIZE:
        raise Corrupt(f"{len(data)} bytes of checksums are not a multiple of {CHECK_SIZE}")
    return np.ndarray((len(data) // CHECK_SIZE, CHECK_SIZE), np.uint8, data)
