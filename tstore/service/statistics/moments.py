"""Counts, sums and extremes of values, added up a batch at a time without overflow."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tstore.service.statistics.numbers import Floats

__all__ = ["Moments", "Sums", "wide"]

_PLAIN = 2.0**400, 2.0**-400  # squares of values between these neither overflow nor underflow

Long = npt.NDArray[np.longdouble]


def wide(values: Floats) -> npt.NDArray[np.float64] | Long:
    """Return finite values in a type in which their squares neither overflow nor underflow.

    That is float64, or for extreme values long double, whose exponents have more bits on most platforms.
    """
    if values.dtype == np.float32:
        return values.astype(np.float64)
    magnitudes = np.abs(values)
    extreme = magnitudes.max(initial=0) > _PLAIN[0] or ((magnitudes < _PLAIN[1]) & (magnitudes > 0)).any()
    return values.astype(np.longdouble) if extreme else values.astype(np.float64)


class Sums:
    """Arrays of sums of values, and of their squares, in long double."""

    def __init__(self, *lengths: int) -> None:
        self.sums = np.zeros(lengths, np.longdouble)
        self.squares = np.zeros(lengths, np.longdouble)

    def means(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the mean of the values of each sum; NaN where there are none."""
        with np.errstate(all="ignore"):
            return np.where(counts > 0, self.sums / counts, np.nan).astype(np.float64)

    def rms(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the root mean square of the values of each sum; NaN where there are none."""
        with np.errstate(all="ignore"):
            return np.where(counts > 0, np.sqrt(self.squares / counts), np.nan).astype(np.float64)

    def norms(self) -> npt.NDArray[np.float64]:
        """Return the Euclidean norm of the values of each sum; infinite if float64 can't express it."""
        with np.errstate(all="ignore"):
            return np.sqrt(self.squares).astype(np.float64)


class Moments:
    """The counts, extremes and sums of all values that were added."""

    def __init__(self) -> None:
        self.values = self.zeros = self.negative = self.nonfinite = 0
        self.minimum = self.maximum = math.nan
        self._sums = Sums(1)

    def add(self, values: Floats, finite: npt.NDArray[np.bool_]) -> None:
        """Add values, some of which may not be finite."""
        self.values += values.size
        self.nonfinite += values.size - int(np.count_nonzero(finite))
        if not finite.all():
            values = values[finite]
        if not values.size:
            return
        self.zeros += values.size - int(np.count_nonzero(values))
        self.negative += int(np.count_nonzero(values < 0))
        self.minimum = float(np.fmin(self.minimum, values.min()))
        self.maximum = float(np.fmax(self.maximum, values.max()))
        summed = wide(values)
        self._sums.sums += summed.sum()
        self._sums.squares += np.vdot(summed, summed)

    @property
    def mean(self) -> float:
        """The mean of the finite values; NaN if there are none."""
        return float(self._sums.means(self._count)[0])

    @property
    def rms(self) -> float:
        """The root mean square of the finite values; NaN if there are none."""
        return float(self._sums.rms(self._count)[0])

    @property
    def _count(self) -> npt.NDArray[np.int64]:
        return np.array([self.values - self.nonfinite])
