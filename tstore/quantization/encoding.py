"""Arrays of a version, encoded anew: fitted, written into packs, read back and measured; a batch at a time.

1. The values are read, those of a large array slab by slab. An array whose values share one offset gets it from a
   search over all of them (`exmy.TensorFit`), and stores it as the bias of its format; rows and blocks find theirs
   as each chunk is encoded.
2. Whole chunks of all arrays of the batch are written together, read back as they are stored, decoded, and
   compared with the source.
3. What does not keep its floor is tried again in the next codecs of its choice.

All of this may run in another process: what goes in and what comes out is plain data.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import exmy
import numpy as np
import numpy.typing as npt

from tstore.data.exmy_chunks import PackedChunks, is_packed, packed_chunks
from tstore.data.pieces import ReadJob
from tstore.data.reader import read_chunks
from tstore.data.writer import PackSet, WriteJob
from tstore.errors import Corrupt
from tstore.format.array_metadata import ArrayMeta
from tstore.format.chunk_refs import ChunkRow, ChunkTable
from tstore.format.codecs import Codecs, as_configuration, is_exmy, with_configuration
from tstore.format.grid import Selection, boxes, part_of
from tstore.quantization.rechunk import encoded_meta
from tstore.quantization.study import Configuration, exponents_of, fit_tensor, nonfinite_reason
from tstore.quantization.values import SLAB, Region, Values, in_threads, read_batch
from tstore.runtime.pool import each
from tstore.snapshot import Snapshot
from tstore.storage.base import Backend

__all__ = ["SMALLEST", "Choice", "Encoded", "encode_batch"]

SMALLEST = 64
"""Arrays of fewer values stay as they are: the header alone would take over one bit a value."""

_HIGHEST = 511
"""The exponent of the largest values that every format holds with some bias."""


class Choice(NamedTuple):
    """How an array is to be stored: in the first of these codecs that keeps its SQNR at `floor` dB or above."""

    codecs: tuple[Codecs, ...]
    floor: float = -math.inf


class Encoded(NamedTuple):
    """What became of an array. `document` is None where it stays as it is, and `reason` says why."""

    path: str
    document: bytes | None = None
    rows: tuple[ChunkRow, ...] = ()
    reason: str = ""
    difference: exmy.Difference | None = None
    clipped: int = 0
    exponents: exmy.Exponents | None = None


class _Written:
    """An array on its way into packs, and what was measured of it so far."""

    def __init__(self, values: Values, meta: ArrayMeta) -> None:
        self.values, self.meta = values, meta
        self.rows: list[ChunkRow] = []
        self.lost: dict[int, tuple[exmy.Difference, int]] = {}

    def encoded(self, exponents: exmy.Exponents | None) -> Encoded:
        """What became of the array, all of it being written; measured where it is in eXmY."""
        found = Encoded(self.values.path, self.meta.document, tuple(self.rows))
        if not is_packed(self.meta):
            return found
        lost = [self.lost[number] for number in sorted(self.lost)]
        difference, clipped = functools.reduce(operator.add, (d for d, _ in lost)), sum(c for _, c in lost)
        return found._replace(difference=difference, clipped=clipped, exponents=exponents)

    def boxes(self) -> Iterator[_Box]:
        """Runs of whole chunks that cover the array, a slab or less each."""
        most, first = SLAB // max(1, self.meta.chunk_size * self.meta.dtype.itemsize), 0
        for box in boxes(self.meta.counts, most):
            numbers = range(first, first + math.prod(len(r) for r in box))
            first = numbers.stop
            sides = zip(box, self.meta.chunks, self.meta.shape, strict=True)
            region = tuple(slice(r.start * c, min(r.stop * c, n)) for r, c, n in sides)
            yield _Box(self, tuple(r.start for r in box), region, numbers)


class _Box(NamedTuple):
    written: _Written
    first: tuple[int, ...]
    region: Region
    numbers: range


_Entry = tuple[_Box, WriteJob, npt.NDArray[Any]]
"""A box, the job that wrote it, and the values that it was made of."""


async def encode_batch(
    backend: Backend, packs: PackSet, snapshot: Snapshot, batch: Sequence[str], choices: Mapping[str, Choice]
) -> list[Encoded]:
    """What became of the arrays of a batch (`values.batches`), in its order."""
    values = await read_batch(snapshot, batch)
    done: dict[str, Encoded] = {}
    exponents: dict[str, exmy.Exponents] = {}
    packed = [v for v in values if any(map(is_exmy, choices[v.path].codecs))]
    for v, found in zip(packed, await in_threads(exponents_of, packed), strict=True):
        exponents[v.path] = found
        if found.count < v.meta.size:
            done[v.path] = Encoded(v.path, reason=nonfinite_reason(v.meta.size - found.count, v.meta.size))
        elif found.highest > _HIGHEST:
            done[v.path] = Encoded(v.path, reason=f"values of 2^{found.highest} are beyond every eXmY format")
    for i in range(max(len(choices[path].codecs) for path in batch)):
        open_ = [v for v in values if v.path not in done and i < len(choices[v.path].codecs)]
        for w in await _write(backend, packs, [(v, choices[v.path].codecs[i]) for v in open_]):
            encoded = w.encoded(exponents.get(w.values.path))
            floor, lost = choices[encoded.path].floor, encoded.difference
            if lost is None or floor == -math.inf or lost.sqnr >= floor:  # an SQNR beyond float64 is NaN
                done[encoded.path] = encoded
    return [done.get(p) or Encoded(p, reason=f"no smaller format keeps {choices[p].floor:g} dB") for p in batch]


async def _write(backend: Backend, packs: PackSet, todo: Sequence[tuple[Values, Codecs]]) -> list[_Written]:
    """The arrays in these codecs, written and measured: all at once, or a large one box by box."""
    if not todo:
        return []
    written = await in_threads(lambda item: _Written(item[0], encoded_meta(item[0].meta, _fitted(*item))), todo)
    every = [box for w in written for box in w.boxes()]
    large = len(todo) == 1 and todo[0][0].meta.nbytes > SLAB
    for some in [[box] for box in every] if large else [every]:
        parts = await in_threads(lambda box: box.written.values.read(box.region), some)
        jobs = [
            WriteJob(box.written.values.path, box.written.meta, [(box.first, x)])
            for box, x in zip(some, parts, strict=True)
        ]
        await packs.write(jobs)
        for box, job in zip(some, jobs, strict=True):
            box.written.rows += job.rows
        entries = zip(some, jobs, parts, strict=True)
        encoded, lossless = list[_Entry](), list[_Entry]()
        for entry in entries:
            (encoded if is_packed(entry[1].meta) else lossless).append(entry)
        await _measure(backend, encoded)
        await _check_lossless(backend, lossless)
    return written


def _fitted(values: Values, codecs: Codecs) -> Codecs:
    """The codecs with the offset that all values share as the bias of the format, if they share one."""
    if not is_exmy(codecs):
        return codecs
    asked: Configuration = as_configuration(codecs)
    scale = asked.get("scale", "search")
    if asked.get("axis") is not None or asked.get("block") is not None or scale not in ("search", "max"):
        return with_configuration(codecs, asked)
    [fit] = fit_tensor(values, [asked["format"]], scale)
    return with_configuration(codecs, {"format": fit.format.name, "scale": "none"})


async def _measure(backend: Backend, entries: Sequence[_Entry]) -> None:
    """Note how far each stored chunk lies from the values that it was made of, and how many it clips."""
    wanted = [PackedChunks(job.path, job.meta, _stored(job), box.numbers) for box, job, _ in entries]
    stored = await packed_chunks(backend, wanted)
    chunks = []
    for (box, _, x), quantized in zip(entries, stored, strict=True):
        counts = [-(-n // c) for n, c in zip(x.shape, box.written.meta.chunks, strict=True)]
        chunks += [
            (box, n, at, x, q) for n, at, q in zip(box.numbers, np.ndindex(*counts), quantized, strict=True)
        ]

    def measure(item: tuple[_Box, int, tuple[int, ...], npt.NDArray[Any], exmy.Quantized]) -> None:
        box, number, at, x, q = item
        meta = box.written.meta
        given = part_of(x, tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, meta.chunks, strict=True)))
        inside = tuple(slice(n) for n in given.shape)
        full = given
        if given.shape != meta.chunks:  # a chunk at the edge was filled up
            full = np.zeros(meta.chunks, meta.dtype)
            full[inside] = given
        decoded = part_of(q.dequantize(meta.dtype), inside)
        box.written.lost[number] = (exmy.compare(given, decoded), q.clipped(full))

    await each(measure, chunks)


async def _check_lossless(backend: Backend, entries: Sequence[_Entry]) -> None:
    """Raise `Corrupt` where stored chunks do not read back bit for bit: the report calls them exact."""
    copies = [np.empty(x.shape, x.dtype) for _, _, x in entries]
    jobs = []
    for (box, job, _), copy in zip(entries, copies, strict=True):
        region = Selection(tuple(range(s.start, s.stop) for s in box.region))
        jobs.append(ReadJob(job.path, job.meta, _stored(job), region, copy))
    await read_chunks(backend, jobs)

    def check(item: tuple[_Entry, npt.NDArray[Any]]) -> None:
        (_, job, x), copy = item
        if np.ascontiguousarray(x).tobytes() != copy.tobytes():
            raise Corrupt(f"{job.path}: lossless chunks read back other values than were written; try again")

    await each(check, list(zip(entries, copies, strict=True)))


def _stored(job: WriteJob) -> ChunkTable:
    """Return where the chunks of a job lie."""
    return ChunkTable.from_rows(job.rows).latest()
