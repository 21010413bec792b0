"""The volume that all contenders write, and the parts of it that they read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.uint16]
Index = tuple[slice, ...]

_BOX = (100, 100, 64)
_STRIDE = 4
_NOISE = 1 << 20  # values of noise, which repeat with a period that is no power of two


class Layout(NamedTuple):
    """A volume of `side`³ values of uint16 in chunks of `chunk`³, raw or compressed by zstd at level 1."""

    side: int
    chunk: int
    zstd: bool

    @property
    def title(self) -> str:
        return f"{self.chunk}³ {'zstd' if self.zstd else 'raw'}"

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.side, self.side, self.side

    @property
    def nbytes(self) -> int:
        """The bytes of the values."""
        return 2 * self.side**3

    @property
    def chunks(self) -> tuple[int, int, int]:
        return self.chunk, self.chunk, self.chunk

    @property
    def codecs(self) -> list[dict[str, Any]]:
        """The codecs as a `zarr.json` has them."""
        compressor = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
        return [{"name": "bytes", "configuration": {"endian": "little"}}, *([compressor] if self.zstd else [])]

    def values(self) -> Values:
        """Return the volume: smooth in each direction, with four bits of noise."""
        n = np.arange(self.side, dtype=np.uint16)
        values = np.empty(self.shape, np.uint16)
        noise = np.random.default_rng(7).integers(0, 16, _NOISE + 4093, np.uint16)
        plane = (n[:, None] * 3 + n[None, :] * 5) << 4
        for z in range(self.side):
            start = z * 7919 % _NOISE
            np.add(plane, z << 5, out=values[z], casting="unsafe")
            values[z] ^= np.resize(noise[start:], plane.shape)
        return values

    def boxes(self, count: int) -> Iterator[Index]:
        """Yield boxes that begin anywhere."""
        rng = np.random.default_rng(1)
        sizes = [min(size, self.side) for size in _BOX]
        for _ in range(count):
            starts = [int(rng.integers(0, self.side - size + 1)) for size in sizes]
            yield tuple(slice(a, a + size) for a, size in zip(starts, sizes, strict=True))

    def single_chunks(self, count: int) -> Iterator[Index]:
        """Yield the regions of chunks in random order."""
        rng, along = np.random.default_rng(2), self.side // self.chunk
        for _ in range(count):
            yield tuple(slice(int(i) * self.chunk, (int(i) + 1) * self.chunk) for i in rng.integers(0, along, 3))

    def elements(self, count: int) -> Iterator[tuple[int, ...]]:
        """Yield the positions of elements."""
        for at in np.random.default_rng(3).integers(0, self.side, (count, 3)):
            yield tuple(int(i) for i in at)

    @property
    def strided(self) -> Index:
        """Every fourth element along each axis."""
        return (slice(None, None, _STRIDE),) * 3
