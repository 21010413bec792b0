"""Appends: values past the end of an array, whose region is allotted by the commit.

1. An append is staged past the end of the array as this transaction sees it: whole chunks go into packs, and
   the values of a chunk that already exists in part become a patch. Chunks that are appended along the first axis
   leave the numbers of all others unchanged, so the commit adds their references, and metadata with another shape.
   Along another axis it restates all references with their new numbers, like a resize.
2. If other commits have appended to the array since, or written to it, the commit moves the appended values past
   the newer end (`moved`). If the distance is a multiple of the chunk length, only the numbers of the chunks
   change; otherwise the values are read from this transaction's packs and written to other chunks.
3. That is possible if the transaction has only appended to the array. Once it also writes to the array or resizes
   it, or had created it, its appends are part of these changes, and conflict as they do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import numpy as np
import numpy.typing as npt

from tstore.core.array import Appended
from tstore.core.data.pieces import ReadJob, Values
from tstore.core.data.reader import read_chunks
from tstore.core.data.writer import PackSet, WriteJob
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import (
    Selection,
    axis_runs,
    chunk_number,
    full_boxes,
    part_of,
    partial_projections,
)
from tstore.core.format.objects.documents import Document
from tstore.core.format.objects.segments import SegmentSource
from tstore.core.format.objects.tables import overlay
from tstore.core.format.tree.node import Node
from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage
from tstore.core.transactions.staged_array import Extension, StagedArray
from tstore.errors import Conflict, InvalidArgument, Misuse

__all__ = ["append", "handle", "moved"]

_SLAB_BYTES = 64 << 20
"""The number of values to read and write again at once, unless a row of chunks has more."""


async def append(
    array: StagedArray, packs: PackSet, source: SegmentSource, base: Node, axis: int, values: Values
) -> Extension:
    """Stage values past the end of an axis and return the extension that they are part of.

    `base` is the array in the version on which `array` is based. Nothing is staged if this fails. Raise
    `InvalidArgument` if the values do not fit, `Misuse` if the array was resized meanwhile.
    """
    former = array.meta
    if values.ndim != len(former.shape) or _without(values.shape, axis) != _without(former.shape, axis):
        raise InvalidArgument(
            f"{array.path}: values of shape {values.shape} can't be appended along axis {axis} of an array of "
            f"shape {former.shape}; expected the same length on each other axis"
        )
    start = former.shape[axis]
    meta = _with_length(former, axis, start + values.shape[axis])
    axes = [range(n) for n in meta.shape]
    axes[axis] = range(start, meta.shape[axis])
    per_axis = list(map(axis_runs, axes, meta.shape, meta.chunks))
    patches = [
        (chunk_number(p.chunk, meta.counts), (p.inside, np.array(values[p.result], meta.dtype)))
        for p in partial_projections(per_axis)
    ]
    regions = [(first, part_of(values, region)) for first, _, region in full_boxes(per_axis)]
    job = WriteJob(array.path, meta, regions, segments=[])
    await packs.write([job])
    in_segments = await array.numbers_in_segments(job, source)
    if array.meta is not former:
        raise Misuse(
            f"{array.path} was resized while values were appended, so these are dropped; await one before "
            "starting the other"
        )
    extension = await _extend(array, axis, meta, base)
    array.add_chunks(job, source, in_segments)
    for number, patch in patches:
        array.add_patch(number, patch)
    if array.extension is not None and not meta.chain.lossless:
        extension.kept.append(np.array(values, meta.dtype))
    return extension


async def moved(
    array: StagedArray, node: Node, storage: Storage, packs: PackSet, source: SegmentSource
) -> StagedArray:
    """Return the changes to an array as changes to a newer version of it, to which others have appended.

    Raise `Conflict` if they have appended along another axis.
    """
    extension, shape = array.extension, array.meta.shape
    is_longer = len(node.meta.shape) == len(shape) and node.meta.with_shape(shape).document == array.meta.document
    if extension is not None:
        is_longer = is_longer and _without(node.meta.shape, extension.axis) == _without(shape, extension.axis)
    if not is_longer:
        raise Conflict(
            f"{array.path}: another transaction has appended along another axis, so this one is not committed; "
            "read again and repeat it",
            [array.path],
        )
    if extension is None:  # written chunks keep their numbers
        array.meta = node.meta
        return array
    axis, count = extension.axis, shape[extension.axis] - extension.start
    start = node.meta.shape[axis]
    meta = _with_length(node.meta, axis, start + count)
    newer = StagedArray(array.path, node.meta, replaces_node=False)
    distance = start - extension.start
    if distance % meta.chunks[axis] == 0:
        await _renumber(array, extension, newer, node, meta, source)
    elif extension.kept:
        for values in extension.kept:
            await append(newer, packs, source, _base(newer, node), axis, values)
    else:
        async for values in _slabs(array, extension, distance, storage):
            await append(newer, packs, source, _base(newer, node), axis, values)
    await newer.apply_patches(storage, packs, _base(newer, node))
    extension.start = start
    newer.extension = extension
    return newer


def handle(
    path: str, extension: Extension, start: int, shape: tuple[int, ...], check: Callable[[], None]
) -> Appended:
    """Return the handle of values of this shape, which begin at `start` as long as the extension is not moved.

    `check` raises an error if they have no region.
    """
    before = start - extension.start

    def region() -> tuple[slice, ...]:
        check()
        first, slices = extension.start + before, [slice(n) for n in shape]
        slices[extension.axis] = slice(first, first + shape[extension.axis])
        return tuple(slices)

    return Appended(path, region)


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _with_length(meta: ArrayMeta, axis: int, length: int) -> ArrayMeta:
    return meta.with_shape([length if i == axis else n for i, n in enumerate(meta.shape)])


def _base(array: StagedArray, node: Node) -> Node:
    """Return the node below the staged chunks of an array: without chunks, if these restate them."""
    return Node(node.path, node.metadata, ()) if array.replaces_node else node


async def _extend(array: StagedArray, axis: int, meta: ArrayMeta, base: Node) -> Extension:
    """Give an array the shape in `meta`, longer on one axis; return the extension that has the new part.

    The array keeps the extension if nothing but appends along this axis has changed it.
    """
    extension = array.extension
    if extension is None and array.is_unchanged:
        extension = Extension(axis, array.meta.shape[axis])
    if extension is not None and extension.axis != axis:
        extension = None
    detached = Extension(axis, array.meta.shape[axis])
    if extension is not None and axis == 0:
        array.meta = meta
    else:
        await array.resize(meta.shape, base)
    array.extension = extension
    return detached if extension is None else extension


async def _renumber(
    array: StagedArray,
    extension: Extension,
    newer: StagedArray,
    node: Node,
    meta: ArrayMeta,
    source: SegmentSource,
) -> None:
    """Stage the appended chunks and patches in `newer`, whose chunks have other numbers."""
    axis, counts, chunk = extension.axis, array.meta.counts, array.meta.chunks[extension.axis]
    shift = (node.meta.shape[axis] - extension.start) // chunk
    whole = array.whole_chunks
    rows = await run(overlay, whole.tables) if whole.reads_segments else overlay(whole.tables)

    def places(numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Return which chunks are appended ones, and the new numbers of all."""
        if not len(numbers):
            return np.zeros(0, np.bool_), numbers
        indices = list(np.unravel_index(numbers, counts))
        appended = indices[axis] * chunk >= extension.start
        indices[axis] = indices[axis] + shift
        return appended, np.ravel_multi_index(indices, meta.counts)

    appended, numbers = places(rows.number.astype(np.int64))
    table = rows.take(np.flatnonzero(appended)).with_numbers(numbers[appended])
    patches, patched = array.patches, places(np.array(list(array.patches), np.int64))[1]
    await _extend(newer, axis, meta, node)
    newer.add_chunks(WriteJob(array.path, meta, (), tables=[table]), source)
    for number, former in zip(patched.tolist(), patches, strict=True):
        for patch in patches[former]:
            newer.add_patch(number, patch)


async def _slabs(
    array: StagedArray, extension: Extension, distance: int, storage: Storage
) -> AsyncIterator[Values]:
    """Yield the appended values; each slab ends where a chunk will end once they are moved by a distance."""
    meta, axis = array.meta, extension.axis
    node = Node(array.path, Document(meta.document), array.staged_chunks())
    at, end = extension.start, meta.shape[axis]
    chunk_row = meta.chunks[axis] * max(1, meta.nbytes // max(1, end))
    step = meta.chunks[axis] * max(1, _SLAB_BYTES // chunk_row)
    while at < end:
        stop = min(end, ((at + distance) // step + 1) * step - distance)
        axes = [range(n) for n in meta.shape]
        axes[axis] = range(at, stop)
        selection = Selection(tuple(axes))
        values = np.empty(selection.shape, meta.dtype)
        await read_chunks(storage, [ReadJob(array.path, meta, node, selection, values)])
        yield values
        at = stop
