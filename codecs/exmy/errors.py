"""The exceptions of exmy: one base class, and one class per cause."""

from __future__ import annotations

import math

import numpy as np

__all__ = [
    "CodeError",
    "DtypeError",
    "ExmyError",
    "FormatError",
    "KernelError",
    "NonFiniteError",
    "SizeError",
    "SlowPathWarning",
]


class ExmyError(Exception):
    """Base class of all exceptions of exmy."""


class FormatError(ExmyError, ValueError):
    """A format, width, bias, option or encoded header is invalid, or no format represents the values."""


class DtypeError(ExmyError, TypeError):
    """An argument has an unsupported type or dtype."""


class CodeError(ExmyError, ValueError):
    """A code does not fit the width of its format."""


class SizeError(ExmyError, ValueError):
    """A number, length, shape or slice is out of range, or a buffer has the wrong size or memory layout."""


class KernelError(ExmyError, RuntimeError):
    """The level of the kernels (see `kernels.levels`) is unknown or cannot run on this machine."""


class NonFiniteError(ExmyError, ValueError):
    """The input contains NaN or infinity, which have no eXmY code.

    `count` of the `total` elements are not finite; `index` is the position of the first, one integer per axis.
    """

    def __init__(self, count: int, total: int, index: tuple[int, ...]) -> None:
        self.count = count
        self.total = total
        self.index = index
        super().__init__(count, total, index)

    @staticmethod
    def at(count: int, first: int, shape: tuple[int, ...]) -> NonFiniteError:
        """Return the error for an array of this shape, with the position of the first such element in C order."""
        return NonFiniteError(count, math.prod(shape), tuple(int(i) for i in np.unravel_index(first, shape)))

    def __str__(self) -> str:
        position = f" (the first at [{', '.join(map(str, self.index))}])" if self.index else ""
        return (
            f"{self.count} of {self.total} values are NaN or infinite{position}, which no eXmY code represents; "
            "repair the input, or pass nonfinite='saturate'"
        )


class SlowPathWarning(UserWarning):
    """The C kernels are not built, so the NumPy reference runs instead, about a hundred times slower."""
