"""Choose a format for an array, given a number of bits or a minimum SQNR."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from exmy.elements import NonFinite
from exmy.errors import FormatError
from exmy.format import Format
from exmy.quantizer import Scale
from exmy.sample import Sample
from exmy.survey import Candidate, measure_candidates

__all__ = ["Choice", "choose"]

_SLACK = 0.01  # bits per value by which offsets may exceed the requested `bits`: enough for rows of 800 or more


@dataclass(frozen=True, slots=True, init=False, repr=False, eq=False)
class Choice(Format):
    """The result of `exmy.choose`: a `Format` with the candidates and the reason for the choice.

    Equal to the plain `Format` of the same name, which is also what pickling and copying yield.
    """

    candidates: tuple[Candidate, ...]
    """The chosen format, then the others of its width that meet the requirement, best first."""
    reason: str
    """The reason for the choice, in a few sentences."""

    def __init__(self, name: str, candidates: tuple[Candidate, ...], reason: str) -> None:
        Format.__init__(self, name)
        object.__setattr__(self, "candidates", candidates)
        object.__setattr__(self, "reason", reason)


def choose(
    x: Any,
    bits: float | None = None,
    min_sqnr: float | None = None,
    *,
    axis: int | None = None,
    block: int | None = None,
    scale: Scale = "search",
    nonfinite: NonFinite = "error",
    importance: Any = None,
) -> Choice:
    """Return the best format for x within `bits` per value, or the narrowest with an SQNR of `min_sqnr` dB.

    Pass exactly one of the two. With `bits` (2 ... 16, possibly fractional), the result has the least error of the
    widest formats that fit; the offsets or scales of rows and blocks count as bits, except for the first 0.01 bit.
    With `min_sqnr`, it has the least error of the narrowest formats expected to reach that SQNR.

    The expected error is that of a sample (see `survey`), with the offsets or scales that `quantize` would use for
    `axis`, `block`, `scale` and `importance`, which weighs errors and the SQNR. If the whole tensor shares one
    offset, the sample includes its largest values, the reason describes the exponents of all values, and with
    `scale` "search" or "max" the format has the bias chosen for the sample; otherwise it has its standard bias.
    Ties go to the fewest exponent bits, so an empty or zero array gets the format without exponent bits.

    Raise `FormatError` for invalid arguments, and if no format reaches the SQNR or can represent the largest
    values; otherwise raise as `survey` does.

    Examples
    --------
    >>> x = np.random.default_rng(0).normal(size=(64, 256)).astype("float32")
    >>> exmy.choose(x, bits=4).bits
    4
    >>> exmy.choose(x, min_sqnr=30, block=32).bits
    6
    """
    if (bits is None) == (min_sqnr is None):
        raise FormatError("choose needs either bits or min_sqnr, and not both")
    sample = Sample.from_array(x, axis, block, nonfinite, importance)
    if bits is not None:
        width = _width(bits, sample.metadata_bits(scale))
        candidates = sorted(measure_candidates(sample, width, scale), key=_noise)
        if not candidates:
            raise FormatError(f"no format of {width} bits can represent the largest values; scale the input")
        best = candidates[0].format
        reason = f"{best} has the least error of the formats of {width} bits{_describe_errors(candidates)}."
    else:
        assert min_sqnr is not None
        candidates, reason = _candidates_reaching(sample, min_sqnr, scale)
        best = candidates[0].format
    if not sample.peaks.any():
        reason = f"All values are zero, so every format is exact: {best} is the simplest."
    else:
        reason = f"{reason} {_describe_exponents(sample, candidates[0])}"
    return Choice(best.name, tuple(candidates), reason)


def _noise(candidate: Candidate) -> float:
    return candidate.noise


def _width(bits: float, metadata_bits: float) -> int:
    """Return the largest code width that leaves room for `metadata_bits` within `bits` per value."""
    if not _is_number(bits) or not 2 <= bits <= 16:
        raise FormatError(f"bits is {bits!r}; expected a number from 2 to 16")
    width = math.floor(bits - max(0.0, metadata_bits - _SLACK))
    if width < 2:
        raise FormatError(
            f"{bits:g} bits do not suffice: offsets or scales take {metadata_bits:g} bits per value, and a code "
            "takes 2 or more; allow more bits, or let more values share one offset or scale"
        )
    return width


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _candidates_reaching(sample: Sample, min_sqnr: float, scale: Scale) -> tuple[list[Candidate], str]:
    """Return the narrowest candidates that reach the SQNR, best first, and the reason for the choice."""
    if not _is_number(min_sqnr) or math.isnan(min_sqnr) or (math.isinf(min_sqnr) and sample.peaks.any()):
        raise FormatError(f"min_sqnr is {min_sqnr!r}; expected a number of dB")
    best: Candidate | None = None
    for width in range(2, 17):
        candidates = sorted(measure_candidates(sample, width, scale), key=_noise)
        suitable = [candidate for candidate in candidates if candidate.sqnr >= min_sqnr]
        if suitable:
            errors = _describe_errors(candidates)
            reason = f"{suitable[0].format} reaches {min_sqnr:g} dB with the fewest bits, {width}{errors}."
            if best is not None:
                reason += f" Fewer bits reach {best.sqnr:.1f} dB at most ({best.format})."
            return suitable, reason
        if candidates and (best is None or candidates[0].noise < best.noise):
            best = candidates[0]
    if best is None:
        raise FormatError("no format can represent the largest values; scale the input")
    raise FormatError(
        f"no format reaches {min_sqnr:g} dB on these values; the best possible is {best.sqnr:.2f} dB, with "
        f"{best.format}"
    )


def _describe_errors(candidates: list[Candidate]) -> str:
    """Describe the expected SQNR of the best candidate and of the next two."""
    expected = f", {_decibels(candidates[0])} expected"
    others = [f"{c.format} {_decibels(c)}" for c in candidates[1:3]]
    return f"{expected}; next come {' and '.join(others)}" if others else expected


def _decibels(candidate: Candidate) -> str:
    return "no error" if math.isinf(candidate.sqnr) else f"{candidate.sqnr:.1f} dB"


def _describe_exponents(sample: Sample, best: Candidate) -> str:
    """Describe the distribution of the exponents relative to the range of the chosen format."""
    e = sample.exponents
    text = f"The exponents range over {e.lowest} … {e.highest} (entropy {e.entropy:.2f} bits)"
    if sample.groups.axis is None:
        below, above = e.below(best.format), e.above(best.format)
        text += (
            f"; {below:.2%} of the nonzero values are below the smallest normal, {above:.2%} above the largest "
            "value"
        )
    return f"{text}; {best.clipped:.2%} of all values are clipped."
