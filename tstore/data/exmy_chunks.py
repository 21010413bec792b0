"""Reading arrays in eXmY formats, or regions of them, as `exmy.Quantized`, without decoding their values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import exmy
import numpy as np

from tstore.data.joined_codes import Unrepresentable, join_chunks
from tstore.data.pieces import ReadJob
from tstore.data.reader import new_values, read_chunks
from tstore.errors import Corrupt, InvalidArgument
from tstore.format.array_metadata import ArrayMeta
from tstore.format.chunk_refs import ChunkSource
from tstore.format.grid import Selection, chunk_numbers, covering_chunks
from tstore.storage.base import Storage

__all__ = ["PackedRead", "PackedRegion", "is_packed", "read_packed", "read_packed_chunks"]


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


async def read_packed_chunks(storage: Storage, requests: Sequence[PackedRead]) -> list[list[exmy.Quantized]]:
    """Read and verify the chunks of all requests in one call; chunks at an array's edge are padded."""
    jobs, payloads = [], []
    for path, meta, source, numbers in requests:
        size = meta.encoded_size
        out = new_values(path, (len(numbers), size), np.dtype(np.uint8))
        # Read the encoded chunks as an array of bytes with the same compressors, so that no value is decoded.
        compressed: list[Mapping[str, Any]] = [{"name": "bytes"}, *meta.chain.documents[1:]]
        stored = ArrayMeta.new((meta.chunk_count * size,), "uint8", (size,), compressed)
        done = 0
        for run in _consecutive(numbers):
            region = Selection((range(run.start * size, run.stop * size),))
            jobs.append(ReadJob(path, stored, source, region, out[done : done + len(run)].reshape(-1)))
            done += len(run)
        payloads.append(out)
    await read_chunks(storage, jobs)
    quantized = []
    for request, payload in zip(requests, payloads, strict=True):
        meta, codec = request.meta, request.meta.chain.exmy_codec
        assert codec is not None
        try:
            quantized.append([_standard(codec.to_quantized(data, meta.chunks, meta.dtype)) for data in payload])
        except exmy.ExmyError as error:
            raise Corrupt(f"{request.path}: the eXmY header of a chunk does not parse: {error}") from error
    return quantized


async def read_packed(storage: Storage, requests: Sequence[PackedRegion]) -> list[exmy.Quantized]:
    """Return the codes of regions; chunks that overlap a region are read whole.

    Raise one `InvalidArgument` that names all arrays whose codes can't be returned, and why.
    """
    reasons = {r.path: "it is not stored in an eXmY format" for r in requests if not is_packed(r.meta)}
    boxes = [covering_chunks(r.region, r.meta.chunks) for r in requests]
    numbers = [chunk_numbers(box, r.meta.counts).tolist() for box, r in zip(boxes, requests, strict=True)]
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


def _consecutive(numbers: Sequence[int]) -> Iterator[range]:
    """Yield the runs of consecutive numbers."""
    for _, run in itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0]):
        members = [number for _, number in run]
        yield range(members[0], members[-1] + 1)


def _standard(q: exmy.Quantized) -> exmy.Quantized:
    """Return the same codes with the format's standard bias, as `exmy.quantize` does; the offsets compensate."""
    f = q.format.standard
    if q.format == f:
        return q
    offsets = np.asarray(q.offsets + (q.format.bias - f.bias), np.int16)
    return exmy.Quantized(f, q.groups, offsets, q.group_scales, q.packed, q.dtype)
