"""Reading arrays in eXmY formats, or regions of them, as `exmy.Quantized`, without decoding their values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import exmy
import numpy as np

from tstore.core.data.joined_codes import Unrepresentable, join_chunks
from tstore.core.data.pieces import ReadJob
from tstore.core.data.reader import new_values, read_chunks
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import Selection, chunk_coordinates, chunk_numbers, covering_chunks
from tstore.core.format.objects.chunk_refs import ChunkSource
from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage
from tstore.errors import Corrupt, InvalidArgument

__all__ = ["PackedRead", "PackedRegion", "codes_meta", "is_packed", "read_packed", "read_packed_chunks"]


def is_packed(meta: ArrayMeta) -> bool:
    """Return whether the chunks of an array are in an eXmY format, compressed or not."""
    return meta.chain.exmy_codec is not None


class PackedRead(NamedTuple):
    """A request to read chunks of an array, by number, without decoding their values."""

    path: str
    meta: ArrayMeta
    source: ChunkSource
    numbers: Sequence[int]


class PackedRegion(NamedTuple):
    """A request for the codes of a region of an array: a slice with a start and a stop for each axis."""

    path: str
    meta: ArrayMeta
    source: ChunkSource
    region: tuple[slice, ...]


def codes_meta(meta: ArrayMeta) -> ArrayMeta:
    """Return the metadata of an array whose values are the bytes of an eXmY array's chunks, before compression.

    It has the same compressors, so codes are read and written without their values, and the same grid, so errors
    name the chunks.
    """
    size, counts = meta.encoded_size, meta.counts or (1,)
    codecs: list[Mapping[str, Any]] = [{"name": "bytes"}, *meta.chain.documents[1:]]
    return ArrayMeta.new((*counts[:-1], counts[-1] * size), "uint8", (*(1,) * (len(counts) - 1), size), codecs)


async def read_packed_chunks(storage: Storage, requests: Sequence[PackedRead]) -> list[list[exmy.Quantized]]:
    """Read and verify the chunks of all requests in one call; chunks at an array's edge are padded."""
    jobs, payloads = [], []
    for path, meta, source, numbers in requests:
        size, counts, stored = meta.encoded_size, meta.counts or (1,), codes_meta(meta)
        out = new_values(path, (len(numbers), size), np.dtype(np.uint8))
        done = 0
        for row in _runs_of_rows(numbers, counts[-1]):
            *leading, last = chunk_coordinates(row.start, counts)
            along = range(last * size, (last + len(row)) * size)
            region = Selection((*(range(i, i + 1) for i in leading), along))
            values = out[done : done + len(row)].reshape(*(1 for _ in leading), -1)
            jobs.append(ReadJob(path, stored, source, region, values))
            done += len(row)
        payloads.append(out)
    await read_chunks(storage, jobs)
    quantized = []
    for request, payload in zip(requests, payloads, strict=True):
        meta, codec = request.meta, request.meta.chain.exmy_codec
        assert codec is not None
        parts = []
        for number, data in zip(request.numbers, payload, strict=True):
            try:
                parts.append(_standard(codec.to_quantized(data, meta.chunks, meta.dtype)))
            except exmy.ExmyError as error:
                chunk = chunk_coordinates(number, meta.counts)
                raise Corrupt(f"{request.path}, chunk {chunk}: its eXmY header does not parse: {error}") from error
        quantized.append(parts)
    return quantized


async def read_packed(storage: Storage, requests: Sequence[PackedRegion]) -> list[exmy.Quantized]:
    """Return the codes of regions; chunks that overlap a region are read whole.

    Raise one `InvalidArgument` that names all arrays whose codes can't be returned, and why.
    """
    reasons = {r.path: "it is not stored in an eXmY format" for r in requests if not is_packed(r.meta)}
    boxes = [covering_chunks(r.region, r.meta.chunks) for r in requests]
    numbers = [chunk_numbers(box, r.meta.counts).tolist() for box, r in zip(boxes, requests, strict=True)]
    for request, selected in zip(requests, numbers, strict=True):
        if request.path not in reasons and request.meta.sparse:
            written = await run(request.source.select, np.array(selected, np.int64))
            if absent := set(selected).difference(written.number.tolist()):
                chunk = chunk_coordinates(min(absent), request.meta.counts)
                reasons[request.path] = f"it is sparse, and chunk {chunk} was never written, so it has no codes"
    reads = [PackedRead(*r[:3], n) for r, n in zip(requests, numbers, strict=True) if r.path not in reasons]
    chunks = iter(await read_packed_chunks(storage, reads) if not reasons else [])
    results = []
    for request, parts in zip(requests, chunks, strict=False):
        try:
            results.append(join_chunks(request.meta, request.region, parts))
        except Unrepresentable as reason:
            reasons[request.path] = str(reason)
    if reasons:
        listed = "; ".join(f"{path}: {reason}" for path, reason in reasons.items())
        raise InvalidArgument(
            f"the values of {', '.join(reasons)} can be read, but not their packed codes. {listed}"
        )
    return results


def _runs_of_rows(numbers: Sequence[int], count: int) -> Iterator[range]:
    """Yield runs of consecutive chunk numbers, split at the rows of a grid with `count` chunks per row."""
    for _, row in itertools.groupby(enumerate(numbers), lambda item: (item[1] - item[0], item[1] // count)):
        members = [number for _, number in row]
        yield range(members[0], members[-1] + 1)


def _standard(q: exmy.Quantized) -> exmy.Quantized:
    """Return the same codes with the format's standard bias, as `exmy.quantize` does; the offsets compensate."""
    f = q.format.standard
    if q.format == f:
        return q
    offsets = np.asarray(q.offsets + (q.format.bias - f.bias), np.int16)
    return exmy.Quantized(f, q.groups, offsets, q.group_scales, q.packed, q.dtype)
