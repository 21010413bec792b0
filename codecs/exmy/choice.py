"""Choice: the format that suits an array, with the reason."""

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
from exmy.survey import Candidate, candidates_of

__all__ = ["Choice", "choose"]

_SLACK = 0.01  # bits a value that offsets may cost beyond the bits asked for: those of rows of 800 or more


@dataclass(frozen=True, slots=True, init=False, repr=False, eq=False)
class Choice(Format):
    """A format that `exmy.choose` chose: a `Format` in every way, which also knows why.

    It equals, and is pickled and copied as, the plain format of its name.
    """

    candidates: tuple[Candidate, ...]
    """What it was chosen from, best first: the chosen one, then those that would have done too."""
    reason: str
    """Why, in a few sentences for people."""

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
) -> Choice:
    """Return the format that suits x within `bits`, or for an SQNR of at least `min_sqnr` dB.

    bits: 2 ... 16, not necessarily whole: the format with the least error of the widest that fit, where the
    offsets or scales of rows and blocks count, but not the first 0.01 bit of them.  min_sqnr: of the formats
    expected to reach it, those of the fewest bits, and of these the one with the least error.  Exactly one of
    the two must be given.  FormatError for numbers out of range, and for an SQNR that no format reaches.

    What is expected is the error that a sample promises (see `survey`), with the offsets or scales of `quantize`
    for axis, block and scale.  Where the whole tensor shares an offset, the sample has its largest values, the
    reason speaks of the exponents of them all, and the format has the bias that is best for the sample; with
    rows and blocks it has its standard bias.  Of equal errors, the fewest exponent bits win; so an empty array
    or one of zeros gets the format without exponent bits.  NonFiniteError as in `survey`.
    """
    if (bits is None) == (min_sqnr is None):
        raise FormatError("choose needs either bits or min_sqnr, and not both")
    sample = Sample.of(x, axis, block, nonfinite)
    if bits is not None:
        width = _width(bits, sample.metadata(scale))
        found = sorted(candidates_of(sample, width, scale), key=_noise)
        if not found:
            raise FormatError(f"no format of {width} bits holds the values; scale the input")
        why = f"{found[0].format} has the least error of the formats of {width} bits{_runners_up(found)}."
    else:
        assert min_sqnr is not None
        found, why = _reaching(sample, min_sqnr, scale)
    if not sample.peaks.any():
        why = f"There is no value but zero, and every format is exact: {found[0].format} is the simplest."
    else:
        why = f"{why} {_spread(sample, found[0])}"
    return Choice(found[0].format.name, tuple(found), why)


def _noise(candidate: Candidate) -> float:
    return candidate.noise


def _width(bits: float, metadata: float) -> int:
    """Return the widest whole width within the bits a value, after the metadata."""
    if not _is_number(bits) or not 2 <= bits <= 16:
        raise FormatError(f"bits is {bits!r}; expected a number from 2 to 16")
    width = math.floor(bits - max(0.0, metadata - _SLACK))
    if width < 2:
        raise FormatError(f"{bits:g} bits do not suffice: offsets or scales take {metadata:g} and a code takes 2")
    return width


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _reaching(sample: Sample, min_sqnr: float, scale: Scale) -> tuple[list[Candidate], str]:
    """Return the candidates of the least width that reach the SQNR, best first, and why."""
    if not _is_number(min_sqnr) or math.isnan(min_sqnr) or (math.isinf(min_sqnr) and sample.peaks.any()):
        raise FormatError(f"min_sqnr is {min_sqnr!r}; expected a number of dB")
    best: Candidate | None = None
    for width in range(2, 17):
        found = sorted(candidates_of(sample, width, scale), key=_noise)
        reached = [candidate for candidate in found if candidate.sqnr >= min_sqnr]
        if reached:
            why = f"{reached[0].format} reaches {min_sqnr:g} dB with the fewest bits, {width}{_runners_up(found)}."
            if best is not None:
                why += f" Fewer bits reach {best.sqnr:.1f} dB at most ({best.format})."
            return reached, why
        if found and (best is None or found[0].noise < best.noise):
            best = found[0]
    if best is None:
        raise FormatError("no format holds the values; scale the input")
    raise FormatError(
        f"no format reaches {min_sqnr:g} dB on these values; the best possible is {best.sqnr:.2f} dB, with "
        f"{best.format}"
    )


def _runners_up(found: list[Candidate]) -> str:
    """Return what the best is expected to reach, and the next two."""
    said = f", {_decibels(found[0])} expected"
    others = [f"{c.format} {_decibels(c)}" for c in found[1:3]]
    return f"{said}; next come {' and '.join(others)}" if others else said


def _decibels(candidate: Candidate) -> str:
    return "no error" if math.isinf(candidate.sqnr) else f"{candidate.sqnr:.1f} dB"


def _spread(sample: Sample, best: Candidate) -> str:
    """Return what the exponents look like, seen from the format chosen."""
    h = sample.exponents
    said = f"The exponents lie in {h.lowest} … {h.highest} (entropy {h.entropy:.2f} bits)"
    if sample.groups.axis is None:
        f = best.format
        said += (
            f"; {h.below(f):.2%} of the values lie below the smallest normal one, {h.above(f):.2%} above the top"
        )
    return f"{said}; {best.clipped:.2%} are clipped."
