"""Estimate the error of every format of given widths on an array, from a sample."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from exmy.elements import NonFinite
from exmy.errors import FormatError
from exmy.format import Format, formats
from exmy.noise import decibels
from exmy.quantizer import Scale
from exmy.sample import Sample

__all__ = ["Candidate", "measure_candidates", "survey"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A format and its estimated error on an array: an element of the result of `exmy.survey`."""

    format: Format
    """The format, with the bias chosen for the sample if all elements share an offset, else its standard bias."""
    bits_per_value: float
    """The bits per element: the width of the format plus the offsets or scales of rows and blocks."""
    signal: float
    """The estimated sum of squares of the whole array."""
    noise: float
    """The estimated sum of squared errors of the whole array."""
    clipped: float
    """The estimated share of elements that are clipped: see `Quantized.count_clipped`."""

    @property
    def sqnr(self) -> float:
        """The estimated signal-to-quantization-noise ratio in dB: see `exmy.sqnr`."""
        return decibels(self.signal, self.noise)


def survey(
    x: Any,
    widths: Iterable[int] = range(2, 17),
    *,
    axis: int | None = None,
    block: int | None = None,
    scale: Scale = "search",
    nonfinite: NonFinite = "error",
    importance: Any = None,
) -> tuple[Candidate, ...]:
    """Return the estimated error of each format of the given widths on x, in the order of `exmy.formats`.

    Each format is measured with its best offsets or scales (`axis`, `block`, `scale` and `importance` as for
    `quantize`; importance, divided by its largest number, is the weight in the sums of squares and errors): on x
    itself if x has up to 65,536 elements, else on that many elements in evenly spaced runs or groups. If all
    elements share an offset, the sample has up to 4,096 of the largest elements of x too, which takes two passes
    over x; with rows or blocks, the time does not grow with x. Sums are estimates for the whole of x. An empty or
    all-zero array has no noise in any format. Formats that cannot represent the largest values with any bias are
    omitted.

    Raise as `quantize` does, and `FormatError` without widths or if no format is left. With rows or blocks, raise
    `NonFiniteError` only for NaN and infinity in the sample; with `nonfinite="saturate"` they count as zeros.

    Examples
    --------
    >>> x = np.random.default_rng(0).normal(size=4096).astype("float32")
    >>> best = max(exmy.survey(x, [4], block=32), key=lambda candidate: candidate.sqnr)
    >>> best.format
    Format('e2m1')
    """
    widths = list(widths)
    if not widths:
        raise FormatError("a survey has no widths to try; expected integers from 2 to 16")
    sample = Sample.from_array(x, axis, block, nonfinite, importance)
    candidates = [candidate for bits in widths for candidate in measure_candidates(sample, bits, scale)]
    if not candidates:
        raise FormatError(f"no format of the widths {widths} can represent the largest values; scale the input")
    return tuple(candidates)


def measure_candidates(sample: Sample, bits: int, scale: Scale) -> list[Candidate]:
    """Return the estimated error of each format of a width; omit formats whose range is too small."""
    candidates = []
    for f in formats(bits):
        if sample.is_within_range(f, scale):
            estimate = sample.estimate(f, scale)
            total = bits + sample.metadata_bits(scale)
            candidates.append(Candidate(estimate.format, total, sample.signal, estimate.noise, estimate.clipped))
    return candidates
