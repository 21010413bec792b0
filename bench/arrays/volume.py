"""The volume that contenders write, and the parts of it that they read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.uint16]
Numbers = npt.NDArray[np.int64]
Index = tuple[Any, ...]

_STRIDE = 4


class Volume(NamedTuple):
    """A cube of uint16 values with 10 smooth bits and 6 of noise, in cubic chunks, raw or compressed by zstd."""

    side: int
    chunk: int
    codec: str

    @property
    def title(self) -> str:
        return f"{self.chunk}³ {self.codec}"

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.side, self.side, self.side)

    @property
    def chunks(self) -> tuple[int, int, int]:
        return (self.chunk, self.chunk, self.chunk)

    @property
    def nbytes(self) -> int:
        return 2 * self.side**3

    @property
    def codecs(self) -> list[dict[str, Any]]:
        """The codecs in Zarr's metadata, which are the same for all contenders."""
        codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
        if self.codec == "zstd":
            codecs.append({"name": "zstd", "configuration": {"level": 1, "checksum": False}})
        return codecs

    def make(self) -> Values:
        """Return all values in a new array."""
        values = np.empty(self.shape, np.uint16)
        for z in range(self.side):
            self._fill(values[z : z + 1], np.arange(z, z + 1), np.arange(self.side), np.arange(self.side))
        return values

    def part(self, index: Index) -> Values:
        """Return the values at slices or numbers on each axis."""
        axes = [np.atleast_1d(np.arange(self.side)[i]) for i in index]
        values = np.empty([len(axis) for axis in axes], np.uint16)
        self._fill(values, *axes)
        return values.reshape([len(a) for a, i in zip(axes, index, strict=True) if not isinstance(i, int)])

    def _fill(self, values: Values, z: Numbers, y: Numbers, x: Numbers) -> None:
        """Store the values at these coordinates; the arithmetic is modulo 2^16."""
        rows = (z * 40503).astype(np.uint16)[:, None] ^ (y * 30103).astype(np.uint16) | np.uint16(1)
        np.multiply(rows[:, :, None], (x * 52711 + 12345).astype(np.uint16), out=values)
        values >>= 10  # noise
        values += ((z[:, None] + y).astype(np.uint16)[:, :, None] + x.astype(np.uint16)) // 4 * 64

    def boxes(self, count: int) -> list[Index]:
        """Return misaligned boxes of 100 × 100 × 64 values, or half of the side if that is shorter."""
        lengths = [min(length, self.side // 2) for length in (100, 100, 64)]
        rng = random.Random(1)
        starts = [[rng.randrange((self.side - length) // 2) * 2 + 1 for length in lengths] for _ in range(count)]
        return [_box(start, lengths) for start in starts]

    def single_chunks(self, count: int) -> list[Index]:
        """Return the regions of chunks in random order, each at most once."""
        numbers = random.Random(2).sample(range((self.side // self.chunk) ** 3), self.singles(count))
        n = self.side // self.chunk
        starts = [(k // n**2 * self.chunk, k // n % n * self.chunk, k % n * self.chunk) for k in numbers]
        return [_box(start, self.chunks) for start in starts]

    def singles(self, count: int) -> int:
        return min(count, (self.side // self.chunk) ** 3)

    def elements(self, count: int) -> list[tuple[int, int, int]]:
        """Return the coordinates of random elements."""
        rng = random.Random(3)
        return [
            (rng.randrange(self.side), rng.randrange(self.side), rng.randrange(self.side)) for _ in range(count)
        ]

    def strided(self) -> Index:
        """Return the index of every fourth value on each axis."""
        return (slice(1, None, _STRIDE),) * 3


def _box(start: Sequence[int], lengths: Sequence[int]) -> Index:
    return tuple(slice(first, first + length) for first, length in zip(start, lengths, strict=True))
