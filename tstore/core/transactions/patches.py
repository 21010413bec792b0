"""Patches: values for a part of a chunk, applied to the chunk when the transaction commits.

A lossy codec must not change those values of a patched chunk that no patch covers. So the chunk is encoded with
the scales it had, where they can represent the new values, and decoded again to compare. If values change that no
patch covers, for instance because a larger value raises the exponent offset of its scale group, the write is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.core.data.pieces import ReadJob
from tstore.core.data.reader import read_chunks
from tstore.core.data.writer import PackSet, WriteJob
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import Selection, chunk_coordinates
from tstore.core.format.arrays.points import PointProjection, Target
from tstore.core.format.checksums import block_checks
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.runtime.pool import each, run
from tstore.core.storage.base import Storage
from tstore.errors import Corrupt, InvalidArgument

__all__ = ["Patch", "Region", "assign", "whole_chunk", "write_patched"]

Patch = tuple[tuple[slice, ...] | Target, npt.NDArray[Any]]
"""The elements of a chunk to change, and their values."""
Region = tuple[tuple[int, ...], npt.NDArray[Any]]
"""The coordinates of the first chunk of some whole chunks, and their values."""


def whole_chunk(
    meta: ArrayMeta, points: PointProjection, shape: Sequence[int], values: npt.NDArray[Any]
) -> Region:
    """Return a chunk of this shape with all elements selected."""
    chunk = np.empty(meta.chunks, meta.dtype)
    target, chosen = points.patch(values, meta.dtype)
    target.assign(chunk, chosen)
    return points.chunk, chunk[tuple(map(slice, shape))]


def assign(chunk: npt.NDArray[Any], inside: tuple[slice, ...] | Target, values: Any) -> None:
    """Set some elements of a chunk."""
    if isinstance(inside, Target):
        inside.assign(chunk, values)
    else:
        chunk[inside] = values


async def write_patched(
    storage: Storage,
    packs: PackSet,
    path: str,
    meta: ArrayMeta,
    patches: Mapping[int, tuple[Patch, ...]],
    rows: Mapping[int, ChunkRow],
) -> Sequence[ChunkRow]:
    """Write chunks with their patches and return the references; `rows` are those of the chunks that exist.

    Raise `InvalidArgument` if a lossy codec would change values of a chunk that no patch covers.
    """
    if meta.chain.lossless:
        return await _write_exact(storage, packs, path, meta, patches, rows)
    from tstore.core.data.encoded_chunks import read_encoded

    encoded = dict.fromkeys(patches, b"")

    def encode(number: int, previous: memoryview | None) -> None:
        at = chunk_coordinates(number, meta.counts)
        encoded[number] = _reencoded(path, meta, at, patches[number], previous)

    await read_encoded(storage, path, rows.values(), lambda row, data: encode(row.number, data.data))
    await each(lambda number: encode(number, None), [n for n in patches if n not in rows])
    pack, offset = await packs.write_bytes(list(encoded.values()))
    checks = await run(lambda: [block_checks(memoryview(data)) for data in encoded.values()])
    offsets = accumulate(map(len, encoded.values()), initial=offset)
    written = zip(encoded.items(), offsets, checks, strict=False)
    return [ChunkRow(number, pack, start, len(data), check) for (number, data), start, check in written]


async def _write_exact(
    storage: Storage,
    packs: PackSet,
    path: str,
    meta: ArrayMeta,
    patches: Mapping[int, tuple[Patch, ...]],
    rows: Mapping[int, ChunkRow],
) -> Sequence[ChunkRow]:
    chunks = {n: np.full(meta.chunks, meta.fill_value, meta.dtype) for n in patches}
    await read_chunks(storage, [_read_job(path, meta, n, row, chunks[n]) for n, row in rows.items()])
    for number, chunk in chunks.items():
        for inside, values in patches[number]:
            assign(chunk, inside, values)
    coordinates = [chunk_coordinates(n, meta.counts) for n in patches]
    job = WriteJob(path, meta, list(zip(coordinates, chunks.values(), strict=True)))
    await packs.write([job])
    return job.rows


def _read_job(path: str, meta: ArrayMeta, number: int, row: ChunkRow, out: npt.NDArray[Any]) -> ReadJob:
    """Return the job that reads one chunk, including its part beyond the array's edge."""
    chunk = meta.with_shape(meta.chunks)
    source = ChunkTable.from_rows([msgspec.structs.replace(row, number=0)])
    selection = Selection(tuple(range(n) for n in chunk.shape))
    return ReadJob(f"{path} (chunk number {number})", chunk, source, selection, out)


def _reencoded(
    path: str,
    meta: ArrayMeta,
    coordinates: tuple[int, ...],
    patches: Sequence[Patch],
    previous: memoryview | None,
) -> bytes:
    """Return the encoded bytes of a patched chunk; `previous` are those without the patches, if it exists."""
    chunk = np.full(meta.chunks, meta.fill_value, meta.dtype)
    if previous is not None:
        try:
            meta.chain.decode(previous, chunk)
        except Corrupt as error:
            raise Corrupt(f"{path}, chunk {coordinates}: {error}") from error
    for inside, values in patches:
        assign(chunk, inside, values)
    data = meta.chain.reencode(chunk, np.empty(meta.chain.out_size, np.uint8), previous)
    decoded = np.empty_like(chunk)
    meta.chain.decode(data, decoded)
    differ = decoded.reshape(-1, 1).view(np.uint8) != chunk.reshape(-1, 1).view(np.uint8)
    changed = differ.any(axis=1).reshape(chunk.shape)
    for inside, _ in patches:
        assign(changed, inside, False)
    in_array = tuple(slice(n - i * c) for i, n, c in zip(coordinates, meta.shape, meta.chunks, strict=True))
    count = np.count_nonzero(changed[in_array])
    if count:
        raise InvalidArgument(
            f"{path}, chunk {coordinates}: writing a part of it would change {count} other values, "
            "because its codec is lossy, so the write is refused; write the whole chunk, or create the array "
            "with smaller chunks or without a lossy codec"
        )
    return bytes(data)
