"""The encoding of a batch of arrays in new codecs, and the measurement of their errors.

1. An exponent offset that all values of an array share is fitted to all of them (`exmy.TensorFit`), or taken from
   the study, and stored as the bias of the format. Offsets per row or block are fitted chunk by chunk.
2. The values of all arrays of the batch are encoded, and their codes are decoded and compared with the source.
   The same codes are then compressed, if the array has a compressor, and written. A large array is encoded slab by
   slab.
3. An array whose SQNR is below the minimum of its `CodecChoice` is encoded again, with the next codecs of the
   choice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import exmy
import numpy as np
import numpy.typing as npt

from tstore.core.data.exmy_chunks import codes_meta, is_packed
from tstore.core.data.pieces import ReadJob
from tstore.core.data.reader import read_chunks
from tstore.core.data.write_job import StagedChunks
from tstore.core.data.writer import PackSet, WriteJob
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.codecs import Codecs, as_configuration, is_exmy, with_configuration
from tstore.core.format.arrays.grid import Selection, boxes, part_of
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.runtime.budget import scratch
from tstore.core.runtime.pool import each
from tstore.core.storage.base import Storage
from tstore.errors import Corrupt, InvalidArgument
from tstore.quantization.study import (
    Configuration,
    Profile,
    encoded_meta,
    fit_tensor,
    importance_in,
    obstacle_to,
    profile,
)
from tstore.quantization.values import SLAB, Region, ReusedMemory, Values, in_threads

__all__ = ["MIN_VALUES", "CodecChoice", "EncodedArray", "encode_batch"]

MIN_VALUES = 64
"""Arrays of fewer values get no eXmY format: the header alone would take more than one bit per value."""


class CodecChoice(NamedTuple):
    """The codecs to try for an array, in order, until one keeps the array's SQNR at `min_sqnr` dB or above.

    `size` is the expected size in bytes, 0 if it is not estimated; no budget counts `header_size` of it.
    `importance` is the weight of each value's squared error, as an array that broadcasts to the shape, or None.
    """

    codecs: tuple[Codecs, ...]
    min_sqnr: float = -math.inf
    size: int = 0
    header_size: int = 0
    importance: npt.NDArray[np.float32] | None = None


class EncodedArray(NamedTuple):
    """An array in its new codecs: its metadata document, its chunks, and its errors against the source.

    `document` is None if the array stays unchanged; `reason` then says why. A lossless array has no `difference`.
    `weighted` is the difference with squares weighted by the importance of values, if there is any.
    """

    path: str
    document: bytes | None = None
    rows: tuple[ChunkRow, ...] = ()
    reason: str = ""
    difference: exmy.Difference | None = None
    clipped_count: int = 0
    exponents: exmy.Exponents | None = None
    weighted: exmy.Difference | None = None

    @staticmethod
    def unreached(path: str, min_sqnr: float) -> EncodedArray:
        """Return an array that stays unchanged because no smaller format keeps its SQNR."""
        return EncodedArray(path, reason=f"no smaller format keeps {min_sqnr:g} dB")

    @property
    def sqnr(self) -> float:
        """The SQNR in dB, of weighted squares if values have importance; infinite for a lossless array."""
        difference = self.weighted or self.difference
        return math.inf if difference is None else difference.sqnr


_ChunkError = tuple[exmy.Difference, exmy.Difference | None, int]
"""The error of a chunk, its error weighted by importance, and the number of clipped values."""


class _Output:
    """An array while it is being written: the references to its chunks, and the measured error of each chunk."""

    def __init__(self, values: Values, meta: ArrayMeta, importance: npt.NDArray[np.float32] | None) -> None:
        self.values, self.meta = values, meta
        self.importance = importance
        self.rows: list[ChunkRow] = []
        self.errors: dict[int, _ChunkError] = {}  # by chunk number

    def result(self, exponents: exmy.Exponents | None) -> EncodedArray:
        """Return the array once all of it is written, with its measured error if it is in eXmY."""
        encoded = EncodedArray(self.values.path, self.meta.document, tuple(self.rows))
        if not is_packed(self.meta):
            return encoded
        differences, weighted, clipped = zip(*(self.errors[n] for n in sorted(self.errors)), strict=True)
        total = functools.reduce(operator.add, differences)
        weighted_total = None if self.importance is None else functools.reduce(operator.add, weighted)
        return encoded._replace(
            difference=total, weighted=weighted_total, clipped_count=sum(clipped), exponents=exponents
        )

    def chunk_boxes(self) -> Iterator[_Box]:
        """Yield boxes of whole chunks that cover the array: at most a slab of values each, or one larger chunk."""
        max_chunks, number = SLAB // max(1, self.meta.chunk_size * self.meta.dtype.itemsize), 0
        for ranges in boxes(self.meta.counts, max_chunks):
            numbers = range(number, number + math.prod(len(r) for r in ranges))
            number = numbers.stop
            sides = zip(ranges, self.meta.chunks, self.meta.shape, strict=True)
            region = tuple(slice(r.start * length, min(r.stop * length, size)) for r, length, size in sides)
            yield _Box(self, tuple(ranges), region, numbers)


class _Box(NamedTuple):
    """A box of chunks: the ranges of their coordinates, the region of values, and the numbers of the chunks."""

    output: _Output
    ranges: tuple[range, ...]
    region: Region
    numbers: range

    @property
    def first(self) -> tuple[int, ...]:
        """The coordinates of the first chunk."""
        return tuple(r.start for r in self.ranges)

    def chunk_regions(self, shape: tuple[int, ...]) -> Iterator[Region]:
        """Yield the region of each chunk in the box, whose values have this shape."""
        lengths = self.output.meta.chunks
        for position in np.ndindex(*(-(-size // length) for size, length in zip(shape, lengths, strict=True))):
            yield tuple(slice(i * length, (i + 1) * length) for i, length in zip(position, lengths, strict=True))


_FilledBox = tuple[_Box, npt.NDArray[Any]]
"""A box and its values."""


async def encode_batch(
    storage: Storage,
    packs: PackSet,
    batch: Sequence[Values],
    choices: Mapping[str, CodecChoice],
    profiles: Mapping[str, Profile],
) -> list[EncodedArray]:
    """Encode arrays and return them in the same order.

    `choices` has an entry for each array, `profiles` one for each array that was studied.
    """
    profiles = await _profiles(batch, choices, profiles)
    results: dict[str, EncodedArray] = {}

    def obstacle(values: Values) -> str:
        configurations = [as_configuration(codecs) for codecs in choices[values.path].codecs if is_exmy(codecs)]
        return obstacle_to(values, profiles[values.path].exponents, configurations)

    with_profiles = [values for values in batch if values.path in profiles]  # lossless codecs need no profile
    for values, reason in zip(with_profiles, await in_threads(obstacle, with_profiles), strict=True):
        if reason:
            results[values.path] = EncodedArray(values.path, reason=reason)
    for i in range(max(len(choices[values.path].codecs) for values in batch)):  # the i-th codecs of each choice
        remaining = [v for v in batch if v.path not in results and i < len(choices[v.path].codecs)]
        jobs = [(v, choices[v.path].codecs[i], choices[v.path].importance) for v in remaining]
        for output in await _write(storage, packs, jobs, profiles):
            path = output.values.path
            encoded = output.result(profiles[path].exponents if path in profiles else None)
            min_sqnr = choices[path].min_sqnr
            if min_sqnr == -math.inf or encoded.sqnr >= min_sqnr:  # false for NaN
                results[path] = encoded
    for path in (values.path for values in batch if values.path not in results):
        results[path] = EncodedArray.unreached(path, choices[path].min_sqnr)
    return [results[values.path] for values in batch]


async def _profiles(
    batch: Sequence[Values], choices: Mapping[str, CodecChoice], known: Mapping[str, Profile]
) -> dict[str, Profile]:
    """Return the profiles of the arrays that may get an eXmY codec; compute those that are not known."""
    profiles = {v.path: known[v.path] for v in batch if v.path in known}
    unknown = [v for v in batch if v.path not in known and is_exmy(choices[v.path].codecs[0])]

    def new_profile(values: Values) -> Profile:
        choice = choices[values.path]
        [settings] = map(as_configuration, choice.codecs)  # the codecs of a rule
        is_searched = _shares_offset(settings) and settings.get("scale", "search") == "search"
        return profile(values, settings["format"] if is_searched else None, choice.importance)

    profiles.update({v.path: p for v, p in zip(unknown, await in_threads(new_profile, unknown), strict=True)})
    return profiles


_Job = tuple[Values, Codecs, npt.NDArray[np.float32] | None]
"""An array, its codecs, and the importance of its values."""


async def _write(
    storage: Storage, packs: PackSet, jobs: Sequence[_Job], profiles: Mapping[str, Profile]
) -> list[_Output]:
    """Write and measure the arrays in these codecs: all at once, or box by box if there is one large array."""
    if not jobs:
        return []

    def new_output(job: _Job) -> _Output:
        values, codecs, importance = job
        codecs = _with_bias(values, codecs, profiles.get(values.path), importance)
        return _Output(values, encoded_meta(values.meta, codecs), importance)

    outputs = await in_threads(new_output, jobs)
    all_boxes = [box for output in outputs for box in output.chunk_boxes()]
    is_large = len(jobs) == 1 and jobs[0][0].meta.nbytes > SLAB
    memory = ReusedMemory()
    for batch in [[box] for box in all_boxes] if is_large else [all_boxes]:
        await _write_boxes(storage, packs, batch, memory)
    return outputs


async def _write_boxes(storage: Storage, packs: PackSet, batch: Sequence[_Box], memory: ReusedMemory) -> None:
    """Write and measure the chunks of these boxes together."""
    sources = await in_threads(lambda box: box.output.values.read(box.region), batch)
    packed: list[_FilledBox] = []
    exact: list[_FilledBox] = []
    for entry in zip(batch, sources, strict=True):
        (packed if is_packed(entry[0].output.meta) else exact).append(entry)
    jobs = await _encoded_jobs(packed, memory) + [_value_job(box, x) for box, x in exact]
    await packs.write(jobs)
    for (box, _), job in zip(packed + exact, jobs, strict=True):
        box.output.rows += job.rows
    if exact:
        await _check_lossless(storage, exact, jobs[len(packed) :])


def _value_job(box: _Box, x: npt.NDArray[Any]) -> WriteJob:
    """Return the job that encodes and writes a box with these values."""
    return WriteJob(box.output.values.path, box.output.meta, [(box.first, x)])


async def _encoded_jobs(boxes: Sequence[_FilledBox], memory: ReusedMemory) -> list[WriteJob]:
    """Encode boxes into `memory`, measure the codes, and return the jobs that compress and write them."""
    sizes = [len(box.numbers) * box.output.meta.encoded_size for box, _ in boxes]
    buffer, jobs, chunks = memory.take(sum(sizes)), [], []
    for (box, x), size in zip(boxes, sizes, strict=True):
        encoded, buffer = buffer[:size], buffer[size:]
        jobs.append(_code_job(box, encoded))
        parts = zip(box.numbers, box.chunk_regions(x.shape), encoded.reshape(len(box.numbers), -1), strict=True)
        chunks += [(box, number, region, x, out) for number, region, out in parts]

    def encode(item: tuple[_Box, int, Region, npt.NDArray[Any], npt.NDArray[np.uint8]]) -> None:
        box, number, region, x, out = item
        output, meta, source = box.output, box.output.meta, part_of(x, region)
        weights = importance_in(output.importance, meta, box.region)
        weights = None if weights is None else weights[region]
        missing = [(0, length - size) for length, size in zip(meta.chunks, source.shape, strict=True)]
        codec, padding, fitted = meta.chain.exmy_codec, meta.fill_value, None
        assert codec is not None
        if weights is not None and fits_importance(meta.chain.documents):
            padding = 0  # has no error, regardless of its importance
            fitted = np.pad(weights, missing, "edge") if weights.any() else None
        chunk = source
        if source.shape != meta.chunks:
            chunk = np.pad(source, missing, constant_values=padding)
        try:
            codec.encode(chunk, out, importance=fitted)
        except exmy.ExmyError as error:
            raise InvalidArgument(f"{output.values.path}, chunk {number}: codec exmy: {error}") from error
        output.errors[number] = _chunk_error(source, codec.to_quantized(out, meta.chunks, meta.dtype), weights)

    await each(encode, chunks)
    return jobs


def _code_job(box: _Box, codes: npt.NDArray[np.uint8]) -> WriteJob:
    """Return the job that compresses, if the array has a compressor, and writes the codes of a box."""
    path, meta = box.output.values.path, box.output.meta
    if len(meta.chain.documents) == 1:
        return WriteJob(path, meta, (), staged=[StagedChunks(box.numbers, codes, 0)])
    lengths = [len(r) for r in box.ranges[:-1]]
    return WriteJob(path, codes_meta(meta), [(box.first or (0,), codes.reshape(*lengths, -1))])


def _chunk_error(
    source: npt.NDArray[Any], q: exmy.Quantized, importance: npt.NDArray[np.float32] | None
) -> _ChunkError:
    """Return the error of a chunk whose front corner has these source values."""
    if importance is None and source.shape == q.shape and source.flags.c_contiguous:
        difference, clipped = q.measure(source)
        return difference, None, clipped
    return _measured_part(source, q, importance)


def fits_importance(codecs: Codecs) -> bool:
    """Return whether the importance of values affects the encoding of an array in these codecs.

    It does so if offsets or scales are fitted by least squares: to the whole array, or to chunks of plain codes.
    """
    if codecs is None or not is_exmy(codecs):
        return False
    settings = as_configuration(codecs)
    is_plain = isinstance(codecs, str | exmy.Format | Mapping) or len(codecs) == 1
    is_fitted = settings.get("scale", "search") in ("search", *exmy.FLOAT_SCALES)
    return is_fitted and (is_plain or _shares_offset(settings))


def _with_bias(
    values: Values,
    codecs: Codecs,
    array_profile: Profile | None,
    importance: npt.NDArray[np.float32] | None,
) -> Codecs:
    """Return the codecs, with the fitted offset as the bias of the format if all values share one."""
    if not is_exmy(codecs):
        return codecs
    settings: Configuration = as_configuration(codecs)
    if not _shares_offset(settings):
        return with_configuration(codecs, settings)
    scale, fitted_format = settings.get("scale", "search"), None
    if array_profile is not None and scale == "search":
        fitted_format = array_profile.fits.get(settings["format"])
    if fitted_format is None:
        [fit] = fit_tensor(values, [settings["format"]], scale, importance)
        fitted_format = fit.format.name
    return with_configuration(codecs, {"format": fitted_format, "scale": "none"})


def _shares_offset(settings: Configuration) -> bool:
    """Return whether all values of the array share an offset that is fitted to them."""
    is_fitted = settings.get("scale", "search") in ("search", "max")
    return is_fitted and settings.get("axis") is None and settings.get("block") is None


def _measured_part(
    source: npt.NDArray[Any], q: exmy.Quantized, importance: npt.NDArray[np.float32] | None
) -> _ChunkError:
    """Return the error of a chunk whose front corner has these source values; the rest of it is padding."""
    with scratch(2 * q.size * source.dtype.itemsize) as buffer:
        padded, decoded = buffer.view(source.dtype).reshape(2, *q.shape)
        inside = tuple(slice(size) for size in source.shape)
        padded[...] = 0
        padded[inside] = source
        q.dequantize(source.dtype, out=decoded)
        stored = part_of(decoded, inside)
        difference = exmy.compare(part_of(padded, inside), stored)
        weighted = None if importance is None else _weighted(difference, source, stored, importance)
        return difference, weighted, q.count_clipped(padded)


def _weighted(
    difference: exmy.Difference, x: npt.NDArray[Any], y: npt.NDArray[Any], importance: npt.NDArray[np.float32]
) -> exmy.Difference:
    """Return the difference of y from x with its squares weighted; memory is bounded by that of a chunk."""
    with np.errstate(over="ignore"):
        signal, noise = (
            float(np.sum(z * z * importance)) for z in (x.astype(np.float64), x.astype(np.float64) - y)
        )
    return dataclasses.replace(difference, signal=signal, noise=noise)


async def _check_lossless(storage: Storage, boxes: Sequence[_FilledBox], written: Sequence[WriteJob]) -> None:
    """Raise `Corrupt` unless stored chunks read back bit for bit, since the report calls them exact."""
    copies = [np.empty(x.shape, x.dtype) for _, x in boxes]
    jobs = []
    for (box, _), job, copy in zip(boxes, written, copies, strict=True):
        region = Selection(tuple(range(s.start, s.stop) for s in box.region))
        jobs.append(ReadJob(job.path, job.meta, _chunk_table(job), region, copy))
    await read_chunks(storage, jobs)

    def check(item: tuple[_FilledBox, npt.NDArray[Any]]) -> None:
        (box, x), copy = item
        if np.ascontiguousarray(x).tobytes() != copy.tobytes():
            path = box.output.values.path
            raise Corrupt(f"{path}: lossless chunks differ from the source when read back; quantize again")

    await each(check, list(zip(boxes, copies, strict=True)))


def _chunk_table(job: WriteJob) -> ChunkTable:
    """Return the references to the chunks that a job wrote."""
    return ChunkTable.from_rows(job.rows).latest()
