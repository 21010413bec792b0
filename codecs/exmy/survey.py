"""Survey: what every format of some widths would make of an array, as far as a sample says."""

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

__all__ = ["Candidate", "candidates_of", "survey"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A format, and what it would make of an array: an element of what `exmy.survey` returns."""

    format: Format
    """The format; where the whole tensor shares an offset, with the bias that is best for the sample."""
    bits_per_value: float
    """Its width, and what the offsets or scales of rows and blocks add to each element."""
    signal: float
    """The sum of squares of the whole array, as far as the sample says."""
    noise: float
    """The sum of squared errors of the whole array, likewise."""
    clipped: float
    """The share of elements beyond the largest value of their group by more than half a step, likewise."""

    @property
    def sqnr(self) -> float:
        """The expected signal-to-quantization-noise ratio in dB: see `exmy.sqnr`."""
        return decibels(self.signal, self.noise)


def survey(
    x: Any,
    widths: Iterable[int] = range(2, 17),
    *,
    axis: int | None = None,
    block: int | None = None,
    scale: Scale = "search",
    nonfinite: NonFinite = "error",
) -> tuple[Candidate, ...]:
    """Return what each format of the widths would make of x, in the order of `exmy.formats`.

    Every format is tried with the offsets or scales that suit it (axis, block and scale as in `quantize`),
    on x itself up to 65,536 elements, else on as many spread evenly over it.  Where all elements share an
    offset, up to 4,096 of the largest elements of x join these, which two passes over x find; all sums weigh
    each element by how many it stands for, so they are estimates for the whole of x.  With rows and blocks the
    time does not grow with x.  An empty array and one of zeros have no noise in any format.  Left out are
    formats that hold the values with no bias of -512 ... 512; FormatError where none is left.  NonFiniteError
    as in `encode` for NaN and infinity, of which rows and blocks meet those of the sample only; where they
    saturate, they count as zeros.
    """
    sample = Sample.of(x, axis, block, nonfinite)
    found = [candidate for bits in widths for candidate in candidates_of(sample, bits, scale)]
    if not found:
        raise FormatError(f"no format of the widths {list(widths)} holds the values; scale the input")
    return tuple(found)


def candidates_of(sample: Sample, bits: int, scale: Scale) -> list[Candidate]:
    """Return what the formats of one width make of a sample; without those that cannot hold its values."""
    out = []
    for f in formats(bits):
        if sample.holds(f, scale):
            fit = sample.fit(f, scale)
            width = bits + sample.metadata(scale)
            out.append(Candidate(fit.format, width, sample.signal, fit.noise, fit.clipped))
    return out
