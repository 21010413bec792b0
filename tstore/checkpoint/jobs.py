"""Leaves of a checkpoint as write jobs: the chunks of each array that this host writes.

The regions of a `StreamedArray` are read as they are saved, so that it need never be in memory as a whole."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tstore.checkpoint.leaves import ShardLayout, Shards
from tstore.core.data.writer import WriteJob
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.codecs import Codecs
from tstore.core.format.arrays.dtypes import dtype_named
from tstore.core.format.arrays.grid import (
    chunk_coordinates,
    chunk_counts,
    chunk_numbers,
    default_chunks,
    region_text,
)
from tstore.errors import Corrupt, InvalidArgument
from tstore.quantization.policy import Rules

__all__ = ["StreamedArray", "StreamedRegions", "write_jobs"]

_REGION_BYTES = 32 << 20

Region = tuple[slice, ...]
"""A slice with a start and a stop for each axis."""


class StreamedArray:
    """A leaf of `save` whose values are read region by region, by `read`, in the threads that write them.

    `unit` is the shape of the pieces in which the source stores the array, if any: regions consist of whole
    pieces, so that each piece is read once. A region is about 32 MiB, or one piece if that is larger. If a garbage
    collection intervenes, `save` reads all regions again.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        read: Callable[[Region], npt.NDArray[Any]],
        unit: Sequence[int] | None = None,
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.read = read
        self.region_shape = _region_shape(self.shape, dtype.itemsize, unit or (1,) * len(self.shape))


class StreamedRegions:
    """The regions of a streamed array and their values, as `WriteJob` takes them; each iteration reads again."""

    def __init__(self, path: str, source: StreamedArray, meta: ArrayMeta) -> None:
        self._path, self._source, self._meta = path, source, meta

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], npt.NDArray[Any]]]:
        source, chunks = self._source, self._meta.chunks
        if 0 in source.shape:
            return
        sides = zip(source.shape, source.region_shape, strict=True)
        for region in itertools.product(*([slice(i, min(i + r, n)) for i in range(0, n, r)] for n, r in sides)):
            values = source.read(region)
            shape = tuple(s.stop - s.start for s in region)
            if values.shape != shape or values.dtype != source.dtype:
                raise Corrupt(
                    f"{self._path}: its source returned {values.dtype} values of shape {values.shape} for a "
                    f"region of {source.dtype} values of shape {shape}; check the source"
                )
            yield tuple(s.start // c for s, c in zip(region, chunks, strict=True)), values


def _region_shape(shape: tuple[int, ...], itemsize: int, unit: Sequence[int]) -> tuple[int, ...]:
    """Return `unit`, grown to a multiple along the last axes until it has about `_REGION_BYTES`."""
    sides = [max(1, min(u, n)) for u, n in zip(unit, shape, strict=True)]
    for axis in reversed(range(len(sides))):
        factor = max(1, _REGION_BYTES // (math.prod(sides) * itemsize))
        factor = 1 << (factor.bit_length() - 1)  # so that chunks of a suitable size divide a region
        sides[axis] = min(sides[axis] * factor, max(1, shape[axis]))
        if sides[axis] < shape[axis]:
            break
    return tuple(sides)


_MIN_TIED = 1 << 20  # bytes of values; for fewer, looking for another leaf in the same memory does not pay off

_ORIGINS = [(0,) * ndim for ndim in range(65)]  # by number of axes


def write_jobs(leaves: Mapping[str, Any], rules: Rules, host: int, hosts: int) -> list[WriteJob]:
    """Return the write jobs of this host; leaves in the same memory (tied weights) are written once."""
    builder = _JobBuilder(host, hosts)
    first_jobs: dict[Any, WriteJob] = {}  # the first job of each memory
    jobs = []
    for path, leaf in leaves.items():
        job = builder.job(path, leaf, rules.codecs(path, leaf.dtype))
        memory = _memory(job)
        first = job if memory is None else first_jobs.setdefault(memory, job)
        if first is not job:
            job.regions, job.same_as = [], first
        jobs.append(job)
    return jobs


def _memory(job: WriteJob) -> Any:
    """Return a key that is equal for jobs with the same values in the same memory, None for short values."""
    regions = job.regions
    if not isinstance(regions, list) or not regions or regions[0][1].nbytes < _MIN_TIED:
        return None
    places = [(at, v.__array_interface__["data"], v.shape, v.strides, v.dtype.byteorder) for at, v in regions]
    return id(job.meta), *places  # equal metadata is one object


class _JobBuilder:
    """Makes the write jobs of `host` in a save by `hosts` hosts.

    The metadata and the shard plan are computed once for all arrays with the same shape, dtype, codecs and shards.
    """

    def __init__(self, host: int, hosts: int) -> None:
        self._host = host
        self._hosts = hosts
        self._metas: dict[Any, ArrayMeta] = {}
        self._plans: dict[Any, _ShardPlan] = {}

    def job(self, path: str, leaf: npt.NDArray[Any] | Shards | StreamedArray, codecs: Codecs) -> WriteJob:
        """Return the part of a leaf that this host writes."""
        if isinstance(leaf, np.ndarray):
            return self._whole_job(path, leaf, codecs)
        if isinstance(leaf, Shards):
            return self._shard_job(path, leaf, codecs)
        meta = self._meta(path, leaf.shape, leaf.dtype, leaf.region_shape, codecs)
        return WriteJob(path, meta, StreamedRegions(path, leaf, meta))

    def _whole_job(self, path: str, leaf: npt.NDArray[Any], codecs: Codecs) -> WriteJob:
        meta = self._meta(path, leaf.shape, leaf.dtype, None, codecs)
        hosts = self._hosts
        owner = xxhash.xxh3_64_intdigest(path.encode()) % hosts if hosts > 1 else self._host
        return WriteJob(path, meta, [(_ORIGINS[leaf.ndim], leaf)] if owner == self._host and leaf.size else ())

    def _shard_job(self, path: str, leaf: Shards, codecs: Codecs) -> WriteJob:
        layout = leaf.layout
        for index, values in zip(layout.indices, leaf.values, strict=True):
            if values is None:
                raise InvalidArgument(
                    f"{path}: the shard at {index} has no values; pass values for every shard, because only a "
                    "target of restore may lack them"
                )
        key = (layout, _hashable(codecs))
        plan = self._plans.get(key)
        if plan is None:
            meta = self._meta(path, layout.shape, layout.dtype, layout.shard_shape, codecs)
            plan = self._plans[key] = _plan(path, layout, meta, alone=self._hosts == 1)
        parts = zip(plan.first_chunks, leaf.values, strict=True)
        regions = [(chunk, values) for chunk, values in parts if chunk is not None and values is not None]
        return WriteJob(path, plan.meta, regions)

    def _meta(
        self,
        path: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        shard_shape: tuple[int, ...] | None,
        codecs: Codecs,
    ) -> ArrayMeta:
        """Return the metadata of an array; arrays with the same arguments share theirs."""
        key = (shape, dtype, shard_shape, _hashable(codecs))
        meta = self._metas.get(key)
        if meta is None:
            new = _new_meta if codecs is None or isinstance(codecs, str) else _new_meta.__wrapped__
            try:
                meta = self._metas[key] = new(shape, dtype, shard_shape, codecs)
            except InvalidArgument as error:
                raise InvalidArgument(f"{path}: {error}") from None
        return meta


@functools.lru_cache(maxsize=4096)  # the saves of a job have similar arrays
def _new_meta(
    shape: tuple[int, ...], dtype: np.dtype[Any], shard_shape: tuple[int, ...] | None, codecs: Codecs
) -> ArrayMeta:
    return ArrayMeta.new(shape, dtype_named(dtype), default_chunks(shape, dtype.itemsize, shard_shape), codecs)


class _ShardPlan(NamedTuple):
    """The metadata of arrays with one layout, and the first chunk of each part (None for an empty part)."""

    meta: ArrayMeta
    first_chunks: list[tuple[int, ...] | None]


def _hashable(codecs: Codecs) -> Any:
    return codecs if codecs is None or isinstance(codecs, str) else repr(codecs)


def _plan(path: str, layout: ShardLayout, meta: ArrayMeta, *, alone: bool) -> _ShardPlan:
    """Return the plan of a layout; raise `InvalidArgument` if a part covers only a piece of a chunk.

    Raise it also if parts overlap, or if they leave out a region of the array and no other host could save it.
    """
    first_chunks: list[tuple[int, ...] | None] = []
    for index, shape in zip(layout.indices, layout.part_shapes, strict=True):
        if 0 in shape:
            first_chunks.append(None)
            continue
        for s, n, c in zip(index, meta.shape, meta.chunks, strict=True):
            if s.start % c or (s.stop % c and s.stop != n):
                raise InvalidArgument(
                    f"{path}: the shard at {index} is not aligned with chunks of {meta.chunks}, so another host "
                    "would write the same chunk; pass shard_shape=…, the shape of a full shard, on every host"
                )
        first_chunks.append(tuple(s.start // c for s, c in zip(index, meta.chunks, strict=True)))
    shapes = zip(first_chunks, layout.part_shapes, strict=True)
    _check_parts(path, meta, [(first, shape) for first, shape in shapes if first is not None], alone=alone)
    return _ShardPlan(meta, first_chunks)


def _check_parts(
    path: str, meta: ArrayMeta, parts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], *, alone: bool
) -> None:
    """Raise `InvalidArgument` if parts (first chunk and shape) overlap, or if the only host lacks a chunk."""
    chunks_of_parts = [
        chunk_numbers(
            [range(a, a + n) for a, n in zip(first, chunk_counts(shape, meta.chunks), strict=True)],
            meta.counts,
        )
        for first, shape in parts
    ]
    numbers, times = np.unique(np.concatenate([np.empty(0, np.int64), *chunks_of_parts]), return_counts=True)
    if (times > 1).any():
        number = numbers[times > 1][0]
        overlapping = [
            region_text(first, shape, meta.chunks, meta.shape)
            for (first, shape), chunks in zip(parts, chunks_of_parts, strict=True)
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
