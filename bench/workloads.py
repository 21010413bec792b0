"""What contenders save, write and read: float32 arrays like weights, a volume, and arrays of counted values."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]
Arrays = dict[str, Values]
Index = tuple[Any, ...]
Tree = dict[str, Any]
"""The leaves by name, or by group and name."""

RAW: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
"""The codecs, in Zarr's metadata, of chunks that are not compressed."""

WIDTH = 8
"""The int64 values of a chunk of many, 64 bytes."""
GROUP = 10
"""The arrays of a group of many."""

_GROUPS = 10
_MULTIPLIER = -7046029254386353131  # 2⁶⁴ ÷ the golden ratio, modulo 2⁶⁴
_STRIDE = 4


@dataclass(frozen=True)
class Weights:
    """`count` arrays of one shape, and the chunk shape that peers use for them.

    If `chunked`, the chunk shape is part of the task; otherwise contenders choose their own. If `grouped`, the
    tree has ten groups.
    """

    name: str
    title: str
    count: int
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    chunked: bool = False
    grouped: bool = False

    @property
    def names(self) -> list[str]:
        return [f"w{i:05}" for i in range(self.count)]

    @property
    def nbytes(self) -> int:
        return self.count * 4 * int(np.prod(self.shape))

    def small(self) -> Weights:
        """Return a small part of the workload, for a rehearsal."""
        rows = max(self.shape[0] // 32, 8)
        chunk = (min(rows, self.chunk[0]), *self.chunk[1:])
        return replace(self, count=min(self.count, 16), shape=(rows, *self.shape[1:]), chunk=chunk)

    def rows(self, number: int, count: int) -> tuple[slice, ...]:
        """Return the region of each array that one of `count` hosts has."""
        rows = self.shape[0] // count
        return (slice(number * rows, (number + 1) * rows), *(slice(0, n) for n in self.shape[1:]))

    def items(self, number: int = 0, count: int = 1) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """Yield the names and a host's part of each array: normal values of about 0.02, always the same ones."""
        rng = np.random.default_rng((20, number))
        base = rng.standard_normal((self.shape[0] // count, *self.shape[1:]), dtype=np.float32)
        for i, name in enumerate(self.names):
            yield name, base * np.float32(0.02 + i / 2**21)

    def tree(self, leaves: Iterable[tuple[str, Any]]) -> Tree:
        """Return the leaves in groups `group0` to `group9` if the workload is grouped, or by name."""
        if not self.grouped:
            return dict(leaves)
        tree: Tree = {}
        for number, (name, leaf) in enumerate(leaves):
            tree.setdefault(f"group{number * _GROUPS // self.count}", {})[name] = leaf
        return tree


def flat(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yield the names and the leaves."""
    for name, node in tree.items():
        if isinstance(node, dict):
            yield from node.items()
        else:
            yield name, node


def tenth(tree: Tree) -> Tree:
    """Return the first group, a tenth of the leaves."""
    return {"group0": tree["group0"]}


def large(nbytes: int, count: int = 20, columns: int = 4096) -> Weights:
    """Return arrays of about `nbytes` in total, which jobs shard: both dimensions are multiples of 8."""
    rows = max(8, nbytes // (count * 4 * columns) // 8 * 8)
    title = f"{count * 4 * rows * columns / 2**20:,.0f} MiB in {count} arrays of {rows}×{columns}"
    return Weights("large", title, count, (rows, columns), (rows, columns), grouped=True)


def leaves(count: int, title: str = "{:,} leaves of 4 KiB", *, grouped: bool = True) -> Weights:
    """Return `count` one-dimensional arrays of 4 KiB, which are replicated on every device of a job."""
    return Weights("leaves", title.format(count), count, (1024,), (1024,), grouped=grouped)


def chunks64k(mebibytes: int) -> Weights:
    """Return one array in chunks of 64 KiB."""
    title = f"{mebibytes} MiB in {16 * mebibytes} chunks of 64 KiB"
    return Weights("chunks64k", title, 1, (32 * mebibytes, 8192), (128, 128), chunked=True)


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
        return (self.side,) * 3

    @property
    def chunks(self) -> tuple[int, int, int]:
        return (self.chunk,) * 3

    @property
    def nbytes(self) -> int:
        return 2 * self.side**3

    @property
    def codecs(self) -> list[dict[str, Any]]:
        """The codecs in Zarr's metadata, which are the same for all contenders."""
        zstd = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
        return [*RAW, zstd] if self.codec == "zstd" else RAW

    def make(self) -> Values:
        """Return all values in a new array."""
        values = np.empty(self.shape, np.uint16)
        for z in range(self.side):
            values[z] = self.part((z, slice(None), slice(None)))
        return values

    def part(self, index: Index) -> Values:
        """Return the values at slices or numbers on each axis; the arithmetic is modulo 2^16."""
        z, y, x = (np.atleast_1d(np.arange(self.side)[i]) for i in index)
        rows = (z * 40503).astype(np.uint16)[:, None] ^ (y * 30103).astype(np.uint16) | np.uint16(1)
        values = rows[:, :, None] * (x * 52711 + 12345).astype(np.uint16)
        values >>= 10  # noise
        values += ((z[:, None] + y).astype(np.uint16)[:, :, None] + x.astype(np.uint16)) // 4 * 64
        return values.reshape([n for n, i in zip(values.shape, index, strict=True) if not isinstance(i, int)])

    def boxes(self, count: int) -> list[Index]:
        """Return misaligned boxes of 100 × 100 × 64 values, or half of the side if that is shorter."""
        lengths = [min(length, self.side // 2) for length in (100, 100, 64)]
        rng = random.Random(1)
        starts = [[rng.randrange((self.side - length) // 2) * 2 + 1 for length in lengths] for _ in range(count)]
        return [_box(start, lengths) for start in starts]

    def single_chunks(self, count: int) -> list[Index]:
        """Return the regions of chunks in random order, each at most once."""
        n = self.side // self.chunk
        numbers = random.Random(2).sample(range(n**3), min(count, n**3))
        starts = [(k // n**2 * self.chunk, k // n % n * self.chunk, k % n * self.chunk) for k in numbers]
        return [_box(start, self.chunks) for start in starts]

    def elements(self, count: int) -> list[tuple[int, ...]]:
        """Return the coordinates of random elements."""
        rng = random.Random(3)
        return [tuple(rng.randrange(self.side) for _ in range(3)) for _ in range(count)]

    def strided(self) -> Index:
        """Return the index of every fourth value on each axis."""
        return (slice(1, None, _STRIDE),) * 3


def _box(start: Sequence[int], lengths: Sequence[int]) -> Index:
    return tuple(slice(first, first + length) for first, length in zip(start, lengths, strict=True))


def array_name(number: int) -> str:
    """Return the path of the array of that number, whose elements are the number."""
    return f"group{number // GROUP:06}/array{number % GROUP}"


def counted(count: int) -> Values:
    """Return the first `count` of values that can't be compressed: see `value_at`."""
    return np.arange(count) * np.int64(_MULTIPLIER)


def value_at(index: int) -> int:
    """Return one of the values of `counted`."""
    value = index * _MULTIPLIER % 2**64
    return value - 2**64 if value >= 2**63 else value
