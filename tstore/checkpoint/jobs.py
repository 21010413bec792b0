"""Leaves of a checkpoint as write jobs: the chunks of each array that this host writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tstore.checkpoint.leaves import Shards
from tstore.checkpoint.streamed import StreamedArray, StreamedRegions
from tstore.data.writer import WriteJob
from tstore.errors import InvalidArgument
from tstore.format.array_metadata import ArrayMeta
from tstore.format.codecs import Codecs
from tstore.format.grid import chunk_coordinates, chunk_counts, chunk_numbers, default_chunks, region_text
from tstore.quantization.policy import Rules

__all__ = ["write_jobs"]

_MIN_TIED = 1 << 20  # bytes of values for which it pays off to look whether another leaf has the same memory

ShardValues = tuple[tuple[int, ...], npt.NDArray[Any]]
"""The first chunk that a shard covers, and the shard's values."""


def write_jobs(leaves: Mapping[str, Any], rules: Rules, host: int, hosts: int) -> list[WriteJob]:
    """Return what this host writes of each leaf; leaves in the same memory, as tied weights, are written once."""
    metas: dict[Any, ArrayMeta] = {}
    firsts: dict[Any, WriteJob] = {}
    jobs = []
    for path, leaf in leaves.items():
        job = _write_job(path, leaf, rules.codecs(path, leaf.dtype), metas, host, hosts)
        memory = _memory(job)
        first = job if memory is None else firsts.setdefault(memory, job)
        if first is not job:
            job.regions, job.same_as = [], first
        jobs.append(job)
    return jobs


def _memory(job: WriteJob) -> Any:
    """Return what only jobs with the same values in the same memory have in common; None for short values."""
    regions = job.regions
    if not isinstance(regions, list) or not regions or regions[0][1].nbytes < _MIN_TIED:
        return None
    places = [(at, v.__array_interface__["data"], v.shape, v.strides, v.dtype.byteorder) for at, v in regions]
    return id(job.meta), *places


def _write_job(
    path: str, leaf: Any, codecs: Codecs, metas: dict[Any, ArrayMeta], host: int, hosts: int
) -> WriteJob:
    """Return the part of a leaf that this host writes."""
    if isinstance(leaf, Shards):
        meta = _meta(path, metas, leaf.shape, leaf.dtype, leaf.shard_shape, codecs)
        regions = list(_shard_regions(path, leaf, meta))
        _check_parts(path, meta, regions, alone=hosts == 1)
        return WriteJob(path, meta, regions)
    if isinstance(leaf, StreamedArray):
        meta = _meta(path, metas, leaf.shape, leaf.dtype, leaf.region_shape, codecs)
        return WriteJob(path, meta, StreamedRegions(path, leaf, meta))
    meta = _meta(path, metas, leaf.shape, leaf.dtype, None, codecs)
    owner = xxhash.xxh3_64_intdigest(path.encode()) % hosts if hosts > 1 else host
    regions = [((0,) * leaf.ndim, leaf)] if owner == host and meta.chunk_count > 0 else []
    return WriteJob(path, meta, regions)


def _meta(
    path: str,
    metas: dict[Any, ArrayMeta],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    shard_shape: tuple[int, ...] | None,
    codecs: Codecs,
) -> ArrayMeta:
    """Return the metadata of an array; arrays with the same arguments share theirs, through `metas`."""
    key = (shape, dtype, shard_shape, codecs if codecs is None or isinstance(codecs, str) else repr(codecs))
    meta = metas.get(key)
    if meta is None:
        chunks = default_chunks(shape, dtype.itemsize, shard_shape)
        try:
            meta = metas[key] = ArrayMeta.new(shape, dtype, chunks, codecs)
        except InvalidArgument as error:
            raise InvalidArgument(f"{path}: {error}") from None
    return meta


def _shard_regions(path: str, leaf: Shards, meta: ArrayMeta) -> Iterator[ShardValues]:
    """Yield the regions of the shards; raise `InvalidArgument` for a shard that covers part of a chunk."""
    for index, values in leaf.parts:
        if values is None:
            raise InvalidArgument(
                f"{path}: the shard at {index} has no values; pass its values, which only restore may leave out"
            )
        if values.size == 0:
            continue
        for s, n, c in zip(index, meta.shape, meta.chunks, strict=True):
            if s.start % c or (s.stop % c and s.stop != n):
                raise InvalidArgument(
                    f"{path}: the shard at {index} is not aligned with chunks of {meta.chunks}, so another host "
                    "would write the same chunk; pass shard_shape=…, the shape of a full shard, on every host"
                )
        yield tuple(s.start // c for s, c in zip(index, meta.chunks, strict=True)), values


def _check_parts(path: str, meta: ArrayMeta, regions: Sequence[ShardValues], *, alone: bool) -> None:
    """Raise `InvalidArgument` if parts overlap, or if the only host leaves out a part of the array."""
    chunks_of_regions = [
        chunk_numbers(
            [range(a, a + n) for a, n in zip(first, chunk_counts(values.shape, meta.chunks), strict=True)],
            meta.counts,
        )
        for first, values in regions
    ]
    numbers, times = np.unique(np.concatenate([np.empty(0, np.int64), *chunks_of_regions]), return_counts=True)
    if (times > 1).any():
        number = numbers[times > 1][0]
        overlapping = [
            region_text(first, v.shape, meta.chunks, meta.shape)
            for (first, v), chunks in zip(regions, chunks_of_regions, strict=True)
            if number in chunks
        ]
        raise InvalidArgument(
            f"{path}: the shards at {overlapping[0]} and {overlapping[1]} overlap; pass each region once"
        )
    if alone and len(numbers) != meta.chunk_count:
        absent = np.setdiff1d(np.arange(len(numbers) + 1), numbers)[0]
        first = chunk_coordinates(absent, meta.counts)
        region = region_text(first, meta.chunks, meta.chunks, meta.shape)
        raise InvalidArgument(
            f"{path}: no shard covers {region} of shape {list(meta.shape)}; pass shards for all of the array, or "
            "hosts=… if other hosts save the rest"
        )
