"""Entropy-coded eXmY: codes with a fixed step size, compressed by zstd, which gives frequent codes fewer bits.

1. The step is the difference between the smallest values of a format; near zero, its values are a uniform grid.
   The coarser the step, the fewer codes are frequent, so the step decides the size, and not the format. All values
   of an array share one step: at a given size, that is the least squared error. Where rows differ much in
   magnitude, the step is instead a fraction of the root mean square of each row (`rows`).
2. Each format is best for a range of sizes: e2m1, where zstd codes two values at once, up to about 3.3 bits per
   value, and e3m4 up to 6. Beyond that, more mantissa bits lengthen the uniform grid, but the low bits of codes of
   more than 8 bits are not compressed: e2m5, e2m6, e3m7, e3m10 and e3m12 are best in turn, and e3m5 if outliers
   exceed e2m5.
3. The size and error at each step are measured on a sample, with steps half an octave apart, and interpolated. At
   first only steps near the expected one are measured, and the others if the choice is the first or last of them.
   What is stored is measured on all values.
4. Chunks have at most 2^20 values, because a part of a chunk can't be decoded alone. Chunks of fewer than 2^14
   values are joined: each has its own header and tables of zstd, which take bits that the budget counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import exmy
import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.codecs import Codecs, as_configuration, is_exmy
from tstore.core.format.arrays.grid import default_chunks

__all__ = ["entropy_chunks", "entropy_codecs", "entropy_points", "is_entropy_coded"]

_ZSTD: Mapping[str, Any] = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
"""Level 1 is near the entropy of the codes; higher levels take longer and store 7 to 13 % more."""

_OCTAVES = {
    "e3m12": (-13.0, -10.5),
    "e3m10": (-11.0, -8.0),
    "e3m7": (-8.0, -5.0),
    "e2m6": (-6.5, -4.5),
    "e3m5": (-6.0, -4.5),
    "e2m5": (-5.5, -3.5),
    "e3m4": (-5.0, 1.0),
    "e2m1": (-1.5, 3.0),
}
"""For each format, the range of steps in octaves above the root mean square of the values."""

_FINEST = min(low for low, _ in _OCTAVES.values())
_COARSEST = max(high for _, high in _OCTAVES.values())
_NORMAL_BITS = 2.05  # the entropy of normal values if the step is their standard deviation
_MAX_SHARE = 0.25  # the maximum share of an array's noise from values beyond the largest of a format
_MIN_SCALE, _MAX_SCALE = 2.0**-125, 2.0**125  # the limits of exmy
_MEASURED, _INTERPOLATED = 2, 32  # steps per octave
_EXACT = -1e4  # stands for the logarithm of an error of 0
_JUMP = 1.5  # a size that grows more in half an octave is not a smooth function of the step
_MIN_CHUNK_VALUES, _MAX_CHUNK_VALUES = 1 << 14, 1 << 20  # in shorter chunks, headers and tables of zstd prevail
_SAMPLE_BYTES = 260 << 10  # bytes of codes; up to 256 KiB, zstd uses other parameters than for a chunk
_RUN = 2048  # consecutive values in a sample, since zstd codes equal neighbors together
_CHUNK_OVERHEAD = 24  # bytes of a chunk's header and of its frame of zstd


def entropy_codecs(format: str, scale: float, *, by_row: bool = False) -> list[dict[str, Any]]:
    """Return the codecs of an array in entropy-coded eXmY; `scale` times the smallest value is the step.

    With `by_row`, the step is in units of the root mean square of each row along the last axis.
    """
    rows = {"axis": -1} if by_row else {}
    return [{"name": "exmy", "configuration": {"format": format, "scale": scale, **rows}}, dict(_ZSTD)]


def is_entropy_coded(codecs: Codecs) -> bool:
    """Return whether these codecs have a given step and a compressor, like those of `entropy_codecs`."""
    is_compressed = isinstance(codecs, list | tuple) and len(codecs) > 1
    if not is_compressed or not is_exmy(codecs):
        return False
    return not isinstance(as_configuration(codecs).get("scale", "search"), str)


def entropy_chunks(meta: ArrayMeta) -> tuple[int, ...]:
    """Return the chunk shape of an array in entropy-coded eXmY: its own, or one of more or fewer values."""
    if _MIN_CHUNK_VALUES <= meta.chunk_size <= _MAX_CHUNK_VALUES:
        return meta.chunks
    longer = _MAX_CHUNK_VALUES if meta.chunk_size > _MAX_CHUNK_VALUES else 4 * _MIN_CHUNK_VALUES
    return default_chunks(meta.shape, 1, target=longer // 2)


def entropy_points(
    sample: npt.NDArray[Any],
    importance: npt.NDArray[np.float64] | None,
    meta: ArrayMeta,
    exponents: exmy.Exponents,
    largest: float,
    signal: float,
    bits: tuple[float, float] = (-math.inf, math.inf),
    *,
    by_row: bool = False,
) -> Iterator[tuple[list[dict[str, Any]], int, float, bool, bool]]:
    """Yield the codecs, the expected size in bytes and the expected error of an array for each format and step.

    `sample`: some of the array's finite values. `importance`: the weight of the squared error of each of them, or
    None if all weigh the same. `exponents`: of all values of the array. `largest`: their largest magnitude.
    `signal`: their sum of squares. `bits`: the steps to study, as the range of bits per value that normal values
    would take with them. `by_row`: the values are in units of their rows, each of which gets a scale. The last
    elements tell whether the step is at the edge of that range, with others beyond, and whether it was measured
    rather than interpolated.
    """
    rms = math.sqrt(signal / max(1, meta.size))
    overhead = _CHUNK_OVERHEAD * math.prod(
        -(-n // c) for n, c in zip(meta.shape, entropy_chunks(meta), strict=True)
    )
    if by_row:
        overhead += meta.size // max(1, meta.shape[-1])
    if rms == 0:
        yield entropy_codecs("e2m1", 1.0), overhead + meta.size // 1000, 0.0, False, True
        return
    from numcodecs import Zstd  # takes a sixth of the import time of tstore, so import it late

    compressor = Zstd(level=1)
    finest, coarsest = _studied_octaves(bits)
    for name, (lowest, highest) in _OCTAVES.items():
        lowest, highest = max(lowest, finest), min(highest, coarsest)
        if lowest > highest:
            continue
        format = exmy.Format(name)
        count = _SAMPLE_BYTES * 8 // min(8, format.bits)
        values = _runs(sample, count)
        weights = None if importance is None else _runs(importance, count)
        unit = 2.0 ** (1 - format.bias - format.mantissa_bits)  # the step between the smallest values
        octaves: list[float] = []
        sizes: list[float] = []
        errors: list[float] = []
        for i in range(round(lowest * _MEASURED), round(highest * _MEASURED) + 1):
            scale = rms * 2 ** (i / _MEASURED) / unit
            if not _MIN_SCALE <= scale <= _MAX_SCALE:
                continue
            clipped = _clipped_error(format, scale, exponents, largest)
            size, error = _measured(compressor, values, weights, name, scale)
            error *= meta.size / values.size
            if clipped <= _MAX_SHARE * error:
                octaves.append(i / _MEASURED)
                sizes.append(size * meta.size / values.size + overhead)
                errors.append(math.log2(error + clipped) if error + clipped else _EXACT)
        if not octaves:
            continue
        fine = _interpolated_octaves(octaves, sizes, errors)
        octaves, sizes, errors = _with_midpoints(octaves), _with_midpoints(sizes), _with_midpoints(errors)
        fine_sizes, fine_errors = np.interp(fine, octaves, sizes), np.exp2(np.interp(fine, octaves, errors))
        for octave, size, error in zip(fine.tolist(), fine_sizes.tolist(), fine_errors.tolist(), strict=True):
            scale = float(np.float32(rms * 2**octave / unit))
            is_edge = octave == finest > _FINEST or octave == coarsest < _COARSEST
            is_measured = (octave * _MEASURED).is_integer()
            yield entropy_codecs(name, scale, by_row=by_row), math.ceil(size), error, is_edge, is_measured


def _studied_octaves(bits: tuple[float, float]) -> tuple[float, float]:
    """Return the finest and the coarsest step, in octaves, at which normal values take bits in this range."""
    low, high = (min(max(_NORMAL_BITS - b, _FINEST), _COARSEST) for b in bits)
    return math.floor(high * _MEASURED) / _MEASURED, math.ceil(low * _MEASURED) / _MEASURED


def _interpolated_octaves(
    octaves: list[float], sizes: list[float], errors: list[float]
) -> npt.NDArray[np.float64]:
    """Interpolate between the measured octaves, except where sizes jump, as for an array of two values.

    Nor is there interpolation next to an octave without error: steps close to an exact one are not exact.
    """
    step, parts = 1 / _INTERPOLATED, []
    pairs = zip(*map(itertools.pairwise, (octaves, sizes, errors)), strict=True)
    for (start, stop), pair, ends in pairs:
        jumps = max(pair) > _JUMP * min(pair) or _EXACT in ends
        parts.append(np.arange(start, start + step / 2 if jumps else stop, step))
    return np.concatenate([*parts, octaves[-1:]])


def _with_midpoints(values: list[float]) -> list[float]:
    """Insert the values halfway between equidistant values of a function, by cubic interpolation.

    Inserted values are clipped to the range of their neighbors: at a jump, as in the size of an array of two
    values, the cubic polynomial would leave their range, and estimate negative sizes.
    """
    if len(values) < 4:
        return values
    result = [values[0], (values[0] + values[1]) / 2]
    for a, b, c, d in zip(values, values[1:], values[2:], values[3:], strict=False):
        result += [b, min(max((9 * (b + c) - a - d) / 16, min(b, c)), max(b, c))]
    return [*result, values[-2], (values[-2] + values[-1]) / 2, values[-1]]


def _runs(values: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Return about `count` of the values, flat: runs of consecutive values, evenly distributed."""
    flat = values.reshape(-1)
    if flat.size <= count:
        return flat
    starts = np.linspace(0, flat.size - _RUN, count // _RUN).astype(np.intp)
    return np.concatenate([flat[start : start + _RUN] for start in starts.tolist()])


def _measured(
    compressor: Any, sample: npt.NDArray[Any], importance: npt.NDArray[Any] | None, name: str, scale: float
) -> tuple[int, float]:
    """Return the compressed size of a sample, and its squared error."""
    codec = exmy.ChunkCodec(exmy.Format(name), scale)
    chunk = codec.encode(sample)
    size = len(compressor.encode(chunk))
    if importance is None:
        return size, codec.to_quantized(chunk, sample.shape, sample.dtype).measure(sample)[0].noise
    decoded = codec.decode(chunk, sample.shape, sample.dtype, np.empty_like(sample))
    difference = sample.astype(np.float64) - decoded
    return size, float(np.einsum("i,i,i", difference, difference, importance))


def _clipped_error(format: exmy.Format, scale: float, exponents: exmy.Exponents, largest: float) -> float:
    """Return about the squared error of the values beyond the limit of a format, at least that of the largest."""
    limit = scale * 2.0 ** ((1 << format.exponent_bits) - 1 - format.bias) * (2 - 2.0**-format.mantissa_bits)
    powers = np.minimum(exponents.lowest + np.arange(len(exponents.counts)), 500)
    excess = np.where(np.ldexp(1.0, powers) > limit, np.ldexp(1.5, powers) - limit, 0.0)
    return max(float(np.sum(exponents.counts * np.square(excess))), max(0.0, largest - limit) ** 2)
