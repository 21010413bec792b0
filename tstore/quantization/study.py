"""The study of an array: its exponents, and its size and error in every eXmY format.

1. One pass over all values counts their exponents and the non-finite values, and collects a sample.
2. Entropy-coded: `entropy` measures size and error on the sample. A short array may be packed all the same, with
   one offset, because a frame of zstd takes more than it saves.
3. Packed: `exmy.survey` tries every format of every width on the sample. With the default granularity and scale,
   all values share one offset. The best formats of each width are then tried on all values, because a few outliers
   that no sample contains can decide the error. With any other granularity or scale, the estimate is the error on
   the sample, scaled to the array.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import exmy
import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.codecs import Codecs, as_configuration, is_exmy
from tstore.core.format.arrays.grid import default_chunks
from tstore.quantization.entropy import entropy_chunks, entropy_points, is_entropy_coded
from tstore.quantization.policy import Coding
from tstore.quantization.report import NONFINITE
from tstore.quantization.rows import RelativeSample, RowMagnitudes
from tstore.quantization.values import Region, Sample, Values

__all__ = [
    "ALL_BITS",
    "Configuration",
    "Estimate",
    "Profile",
    "Study",
    "Undecided",
    "encoded_meta",
    "fit_tensor",
    "importance_in",
    "obstacle_to",
    "profile",
    "stored_bytes",
    "study",
]

Configuration = Mapping[str, Any]
"""A configuration of the exmy codec: "format", "axis" and "block" (which values share an offset), and "scale"."""


_WIDTHS = range(2, 17)  # the widths, in bits, of the formats that packed arrays may get

ALL_BITS = (-math.inf, math.inf)
"""The range of bits of a complete study."""

_SHORT = 4096  # values up to which entropy coding may take more bytes than packed codes of the same error
_HEADER_BITS = 64  # header of a chunk of packed codes with one offset
_ALWAYS_IN_RANGE = 123  # every format with every scale has room for exponents below this
_MIN_SQUARED, _MAX_SQUARED = -450, 511  # the exponents of values whose squares and errors float64 can represent


class Profile(NamedTuple):
    """Properties of all values of an array, so that the encoding of the array need not determine them again.

    `exponents` counts the finite values by exponent. `fits` maps the name of each format that was tried on all
    values to the name of the same format with the bias of the least error.
    """

    exponents: exmy.Exponents
    fits: Mapping[str, str]


class Estimate(NamedTuple):
    """Codecs for an array, with the array's expected size in bytes and its expected squared error.

    `is_edge` says that codecs of fewer or more bits were not studied, because they were not expected to be chosen.
    `is_measured` says that the size was measured, on a sample, rather than interpolated. `header_size` is the part
    of the size that no budget counts: the header of each chunk of packed codes.
    """

    codecs: Codecs
    size: int
    error: float
    is_edge: bool = False
    is_measured: bool = True
    header_size: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether the size is that of packed codes, which no value changes."""
        return not is_entropy_coded(self.codecs)


class Study(NamedTuple):
    """The properties of an array that determine its format.

    `obstacle` says why there are no estimates, and is empty if there are some. `signal` is the sum of squares, or
    0 without estimates.
    """

    path: str
    obstacle: str
    signal: float
    estimates: Sequence[Estimate]
    profile: Profile


class Undecided(NamedTuple):
    """How to store an array whose format is not chosen yet.

    `settings`: the granularity and scale of packed codes. `importance`: the weight of each value's squared error,
    as an array that broadcasts to the shape; None if all values weigh the same. `bits`: the range of bits per
    value to study; for entropy coding, the steps with which normal values would take that many bits.
    """

    coding: Coding
    settings: Configuration
    importance: npt.NDArray[np.float32] | None = None
    bits: tuple[float, float] = ALL_BITS


def study(values: Values, undecided: Undecided) -> Study:
    """Study an array in the formats that its coding can use."""
    meta, settings = values.meta, undecided.settings
    axis, block = settings.get("axis"), settings.get("block")
    sample = Sample(meta, meta.dtype, axis, block)
    weights = None if undecided.importance is None else Sample(meta, undecided.importance.dtype, axis, block)
    exponents, largest, signal, rows = _no_exponents(meta), 0.0, 0.0, RowMagnitudes()
    for region, slab in values.slabs():
        exponents += exmy.exponents(slab, nonfinite="saturate")
        sample.add(region, slab)
        weights_of_slab = importance_in(undecided.importance, meta, region)
        if weights is not None and weights_of_slab is not None:
            weights.add(region, weights_of_slab)
        if settings or undecided.coding == "entropy":  # else `fit_tensor` measures the signal
            signal += exmy.energy(slab)
        if undecided.coding == "entropy":
            largest = max(largest, _largest(slab))
            rows.add(slab)
    if reason := obstacle(meta, exponents):
        return _without_estimates(values, reason, exponents)
    # without any weight in the sample, unweighted errors are the best guess
    importance = None if weights is None or not weights.values.any() else weights.values
    if undecided.coding == "entropy":
        return _entropy_study(values, signal, undecided, sample.values, importance, exponents, largest, rows)
    return _packed_study(values, signal, undecided, sample.values, importance, exponents)


def _largest(values: npt.NDArray[Any]) -> float:
    """Return the largest magnitude, by the order of the bits as integers, since bfloat16 is slow to compare."""
    if not values.size:
        return 0.0
    if values.itemsize == 1:
        return float(np.abs(values).max())
    extremes = [values.view(f"{kind}{values.itemsize}").max() for kind in "iu"]  # of positive, of negative values
    return max(abs(float(extreme.view(values.dtype))) for extreme in extremes)


def _without_estimates(values: Values, reason: str, exponents: exmy.Exponents) -> Study:
    return Study(values.path, reason, 0.0, [], Profile(exponents, {}))


def _entropy_study(
    values: Values,
    signal: float,
    undecided: Undecided,
    sample: npt.NDArray[Any],
    importance: npt.NDArray[Any] | None,
    exponents: exmy.Exponents,
    largest: float,
    rows: RowMagnitudes,
) -> Study:
    """Return the estimates of entropy-coded eXmY; with importance, the signal and the errors are weighted."""
    meta = values.meta
    by_row = meta.size > _SHORT and rows.unequal and entropy_chunks(meta)[-1] == meta.shape[-1]
    if by_row:
        relative = RelativeSample.of(sample, importance)
        args = relative.values, relative.weights, meta, relative.exponents, rows.largest, float(meta.size)
        points = entropy_points(*args, undecided.bits, by_row=True)
    else:
        points = entropy_points(sample, importance, meta, exponents, largest, signal, undecided.bits)
    estimates = [Estimate(*point) for point in points]
    if not estimates:
        reason = f"values of 2^{exponents.highest} are beyond the steps of entropy coding"
        return _without_estimates(values, reason, exponents)
    if importance is not None:
        with np.errstate(over="ignore"):
            weighted = np.square(sample, dtype=np.float64) * importance
            signal = float(weighted.sum()) * values.meta.size / max(1, sample.size)
    if by_row:
        estimates = [each._replace(error=each.error * signal / meta.size) for each in estimates]
    if values.meta.size > _SHORT:
        return Study(values.path, "", signal, estimates, Profile(exponents, {}))
    (low, high), headers = undecided.bits, _HEADER_BITS * values.meta.chunk_count / values.meta.size
    near = undecided._replace(bits=(low - headers - 1, high + 1))  # the widths of packed codes are whole bits
    packed = _packed_study(values, signal, near, sample, importance, exponents)
    estimates += [each._replace(header_size=0) for each in packed.estimates]  # this budget counts all bytes
    return Study(values.path, "", signal, estimates, packed.profile)


def _packed_study(
    values: Values,
    signal: float,
    undecided: Undecided,
    sample: npt.NDArray[Any],
    importance: npt.NDArray[Any] | None,
    exponents: exmy.Exponents,
) -> Study:
    """Return the estimates of packed codes in all formats of the widths to study, likewise weighted."""
    meta, settings = values.meta, undecided.settings
    low, high = undecided.bits
    widths = [bits for bits in _WIDTHS if low <= bits <= high]
    formats = [f for bits in widths for f in exmy.formats(bits) if _in_range(exponents, {**settings, "format": f})]
    if not formats:
        return _without_estimates(values, f"values of 2^{exponents.highest} are too large", exponents)
    padded = _whole_blocks(sample, settings)
    padded_importance = None if importance is None else _whole_blocks(importance, settings)
    surveyed = exmy.survey(padded, widths, importance=padded_importance, **settings)
    candidates = [c for c in surveyed if c.format.standard in formats]
    fits: dict[str, str] = {}
    if settings:
        if importance is not None:
            signal = candidates[0].signal * meta.size / max(1, sample.size)
        # the product of two sums of squares may leave the range of float64, their quotient does not
        errors = [(c.format.standard, signal * (c.noise / c.signal) if c.signal else 0.0) for c in candidates]
    else:
        has_largest = sample.size == meta.size or exmy.exponents(sample).highest == exponents.highest
        contenders = _contenders(candidates, has_largest=has_largest)
        tensor_fits = fit_tensor(values, contenders, importance=undecided.importance, measures="errors")
        _add_pass(values, [fit for fit in tensor_fits if fit.noise is None], undecided.importance)
        errors = [(fit.format.standard, fit.noise or 0.0) for fit in tensor_fits]
        fits = {fit.format.standard.name: fit.format.name for fit in tensor_fits}
        signal = tensor_fits[0].signal
    if not math.isfinite(signal):
        return _without_estimates(values, "the sum of its squares exceeds float64", exponents)
    estimates = []
    for format, error in errors:
        codecs = {**settings, "format": format.name}
        is_edge = format.bits == widths[0] > _WIDTHS[0] or format.bits == widths[-1] < _WIDTHS[-1]
        encoded = encoded_meta(meta, codecs)
        assert encoded.chain.exmy_codec is not None
        headers = encoded.chain.exmy_codec.overhead(encoded.chunks) * encoded.chunk_count
        estimates.append(Estimate(codecs, stored_bytes(encoded), error, is_edge, header_size=headers))
    return Study(values.path, "", signal, estimates, Profile(exponents, fits))


def _whole_blocks(sample: npt.NDArray[Any], settings: Configuration) -> npt.NDArray[Any]:
    """Return a sample padded with zeros to whole blocks, as the chunks at the edge of the array are."""
    axis, block = settings.get("axis"), settings.get("block")
    if block is None:
        return sample
    widths = [(0, 0)] * sample.ndim
    k = -1 if axis is None else axis
    widths[k] = 0, -sample.shape[k] % block
    return np.pad(sample, widths)


def profile(values: Values, format: str | None, importance: npt.NDArray[np.float32] | None = None) -> Profile:
    """Return the profile of an array that was not studied, with the fit of a suitable format."""
    if format is None:
        histograms = (exmy.exponents(slab, nonfinite="saturate") for _, slab in values.slabs())
        return Profile(sum(histograms, _no_exponents(values.meta)), {})
    fit = exmy.TensorFit(format, values.meta.size, nonfinite="saturate", measures="exponents")
    with contextlib.suppress(exmy.FormatError):  # a value is beyond the range of the format: see `obstacle` below
        _add_pass(values, [fit], importance)
    if obstacle(values.meta, fit.exponents) or not _in_range(fit.exponents, {"format": format}):
        return Profile(fit.exponents, {})
    _complete(values, [fit], importance)
    return Profile(fit.exponents, {format: fit.format.name})


def _no_exponents(meta: ArrayMeta) -> exmy.Exponents:
    return exmy.exponents(np.zeros(0, meta.dtype))


def _contenders(candidates: Sequence[exmy.Candidate], *, has_largest: bool) -> list[exmy.Format]:
    """Return the best two formats per width; if the sample lacks the largest exponent, also wider exponents."""
    chosen: set[tuple[int, int]] = set()
    for bits in {candidate.format.bits for candidate in candidates}:
        best = sorted((c for c in candidates if c.format.bits == bits), key=lambda c: c.noise)[:2]
        extra_exponent_bits = (0,) if has_largest else (0, 1, 2)
        chosen |= {(bits, c.format.exponent_bits + extra) for c in best for extra in extra_exponent_bits}
    return [c.format.standard for c in candidates if (c.format.bits, c.format.exponent_bits) in chosen]


def encoded_meta(source: ArrayMeta, codecs: Codecs) -> ArrayMeta:
    """Return the metadata of an array in other codecs, with chunks that contain only whole rows or blocks.

    Raise `InvalidArgument` if the codecs do not fit the array.
    """
    chunks = source.chunks
    if is_entropy_coded(codecs):
        chunks = entropy_chunks(source)
    elif is_exmy(codecs) and source.shape:
        settings = as_configuration(codecs)
        axis, block = settings.get("axis"), settings.get("block")
        if axis is not None or block is not None:
            chunks = _aligned_chunks(source, -1 if axis is None else axis, block)
    copied = (source.fill_value, source.attributes, source.dimension_names)
    return ArrayMeta.new(source.shape, source.dtype, chunks, codecs, *copied, sparse=source.sparse)


def _aligned_chunks(source: ArrayMeta, axis: int, block: int | None) -> tuple[int, ...]:
    """Return a chunk shape of whole rows or blocks along an axis: the source's, or one near the default."""
    shape, k = source.shape, axis % len(source.shape)
    if source.chunks[k] == shape[k] or (block is not None and source.chunks[k] % block == 0):
        return source.chunks
    # default_chunks divides the leading axes first, so the axis of the rows or blocks goes last
    order = [*(i for i in range(len(shape)) if i != k), k]
    lengths = default_chunks([shape[i] for i in order], source.dtype.itemsize)
    chunks = dict(zip(order, lengths, strict=True))
    chunks[k] = shape[k] if block is None else min(shape[k], -(-chunks[k] // block) * block)
    return tuple(chunks[i] for i in range(len(shape)))


def stored_bytes(meta: ArrayMeta) -> int:
    """Return the size of all encoded chunks in bytes, with the padding at the edges, before any compression."""
    return meta.encoded_size * meta.chunk_count


def fit_tensor(
    values: Values,
    formats: Iterable[exmy.Format | str],
    scale: Literal["search", "max"] = "search",
    importance: npt.NDArray[np.float32] | None = None,
    measures: Literal["bias", "errors"] = "bias",
) -> list[exmy.TensorFit]:
    """Fit an offset for all values in each format, in passes over the slabs."""
    fits = [exmy.TensorFit(f, values.meta.size, scale, measures=measures) for f in formats]
    _complete(values, fits, importance)
    return fits


def _complete(
    values: Values, fits: Collection[exmy.TensorFit], importance: npt.NDArray[np.float32] | None
) -> None:
    """Make the passes that the fits still need."""
    while unfinished := [fit for fit in fits if not fit.done]:
        _add_pass(values, unfinished, importance)


def _add_pass(values: Values, fits: Sequence[exmy.TensorFit], importance: npt.NDArray[np.float32] | None) -> None:
    """Make one pass over the values for these fits."""
    for region, slab in values.slabs() if fits else ():
        for fit in fits:
            fit.add(slab, importance_in(importance, values.meta, region))
    for fit in fits:
        fit.end_pass()


def importance_in(
    importance: npt.NDArray[np.float32] | None, meta: ArrayMeta, region: Region
) -> npt.NDArray[np.float32] | None:
    """Return the importance of the values in a region of an array."""
    return None if importance is None else np.broadcast_to(importance, meta.shape)[region]


def obstacle(meta: ArrayMeta, exponents: exmy.Exponents) -> str:
    """Return why no eXmY format can encode an array; empty if one can."""
    if exponents.count < meta.size:
        return f"{meta.size - exponents.count} of {meta.size} {NONFINITE}"
    if exponents.counts.size and exponents.highest < _MIN_SQUARED:
        return f"values of 2^{exponents.highest} are too small"
    if exponents.highest > _MAX_SQUARED:
        return f"values of 2^{exponents.highest} are too large"
    return ""


def obstacle_to(values: Values, exponents: exmy.Exponents, configurations: Sequence[Configuration]) -> str:
    """Return why some of these configurations can't encode an array; empty if all can."""
    reason = obstacle(values.meta, exponents)
    doubtful = [each for each in configurations if not _in_range(exponents, each)]
    if reason or not doubtful:
        return reason
    largest = max(np.abs(slab).max(initial=0) for _, slab in values.slabs())
    for configuration in doubtful:
        shared = {key: configuration[key] for key in ("format", "scale") if key in configuration}
        try:
            exmy.ChunkCodec.from_configuration(shared).encode(np.array([largest], values.meta.dtype))
        except exmy.FormatError:
            return f"values of 2^{exponents.highest} are beyond the range of {configuration['format']}"
    return ""


def _in_range(exponents: exmy.Exponents, configuration: Configuration) -> bool:
    """Return whether the format certainly has room for the largest value; true for scales that may clip."""
    scale = configuration.get("scale", "search")
    if not isinstance(scale, str) or scale == "none" or exponents.highest < _ALWAYS_IN_RANGE:
        return True
    f = exmy.Format(str(configuration["format"])).standard
    # The least bias is -512, and 125 less than the standard bias with float scales. The bias here is one greater,
    # because a value with the exponent of the format's largest value may still exceed that value.
    return exponents.above(f.with_bias(f.bias - 124 if scale in exmy.FLOAT_SCALES else -511)) == 0
