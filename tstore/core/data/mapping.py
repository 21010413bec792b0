"""Arrays in mapped packs: views of the system's page cache, verified when they are first used.

An array can be mapped if its chunks are stored as they are, in a local folder, and are parts of its first axis:
so their bytes, one chunk after the other, are the array. The writer begins each run of chunks at a byte at which
every dtype is aligned, and a long run at a page. If all chunks follow each other in a pack, the array is a part of
the memory of that pack; otherwise, their pages are mapped behind each other.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.core.data.reader import missing_message
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import chunk_coordinates
from tstore.core.format.checksums import BLOCK, CHECK_SIZE, block_checks
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.tree.node import Node
from tstore.core.storage.base import Storage
from tstore.core.storage.local.mapping import FileRange, are_pages, map_file, map_ranges
from tstore.core.storage.local.store import LocalStorage
from tstore.core.storage.objects import too_short
from tstore.errors import Corrupt, NotFound

__all__ = ["MappedArray", "Mapper", "NotMapped"]

_PART = 4 << 20  # bytes that are verified with one call


class NotMapped(NamedTuple):
    """Why an array can't be mapped."""

    reason: str


class MappedArray:
    """An array in mapped packs; `memory` has its chunks, one after the other."""

    __slots__ = ("_memory", "_meta", "_path", "_references", "_url")

    def __init__(self, node: Node, references: ChunkTable, memory: npt.NDArray[np.uint8], url: str) -> None:
        self._path = node.path
        self._meta = node.meta
        self._references = references
        self._memory = memory
        self._url = url

    @property
    def values(self) -> npt.NDArray[Any]:
        """The values, in memory that can't be written."""
        meta = self._meta
        size = math.prod(meta.shape) * meta.dtype.itemsize  # the last chunk may extend beyond the array's edge
        return self._memory[:size].view(meta.dtype).reshape(meta.shape)

    def verify(self) -> None:
        """Compare all blocks with their checksums; raise `Corrupt`, naming the chunk."""
        for part in self.parts():
            self.verify_part(part)

    def parts_of(self, values: npt.NDArray[Any]) -> Iterator[range]:
        """Yield the `parts` for the blocks that have these values, a view of `values`."""
        if values.size:
            low, high = np.lib.array_utils.byte_bounds(values)
            address = self._memory.__array_interface__["data"][0]
            yield from self.parts(low - address, high - address)

    def parts(self, start: int = 0, stop: int | None = None) -> Iterator[range]:
        """Yield ranges of bytes, to verify one by one, for all blocks from the byte `start` up to `stop`.

        Each is of whole blocks of one chunk, or of whole chunks that are no longer than a block.
        """
        size = self._meta.encoded_size
        stop = len(self._memory) if stop is None else stop
        if size <= BLOCK:
            step = max(1, _PART // size) * size
            first, last = start // size * size, -(-stop // size) * size
            yield from (range(at, min(at + step, last)) for at in range(first, last, step))
            return
        for chunk in range(start // size * size, stop, size):
            first = chunk + max(0, start - chunk) // BLOCK * BLOCK
            last = min(chunk + size, chunk - (chunk - stop) // BLOCK * BLOCK)
            yield from (range(at, min(at + _PART, last)) for at in range(first, last, _PART))

    def verify_part(self, part: range) -> None:
        """Compare one of the `parts` with its checksums; raise `Corrupt`, naming the chunk."""
        size = self._meta.encoded_size
        chunk, inside = divmod(part.start, size)
        per_chunk = -(-size // BLOCK)
        first = chunk * per_chunk + inside // BLOCK
        checks = block_checks(self._memory[part.start : part.stop].data, size if size <= BLOCK else BLOCK)
        expected = self._references.checks[first : first + len(checks) // CHECK_SIZE].tobytes()
        if checks == expected:
            return
        starts = range(0, len(checks), CHECK_SIZE)
        bad = next(i for i in starts if checks[i : i + CHECK_SIZE] != expected[i : i + CHECK_SIZE])
        number, block = divmod(first + bad // CHECK_SIZE, per_chunk)
        row, at = self._references.rows[number], chunk_coordinates(number, self._meta.counts)
        message = row.mismatch(checks[bad : bad + CHECK_SIZE], self._url, block)
        raise Corrupt(f"{self._path}, chunk {at}: {message}")


class Mapper:
    """Maps arrays of a store; each pack of which an array is a part is mapped once."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._packs: dict[str, npt.NDArray[np.uint8]] = {}
        self._checked: dict[int, tuple[ArrayMeta, str]] = {}  # by identity: many arrays share their metadata

    def map(self, node: Node) -> MappedArray | NotMapped:
        """Return an array in mapped memory, or why it can't be mapped; raise `Corrupt` if a pack is missing."""
        meta = node.meta
        checked = self._checked.get(id(meta))
        if checked is None:
            checked = self._checked[id(meta)] = (meta, self._reason_not_to_map(meta))
        if checked[1]:
            return NotMapped(checked[1])
        references = node.select(range(meta.chunk_count))
        if not len(references) or len(references) != meta.chunk_count:
            return NotMapped("not all of its chunks were written")
        starts = references.run_starts() if len(references) > 1 else [0]
        ranges = []
        for start, stop in itertools.pairwise([*starts, len(references)]):
            row = references.row(start)
            assert row is not None
            if isinstance(row.pack, bytes):
                return NotMapped("it is stored in the metadata")
            ranges.append((row.pack, row.offset, (stop - start) * meta.encoded_size))
            if row.length != meta.encoded_size or row.offset % meta.dtype.alignment:
                return NotMapped(f"its chunks do not have the length, or the alignment, of {meta.dtype}")
        try:
            memory = self._part_of_pack(*ranges[0]) if len(ranges) == 1 else self._pages(ranges)
        except Corrupt as error:
            raise Corrupt(f"{node.path}: {error}") from error
        if memory is None:
            return NotMapped("its chunks are in several places, and are not all whole pages")
        return MappedArray(node, references, memory, self._storage.url)

    def _reason_not_to_map(self, meta: ArrayMeta) -> str:
        if not isinstance(self._storage, LocalStorage):
            return "the store is not in a local folder"
        if not meta.chain.identity or meta.dtype.hasobject:
            return "its chunks are encoded"
        return "" if _follow_each_other(meta) else "its chunks are not parts of its first axis"

    def _part_of_pack(self, key: str, offset: int, size: int) -> npt.NDArray[np.uint8]:
        pack = self._packs.get(key)
        if pack is None:
            with self._requiring(key):
                pack = self._packs[key] = map_file(self._path(key))
        if len(pack) < offset + size:
            raise too_short(self._path(key), offset, offset + size, len(pack))
        return pack[offset : offset + size]

    def _pages(self, ranges: Sequence[tuple[str, int, int]]) -> npt.NDArray[np.uint8] | None:
        parts = [FileRange(self._path(key), offset, size) for key, offset, size in ranges]
        if not are_pages(parts):
            return None
        with self._requiring(" or ".join(dict.fromkeys(key for key, _, _ in ranges))):
            return map_ranges(parts)

    @contextlib.contextmanager
    def _requiring(self, packs: str) -> Iterator[None]:
        """Raise `Corrupt` if the block finds that a pack does not exist."""
        try:
            yield
        except NotFound as error:
            raise Corrupt(missing_message(packs, self._storage.url)) from error

    def _path(self, key: str) -> str:
        assert isinstance(self._storage, LocalStorage)
        return self._storage.path(key)


def _follow_each_other(meta: ArrayMeta) -> bool:
    """Return whether the bytes of the chunks, one after the other, are those of the array in C order."""
    shape, chunks = meta.shape, meta.chunks
    axis = next((i for i, length in enumerate(chunks) if length > 1), len(shape))  # chunks are parts of this axis
    if chunks[axis + 1 :] != shape[axis + 1 :]:
        return False
    is_padded = axis < len(shape) and shape[axis] % chunks[axis] > 0  # behind the values of a chunk at the edge
    return not is_padded or math.prod(shape[:axis]) == 1
