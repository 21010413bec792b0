"""The reads of a restore: whole arrays, or the regions that `Shards` ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.checkpoint.leaves import Destination, ShardLayout, Shards, dtype_of
from tstore.checkpoint.per_host import with_values
from tstore.checkpoint.request import Request
from tstore.checkpoint.source import Source
from tstore.core.data.destinations import note_partly_read
from tstore.core.data.pieces import ReadJob, StackJob
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import Selection, chunk_number, may_overlap, whole
from tstore.errors import InvalidArgument

if TYPE_CHECKING:
    from tstore.core.data.mapping import MappedArray
    from tstore.sharding import Index

__all__ = ["Reading", "RestorePlan", "map_leaves", "unallocated"]

_MAX_STACK = 1 << 20
"""The maximum bytes of an array whose parts are read as one stack of chunks into one block of memory."""

Allocate = Callable[[str, Sequence[int], np.dtype[Any]], npt.NDArray[Any]]
"""A function from a path, a shape and a dtype to the array to read values into."""


class RestorePlan(NamedTuple):
    """The bytes that a restore of `version` would read.

    `bytes_read` counts the bytes of packs that are read; `bytes_needed` estimates how many bytes the restored
    values take, including those that are stored in the metadata and need no read. `arrays` has that estimate for
    each path: the stored bytes of an array, times the share of its values that is restored. With `map=True` all
    of this is of the arrays that can't be mapped, and `copied` has the reason by path.
    """

    version: int
    bytes_needed: int
    bytes_read: int
    arrays: dict[str, int]
    copied: dict[str, str]

    def __repr__(self) -> str:
        sizes = f"{self.bytes_read} bytes read, {self.bytes_needed} needed"
        return f"<tstore.RestorePlan version={self.version}: {len(self.arrays)} arrays, {sizes}>"


class Reading:
    """The reads of one restore: the whole array for a path, or its parts if the leaf of the target is `Shards`."""

    def __init__(self, source: Source, request: Request, allocate: Allocate) -> None:
        self._source = source
        self._request = request
        self._allocate = allocate
        self._arrays: dict[str, Any] = {}
        self._value_counts: dict[str, int] = {}  # the number of values that the target asks for, by path
        self._jobs: list[ReadJob | StackJob] = []
        self._plans: dict[tuple[ShardLayout, ArrayMeta], _ShardPlan] = {}

    def add(self, path: str, leaf: Any) -> None:
        """Add the reads of an array; `leaf` is the target's leaf at this path, or None without a target."""
        node = self._source.node(path)
        meta = node.meta
        dtype = self._request.dtype(path, meta.dtype, None if leaf is None else dtype_of(path, leaf))
        if isinstance(leaf, Destination):
            _check_parts(path, leaf)
            self._arrays[path] = leaf
            self._jobs += [ReadJob.of(node, out, _selection(index)) for index, out in leaf.parts]
            self._value_counts[path] = sum(out.size for _, out in leaf.parts)
            return
        if not isinstance(leaf, Shards):
            self._arrays[path] = out = self._allocate(path, meta.shape, dtype)
            self._jobs.append(ReadJob(node.path, meta, node, whole(meta.shape), out))
            self._value_counts[path] = out.size
            return
        plan = self._plans.get((leaf.layout, meta))
        if plan is None:
            plan = self._plans[leaf.layout, meta] = _plan(leaf.layout, meta)
        self._value_counts[path] = plan.size
        stack = plan.stack
        if stack is not None and dtype == meta.dtype:
            out = self._allocate(path, (len(stack), *meta.chunks), dtype)
            self._jobs.append(StackJob(node.path, meta, node, stack, out))
            self._arrays[path] = leaf.with_values([out[number - stack.start] for number in plan.numbers])
            return
        values = [self._allocate(path, shape, dtype) for shape in leaf.layout.part_shapes]
        self._jobs += [ReadJob.of(node, out, part) for part, out in zip(plan.selections, values, strict=True)]
        self._arrays[path] = leaf.with_values(values)

    async def read(self) -> dict[str, Any]:
        """Read everything; return the arrays, `Shards` and values of hosts by path.

        If that fails, a note of the error has the paths of the destinations that are no longer whole.
        """
        snapshot = self._source.snapshot
        unfinished: set[str] = set()
        try:
            await snapshot.read_jobs(self._jobs, unfinished)
        except BaseException as error:
            into = [path for path, leaf in self._arrays.items() if isinstance(leaf, Destination)]
            note_partly_read(error, [path for path in into if self._source.stored[path] in unfinished])
            raise
        if not (places := self._source.places):
            return self._arrays
        return with_values(self._arrays, places, snapshot.location, of_all_hosts=self._request.per_host == "all")

    def plan(self) -> RestorePlan:
        """Return what `read` would read."""
        snapshot = self._source.snapshot
        needed = {}
        for path, count in self._value_counts.items():
            node = self._source.node(path)
            stored_bytes = node.stored_bytes
            needed[path] = round(stored_bytes * count / max(1, math.prod(node.meta.shape)))
        return RestorePlan(snapshot.version, sum(needed.values()), snapshot.planned_bytes(self._jobs), needed, {})


async def map_leaves(
    source: Source, request: Request, leaves: Mapping[str, Any]
) -> tuple[dict[str, MappedArray], dict[str, str]]:
    """Return the arrays that can be mapped, by path, and why each of the others can't be."""
    copied = {
        path: reason for path, leaf in leaves.items() if (reason := _reason_to_copy(source, request, path, leaf))
    }
    rest = [path for path in leaves if path not in copied]
    from tstore.core.data.mapping import MappedArray

    found = dict(zip(rest, await source.snapshot.map_nodes(map(source.node, rest)), strict=True))
    copied |= {path: array.reason for path, array in found.items() if not isinstance(array, MappedArray)}
    return {path: array for path, array in found.items() if isinstance(array, MappedArray)}, copied


def _reason_to_copy(source: Source, request: Request, path: str, leaf: Any) -> str:
    """Return why a leaf of the target is not the array as it is stored, "" if it is."""
    if path in source.places:
        return "each host has its own value"
    if isinstance(leaf, Shards):
        return "the target asks for parts of it"
    stored = source.node(path).meta.dtype
    dtype = request.dtype(path, stored, None if leaf is None else dtype_of(path, leaf))
    return "" if dtype == stored else f"it is cast to {dtype}"


def _check_parts(path: str, leaf: Destination) -> None:
    """Raise `InvalidArgument` unless each region is within the array, and its memory has that shape and dtype."""
    for index, out in leaf.parts:
        within = len(index) == len(leaf.shape) and all(map(_is_within, index, leaf.shape))
        if (
            not within
            or not out.flags.writeable
            or out.shape != tuple(side.stop - side.start for side in index)
            or out.dtype != leaf.dtype
        ):
            raise InvalidArgument(
                f"{path}: {out.dtype}{list(out.shape)} can't hold the region {index!r:.300} of {leaf.dtype}"
                f"{list(leaf.shape)}; pass writable memory with the region's shape and dtype"
            )
        if may_overlap(out.shape, out.strides, out.itemsize):
            raise InvalidArgument(
                f"{path}: elements of the target share memory: its strides are {out.strides} bytes; pass an array "
                "or a tensor with memory for each"
            )


def _is_within(side: Any, length: int) -> bool:
    """Return whether a side of a region is a slice with a start and a stop within a length."""
    return (
        type(side) is slice
        and type(side.start) is type(side.stop) is int
        and side.step in (None, 1)
        and 0 <= side.start <= side.stop <= length
    )


class _ShardPlan(NamedTuple):
    """How the parts of a layout are read: each with its own selection, or all as one stack of consecutive chunks.

    There is a stack if each part is one chunk, and the chunks are short and consecutive; `numbers` are the chunk
    numbers of the parts. `size` is the number of values in all parts.
    """

    selections: list[Selection]
    size: int
    stack: range | None
    numbers: list[int]


def _plan(layout: ShardLayout, meta: ArrayMeta) -> _ShardPlan:
    selections = [_selection(index) for index in layout.indices]
    size = min(math.prod(meta.shape), sum(map(math.prod, layout.part_shapes)))  # parts may overlap
    starts = [tuple(side.start for side in index) for index in layout.indices]
    chunks = meta.chunks
    if (
        len(starts) < 2
        or layout.shape != meta.shape
        or not meta.chain.identity
        or meta.sparse
        or meta.encoded_size * len(starts) > _MAX_STACK
        or any(shape != chunks for shape in layout.part_shapes)
        or any(a % c for start in starts for a, c in zip(start, chunks, strict=True))
    ):
        return _ShardPlan(selections, size, None, [])
    numbers = [chunk_number([a // c for a, c in zip(start, chunks, strict=True)], meta.counts) for start in starts]
    stack = range(min(numbers), max(numbers) + 1)
    return _ShardPlan(selections, size, stack if len(stack) == len(set(numbers)) else None, numbers)


def _selection(index: Index) -> Selection:
    return Selection(tuple(range(side.start, side.stop) for side in index))


def unallocated(path: str, shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array of this shape whose elements share their memory, to plan reads with."""
    return np.ndarray(shape, dtype, np.empty(dtype.itemsize, np.uint8), strides=[0] * len(shape))
