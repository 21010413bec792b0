"""Copy an array into a transaction, from a version or a transaction of the same or another store.

1. If the grid and the codecs stay the same, the encoded chunks are copied: each is verified, and none is decoded.
   In the same store the new array refers to the chunks of the old one, so no bytes are copied.
2. Otherwise values are read and written in boxes of whole new chunks, so that each of these is written once. A box
   has a bounded size; within that, it is as large as the old chunks, since these may be read once for
   each box that they touch.
3. A sparse array is copied chunk by chunk: those of the copy that have values of a chunk that exists.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.core.array import Array
from tstore.core.data.pieces import ReadJob
from tstore.core.data.reader import read_chunks
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.codecs import Codecs
from tstore.core.format.arrays.grid import chunk_coordinates, chunk_region, whole
from tstore.core.format.arrays.views import view_chunks
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.tree.node import Node
from tstore.core.log.expiry import guard_expiry
from tstore.core.log.reader import LogReader
from tstore.core.runtime.pool import run
from tstore.core.snapshot import Snapshot, array_node
from tstore.core.transactions.handles import HandleSource, check_handle, create_array
from tstore.core.transactions.staging import Staging
from tstore.errors import InvalidArgument, NotFound, TStoreError

__all__ = ["copy_array", "copy_stored_chunks", "verified_chunks"]

_BOX_BYTES = 48 << 20
"""The bytes of values, or of encoded chunks, in memory at once, unless one chunk has more."""

_LOOKUPS = 1 << 14  # chunks whose references are read at once
_FEW_CHUNKS = 1 << 10  # the chunks of a smaller sparse copy are looked up one by one


class _Stored(NamedTuple):
    """The chunks of a whole array, as of a version in a log, or of a transaction that is based on it, if any."""

    log: LogReader
    version: int
    node: Node
    transaction: Staging | None


async def copy_array(
    staging: Staging, source: Array, path: str, chunks: Sequence[int] | None, codecs: Codecs, *, same_codecs: bool
) -> Array:
    """Stage a copy of an array or a view with other chunks, or with other codecs unless `same_codecs`."""
    if not isinstance(source, Array):
        raise InvalidArgument(
            f"{path}: the source must be a tstore.Array, not a {type(source).__name__}; to store values in "
            "memory, call create_array, then write"
        )
    meta = ArrayMeta.new(
        source.shape,
        source.dtype,
        source.chunks if chunks is None else chunks,
        source.codecs if same_codecs else codecs,
        source.fill_value,
        source.attributes,
        source.dimension_names,
        sparse=source.sparse,
    )
    stored = await _stored(source)
    target = await create_array(staging, path, meta)
    path = target.path
    try:
        if stored is None or not _same_chunks(stored.node.meta, meta):
            await _copy_values(source, target, meta)
        elif stored.log is staging.reader and stored.transaction in (None, staging):
            await check_handle(target)
            await staging.keep_array(path, meta, stored.node.tables, stored.version)
        else:
            tables = [await _written(staging, stored, rows) async for rows in _in_batches(stored)]
            await check_handle(target)
            await staging.adopt_array(path, meta, ChunkTable.overlay(tables))
    except BaseException:
        with contextlib.suppress(TStoreError):  # the transaction may have ended, or the array was deleted
            await check_handle(target)
            await staging.delete(path)
        raise
    return target


async def _stored(array: Array) -> _Stored | None:
    """Return the chunks of an array, or None for a view of a part and for a plain Zarr array."""
    origin, path, view, meta = array.parts
    if isinstance(origin, Snapshot):
        await origin.read_nodes([path])
        stored = _Stored(origin.log, origin.version, array_node(origin.tree, path, origin.location), None)
    elif isinstance(origin, HandleSource):
        node, staging = await origin.node(path, meta), origin.staging
        stored = _Stored(staging.reader, staging.base_version, node, staging)
    else:  # a plain Zarr array
        return None
    return stored if view.is_whole(stored.node.meta.shape) else None


def _same_chunks(mine: ArrayMeta, other: ArrayMeta) -> bool:
    """Return whether the encoded chunks of two arrays of one dtype and fill value have the same bytes."""
    return (mine.shape, mine.chunks, mine.chain.documents) == (other.shape, other.chunks, other.chain.documents)


# ---- encoded chunks


async def copy_stored_chunks(staging: Staging, source: Snapshot, prior: Snapshot | None) -> None:
    """Stage all arrays of a snapshot of another store, with those of their chunks that exist, encoded as they are.

    Refer to the chunks of `prior`, a snapshot of this store, that have the same checksums. Raise `Corrupt`, with
    the path and the chunk, if a chunk of the source is damaged.
    """
    await source.read_nodes()
    paths = source.paths()
    if prior is not None:
        await prior.read_nodes(paths)
    for path in paths:
        node = array_node(source.tree, path, source.location)
        earlier = None if prior is None else prior.tree.nodes.get(path)
        rows, changed = await run(_compared, node, earlier)
        reused = sum(row.length for row in rows)
        stored = _Stored(source.log, source.version, node, None)
        for batch in _batched(changed):
            rows += (await _written(staging, stored, batch)).rows
        rows.sort(key=lambda row: row.number)
        await staging.adopt_array(path, node.meta, ChunkTable.from_rows(rows), reused)


def _compared(node: Node, earlier: Node | None) -> tuple[list[ChunkRow], list[ChunkRow]]:
    """Return the references of an earlier array to equal chunks, and those of `node` to all others."""
    same: list[ChunkRow] = []
    changed: list[ChunkRow] = []
    is_comparable = earlier is not None and earlier.document == node.document
    for row in node.chunks.rows:
        prior = earlier.row(row.number) if earlier is not None and is_comparable else None
        if prior is not None and (prior.length, prior.checks) == (row.length, row.checks):
            same.append(prior)
        else:
            changed.append(row)
    return same, changed


def _rows(node: Node) -> list[ChunkRow]:
    return node.chunks.rows


async def verified_chunks(source: Snapshot) -> int:
    """Read all chunks of a snapshot that exist, and return their bytes; raise `Corrupt` if one is damaged."""
    await source.read_nodes()
    size = 0
    for path in source.paths():
        stored = _Stored(source.log, source.version, array_node(source.tree, path, source.location), None)
        for batch in _batched(await run(_rows, stored.node)):
            size += sum(map(len, await _read(stored, batch)))
    return size


def _batched(rows: Sequence[ChunkRow]) -> Iterator[list[ChunkRow]]:
    """Yield the references in batches of about `_BOX_BYTES` encoded bytes."""
    batch, size = list[ChunkRow](), 0
    for row in rows:
        if batch and size + row.length > _BOX_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(row)
        size += row.length
    if batch:
        yield batch


async def _in_batches(stored: _Stored) -> AsyncIterator[list[ChunkRow]]:
    """Yield the references to all chunks, a few at a time; raise `NotFound` if one of a dense array is missing."""
    node = stored.node
    meta = node.meta

    def references() -> Iterator[list[ChunkRow]]:
        if meta.sparse:
            yield node.chunks.rows
            return
        for start in range(0, meta.chunk_count, _LOOKUPS):
            numbers = range(start, min(start + _LOOKUPS, meta.chunk_count))
            rows = node.select(numbers).rows
            if len(rows) < len(numbers):
                missing = min(set(numbers).difference(row.number for row in rows))
                raise NotFound(
                    f"{stored.log.storage.url}: chunk {chunk_coordinates(missing, meta.counts)} of {node.path} "
                    "was never written; write it before the array is copied"
                )
            yield rows

    tables = references()
    while (rows := await guard_expiry(stored.log, stored.version, run(next, tables, None))) is not None:
        for batch in _batched(rows):
            yield batch


async def _read(stored: _Stored, rows: Sequence[ChunkRow]) -> list[npt.NDArray[np.uint8]]:
    """Read and verify encoded chunks."""
    data = [np.empty(row.length, np.uint8) for row in rows]
    jobs = [_encoded_read(stored, row, out) for row, out in zip(rows, data, strict=True)]
    await guard_expiry(stored.log, stored.version, read_chunks(stored.log.storage, jobs))
    return data


async def _written(staging: Staging, stored: _Stored, rows: Sequence[ChunkRow]) -> ChunkTable:
    """Copy encoded chunks into a pack and return the references to the copies."""
    data = await _read(stored, rows)
    async with staging.operation(), staging.heartbeat():
        key, offset = await staging.packs.write_bytes([chunk.data for chunk in data])
    offsets = itertools.accumulate([row.length for row in rows[:-1]], initial=offset)
    copies = [msgspec.structs.replace(r, pack=key, offset=at) for r, at in zip(rows, offsets, strict=True)]
    return ChunkTable.from_rows(copies)


def _encoded_read(stored: _Stored, row: ChunkRow, out: npt.NDArray[np.uint8]) -> ReadJob:
    """Return the job that reads and verifies the bytes of a chunk, as if they were an unencoded array."""
    label = f"{stored.node.path}, chunk {chunk_coordinates(row.number, stored.node.meta.counts)}, encoded"
    meta = ArrayMeta.new((row.length,), "uint8", (max(1, row.length),))
    return ReadJob(
        label, meta, ChunkTable.from_rows([msgspec.structs.replace(row, number=0)]), whole(meta.shape), out
    )


# ---- values


async def _copy_values(source: Array, target: Array, meta: ArrayMeta) -> None:
    """Copy values in boxes of whole chunks of the target; a sparse array keeps its holes."""
    if not meta.sparse:
        for box in _boxes(meta, source.chunks, _BOX_BYTES):
            await target[box].write(await source[box].read())
        return
    for box in await _touched(source, meta) if meta.chunk_count > _FEW_CHUNKS else _boxes(meta, source.chunks, 0):
        view = source[box]
        if (await view.explain()).chunks:
            await target[box].write(await view.read())


async def _touched(source: Array, meta: ArrayMeta) -> Iterator[tuple[slice, ...]]:
    """Return the regions of the chunks of a sparse copy that may have values of chunks that exist."""
    origin, path, view, stored = source.parts
    numbers = None if view.has_points else await origin.stored_chunks(path, stored)
    if numbers is None:
        return _boxes(meta, source.chunks, 0)
    parts = view_chunks(view, stored.shape, stored.chunks, numbers, meta.chunks)
    touched = await run(functools.reduce, np.union1d, parts, np.empty(0, np.int64))
    places = (chunk_coordinates(number, meta.counts) for number in touched.tolist())
    return (chunk_region(place, meta.chunks, meta.shape) for place in places)


def _boxes(meta: ArrayMeta, source_chunks: Sequence[int], budget: int) -> Iterator[tuple[slice, ...]]:
    """Yield regions of whole chunks that partition an array, each of at most `budget` bytes or of one chunk.

    They first grow to the length of a source chunk on each axis, the shortest first, then along the last axes.
    """
    if 0 in meta.shape:
        return
    counts, sides = meta.counts, [1] * len(meta.counts)
    room = budget // max(1, meta.chunk_size * meta.dtype.itemsize)  # in chunks
    wanted = [min(n, -(-s // c)) for n, s, c in zip(counts, source_chunks, meta.chunks, strict=True)]
    for axis in sorted(range(len(sides)), key=wanted.__getitem__):
        sides[axis] = max(1, min(wanted[axis], room))
        room //= sides[axis]
    for axis in reversed(range(len(sides))):
        growth = max(1, min(-(-counts[axis] // sides[axis]), room))
        sides[axis] *= growth
        room //= growth
    steps = [
        [slice(i * c, min((i + side) * c, n)) for i in range(0, count, side)]
        for count, side, c, n in zip(counts, sides, meta.chunks, meta.shape, strict=True)
    ]
    yield from itertools.product(*steps)
