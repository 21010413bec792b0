"""One array of a version, encoded anew: studied, written into packs, read back and measured.

1. A study reads all values once, for their exponents, and tries every eXmY format on a sample of them.
2. An array whose values share one offset gets it from a search over all of them (`exmy.TensorFit`), slab by slab,
   and stores it as the bias of its format; rows and blocks find theirs as each chunk is encoded.
3. Slabs of whole chunks are written, read back as they are stored, decoded and compared with the source.

An array up to a slab is read once and kept through all steps. Everything here may run in another process: what
goes in and what comes out is plain data.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import exmy
import numpy as np
import numpy.typing as npt

from tstore.array import Array
from tstore.chain import Codecs, as_configuration, is_exmy
from tstore.chunk_writer import PackSet, WriteJob
from tstore.chunks import ChunkTable, Run
from tstore.codec import ArrayMeta
from tstore.grid import boxes, default_chunks, part_of
from tstore.kv.base import Backend
from tstore.packed import packed_chunks
from tstore.pool import each, run
from tstore.snapshot import Snapshot

__all__ = [
    "Choice",
    "Encoded",
    "Study",
    "encode_array",
    "encoded_meta",
    "nonfinite_reason",
    "stored_bytes",
    "study_array",
    "study_values",
]

SLAB = 16 << 20
"""Bytes of values that are held together."""

SMALLEST = 64
"""Arrays of fewer values stay as they are: the header alone would take over one bit a value."""

Configuration = Mapping[str, Any]


class Study(NamedTuple):
    """What is known of an array's values: how many are not finite, their exponents, and what formats would cost.

    Each candidate is an eXmY configuration, the bytes of the array in it, and its expected squared error.
    """

    path: str
    nonfinite: int
    signal: float
    candidates: Sequence[tuple[Configuration, int, float]]


class Choice(NamedTuple):
    """How an array is to be stored: the first of these codecs that keeps its SQNR at `floor` dB or above."""

    codecs: tuple[Codecs, ...]
    floor: float = -math.inf


class Encoded(NamedTuple):
    """What became of an array. `document` is None where it stays as it is, and `reason` says why."""

    path: str
    document: bytes | None = None
    runs: tuple[Run, ...] = ()
    reason: str = ""
    difference: exmy.Difference | None = None
    clipped: int = 0
    exponents: exmy.Exponents | None = None


class _Values:
    """The values of one array, in memory or stored; stored ones are read slab by slab, and one slab is kept."""

    def __init__(self, array: Array | npt.NDArray[Any]) -> None:
        self.shape, self.dtype, self.size, self.nbytes = array.shape, array.dtype, array.size, array.nbytes
        self._array = array
        self._kept = array if isinstance(array, np.ndarray) else None

    async def read(self, region: tuple[slice, ...]) -> npt.NDArray[Any]:
        if self._kept is not None:
            return part_of(self._kept, region)
        assert isinstance(self._array, Array)
        if self.nbytes > SLAB:
            return await self._array[region].read()
        self._kept = await self._array.read()
        return part_of(self._kept, region)

    def slabs(self) -> Iterator[tuple[slice, ...]]:
        """Boxes that follow each other in C order and cover the array."""
        for box in boxes(self.shape, SLAB // self.dtype.itemsize):
            yield tuple(slice(r.start, r.stop) for r in box)

    async def sample(self, axis: int | None) -> npt.NDArray[Any]:
        """At most a slab of values, every k-th along the longest axis but `axis`, whose rows stay whole."""
        axes = range(len(self.shape))
        free = [k for k in axes if axis is None or k != axis % len(self.shape)]
        region = [slice(None)] * len(self.shape)
        if self.nbytes > SLAB and free:
            region[max(free, key=lambda k: self.shape[k])] = slice(None, None, -(-self.nbytes // SLAB))
        return await self.read(tuple(region))


def nonfinite_reason(count: int, size: int) -> str:
    """Why an array that holds NaN or infinity stays as it is."""
    return f"{count} of {size} values are NaN or infinite"


def encoded_meta(old: ArrayMeta, codecs: Codecs) -> ArrayMeta:
    """The metadata of the same array in other codecs; chunks are cut anew where they would cut rows or blocks."""
    chunks = old.chunks
    if isinstance(codecs, Mapping) and old.shape:
        axis, block = codecs.get("axis"), codecs.get("block")
        if axis is not None or block is not None:
            chunks = _holding(old, -1 if axis is None else axis, block)
    return ArrayMeta.of(
        old.shape,
        old.dtype,
        chunks,
        codecs,
        old.fill_value,
        old.attributes,
        old.dimension_names,
        sparse=old.sparse,
    )


def _holding(old: ArrayMeta, axis: int, block: int | None) -> tuple[int, ...]:
    """Chunks that hold whole rows or blocks along an axis, of about the old size where they must change."""
    k = axis % len(old.shape)
    if old.chunks[k] == old.shape[k] or (block is not None and old.chunks[k] % block == 0):
        return old.chunks
    order = [k, *(i for i in range(len(old.shape)) if i != k)]  # the others are cut first, the leading ones before
    turned = default_chunks([old.shape[i] for i in reversed(order)], old.dtype.itemsize)
    chunks = dict(zip(reversed(order), turned, strict=True))
    chunks[k] = old.shape[k] if block is None else min(old.shape[k], -(-chunks[k] // block) * block)
    return tuple(chunks[i] for i in range(len(old.shape)))


def stored_bytes(meta: ArrayMeta) -> int:
    """The encoded bytes of all chunks, filled-up ones included; before compressors, where there are any."""
    return meta.encoded_bound * meta.chunk_count


async def study_array(snapshot: Snapshot, path: str, recipe: Configuration, widths: range) -> Study:
    """The study of a stored array, as `study_values`."""
    return await study_values(path, snapshot.tree.nodes[path].meta, await snapshot.array(path), recipe, widths)


async def study_values(
    path: str, meta: ArrayMeta, array: Array | npt.NDArray[Any], recipe: Configuration, widths: range
) -> Study:
    """The study of an array for formats of some widths, all with the granularity and scale of `recipe`.

    A sample says which format of each width is the best. Where all values share one offset, their error is that of
    all values, since a few outliers that no sample sees can decide it; of rows and blocks it is estimated.
    """
    values = _Values(array)
    exponents = await _exponents_of(values)
    if exponents.count < values.size:
        return Study(path, values.size - exponents.count, 0.0, [])
    shared = {key: value for key, value in recipe.items() if key != "format"}
    sample = await values.sample(recipe.get("axis") if recipe.get("block") is None else None)
    surveyed = await run(lambda: exmy.survey(sample, widths, **shared))
    if shared:
        signal = await _signal(values)
        formats = [(c.format.standard, signal * c.noise / c.signal if c.signal else 0.0) for c in surveyed]
    else:
        seen = (await run(_exponents, sample)).highest
        fits = await _fits(values, _contenders(surveyed, all_seen=seen == exponents.highest))
        formats = [(fit.format.standard, fit.noise or 0.0) for fit in fits]
        signal = fits[0].signal
    candidates = []
    for f, noise in formats:
        configuration = {**recipe, "format": f.name}
        candidates.append((configuration, stored_bytes(encoded_meta(meta, configuration)), noise))
    return Study(path, 0, signal, candidates)


def _contenders(surveyed: Sequence[exmy.Candidate], *, all_seen: bool) -> list[exmy.Format]:
    """The best two formats of each width; where the sample missed the largest values, also wider ranges."""
    chosen: set[tuple[int, int]] = set()
    for bits in {found.format.bits for found in surveyed}:
        best = sorted((c for c in surveyed if c.format.bits == bits), key=lambda c: c.noise)[:2]
        more = (0,) if all_seen else (0, 1, 2)
        chosen |= {(bits, c.format.exponent_bits + k) for c in best for k in more}
    return [c.format.standard for c in surveyed if (c.format.bits, c.format.exponent_bits) in chosen]


async def _signal(values: _Values) -> float:
    """The sum of squares."""
    total = 0.0
    for slab in values.slabs():
        x = (await values.read(slab)).astype(np.float64).reshape(-1)
        total += float(await run(np.dot, x, x))
    return total


async def _fits(
    values: _Values, formats: Sequence[exmy.Format | str], scale: Literal["search", "max"] = "search"
) -> list[exmy.TensorFit]:
    """The offset of all values in each of the formats, found slab by slab."""
    fits = [exmy.TensorFit(f, values.size, scale) for f in formats]
    while open_ := [fit for fit in fits if not fit.done]:
        for slab in values.slabs():
            x = await values.read(slab)
            await each(functools.partial(_add, x), open_)
        await each(exmy.TensorFit.end_pass, open_)
    return fits


def _add(x: npt.NDArray[Any], fit: exmy.TensorFit) -> None:
    fit.add(x)


async def _exponents_of(values: _Values) -> exmy.Exponents:
    """The exponents of all values that are finite."""
    found = exmy.exponents(np.zeros(0, values.dtype))
    for slab in values.slabs():
        found += await run(_exponents, await values.read(slab))
    return found


def _exponents(x: npt.NDArray[Any]) -> exmy.Exponents:
    """The exponents of the finite values."""
    return exmy.exponents(x, nonfinite="saturate")


async def encode_array(backend: Backend, packs: PackSet, snapshot: Snapshot, path: str, choice: Choice) -> Encoded:
    """The array in the first codecs of the choice that keep to its floor, in packs; else as it is."""
    node = snapshot.tree.nodes[path]
    values = _Values(await snapshot.array(path))
    exponents: exmy.Exponents | None = None
    for codecs in choice.codecs:
        if not is_exmy(codecs):
            return await _write(backend, packs, values, path, encoded_meta(node.meta, codecs))
        exponents = await _exponents_of(values) if exponents is None else exponents
        if exponents.count < values.size:
            return Encoded(path, reason=nonfinite_reason(values.size - exponents.count, values.size))
        configuration = await _fitted(values, as_configuration(codecs))
        encoded = await _write(backend, packs, values, path, encoded_meta(node.meta, configuration))
        assert encoded.difference is not None
        if encoded.difference.sqnr >= choice.floor:
            return encoded._replace(exponents=exponents)
    return Encoded(path, reason=f"no format that is smaller keeps {choice.floor:g} dB")


async def _fitted(values: _Values, asked: Configuration) -> Configuration:
    """The configuration with the offset that all values share as the bias of its format, if they share one."""
    scale = asked.get("scale", "search")
    if asked.get("axis") is not None or asked.get("block") is not None or scale not in ("search", "max"):
        return asked
    [fit] = await _fits(values, [asked["format"]], scale)
    return {"format": fit.format.name, "scale": "none"}


async def _write(backend: Backend, packs: PackSet, values: _Values, path: str, meta: ArrayMeta) -> Encoded:
    """Writes the array in whole chunks, reads each slab back as it is stored, and compares."""
    runs: list[Run] = []
    difference, clipped = exmy.compare(np.zeros(0, meta.dtype), np.zeros(0, meta.dtype)), 0
    most = SLAB // max(1, meta.chunk_size * meta.dtype.itemsize)
    done = 0
    for box in boxes(meta.counts, most):
        region = tuple(
            slice(r.start * c, min(r.stop * c, n)) for r, c, n in zip(box, meta.chunks, meta.shape, strict=True)
        )
        x = await values.read(region)
        job = WriteJob(path, meta, [(tuple(r.start for r in box), x)])
        await packs.write([job])
        runs += job.runs
        numbers = range(done, done + math.prod(len(r) for r in box))
        done = numbers.stop
        if meta.chain.packed is None:
            continue
        parts = await packed_chunks(backend, path, meta, ChunkTable.overlay([ChunkTable.of(job.runs)]), numbers)
        found = await _measured(meta, x, parts)
        difference = sum((d for d, _ in found), difference)
        clipped += sum(c for _, c in found)
    return Encoded(path, meta.document, tuple(runs), "", difference, clipped)


async def _measured(
    meta: ArrayMeta, x: npt.NDArray[Any], parts: Sequence[exmy.Quantized]
) -> list[tuple[exmy.Difference, int]]:
    """How far each stored chunk lies from the values that it was made of, and how many it clips."""
    counts = [-(-n // c) for n, c in zip(x.shape, meta.chunks, strict=True)]
    places = list(np.ndindex(*counts))
    found: list[tuple[exmy.Difference, int]] = [None] * len(parts)  # type: ignore[list-item]

    def measure(k: int) -> None:
        region = tuple(slice(i * c, (i + 1) * c) for i, c in zip(places[k], meta.chunks, strict=True))
        given = part_of(x, region)
        inside = tuple(slice(n) for n in given.shape)
        full = given
        if given.shape != meta.chunks:
            full = np.zeros(meta.chunks, meta.dtype)
            full[inside] = given
        stored = parts[k].dequantize(meta.dtype)
        found[k] = (exmy.compare(given, part_of(stored, inside)), parts[k].clipped(full))

    await each(measure, range(len(parts)))
    return found
