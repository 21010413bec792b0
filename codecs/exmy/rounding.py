"""Rounding: to the nearest value, or up and down at random with the right mean."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from exmy.errors import FormatError

__all__ = ["Dither", "Rounding", "check_counter", "dither_of"]

Rounding: TypeAlias = Literal["nearest", "stochastic"]


class Dither(NamedTuple):
    """The random bits of stochastic rounding: those of a seed, from a position of the array on."""

    seed: int
    first: int

    def at(self, offset: int) -> Dither:
        """Return the random bits of what begins `offset` elements later."""
        return Dither(self.seed, self.first + offset)


def dither_of(rounding: str, seed: int, first: int = 0) -> Dither | None:
    """Return the random bits to round with; None for rounding to nearest.

    FormatError for an unknown rounding, and unless seed and first are integers of 0 ... 2^64 - 1.
    """
    if rounding not in {"nearest", "stochastic"}:
        raise FormatError(f"rounding is {rounding!r}; expected 'nearest' or 'stochastic'")
    dither = Dither(check_counter("seed", seed), check_counter("first", first))
    return dither if rounding == "stochastic" else None


def check_counter(name: str, value: object) -> int:
    """Return a seed or position, 0 ... 2^64 - 1; FormatError for others."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < 1 << 64:
        raise FormatError(f"{name} is {value!r}; expected an integer from 0 to 2^64 - 1")
    return int(value)
