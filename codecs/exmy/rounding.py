"""The rounding modes: to nearest, or stochastic with a counter-based random generator."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from exmy.errors import FormatError

__all__ = ["Dither", "Rounding", "check_uint64", "make_dither"]

Rounding: TypeAlias = Literal["nearest", "stochastic"]


class Dither(NamedTuple):
    """The parameters of stochastic rounding: a seed, and the position of the first element in its array."""

    seed: int
    first: int

    def at(self, offset: int) -> Dither:
        """Return the parameters for the elements from `offset` on."""
        return Dither(self.seed, self.first + offset)


def make_dither(rounding: str, seed: int, first: int = 0) -> Dither | None:
    """Return the parameters of stochastic rounding; None for rounding to nearest.

    Raise `FormatError` for an unknown rounding, or if `seed` or `first` is not an integer of 0 ... 2^64 - 1.
    """
    if rounding not in ("nearest", "stochastic"):
        raise FormatError(f"rounding is {rounding!r}; expected 'nearest' or 'stochastic'")
    dither = Dither(check_uint64("seed", seed), check_uint64("first", first))
    return dither if rounding == "stochastic" else None


def check_uint64(name: str, value: object) -> int:
    """Return a seed or position as an int. Raise `FormatError` unless it is an integer of 0 ... 2^64 - 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < 1 << 64:
        raise FormatError(f"{name} is {value!r}; expected an integer from 0 to 2^64 - 1")
    return int(value)
