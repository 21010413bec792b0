"""Convert eXmY codes to the narrow types of other formats (float8, int8) and scales, exactly or rounded.

A code of an eXmY format is looked up in a table: its value times a power of two, rounded to the narrow type. The
power of two is chosen for each group of elements that share an offset or a scale, and is folded into it, so
nothing else changes.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import exmy
import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = ["NoCounterpart", "Scaled", "as_floats", "as_integers"]


class NoCounterpart(Exception):
    """Raised if the target format can't represent a quantized array; str(error) says why."""


class Scaled(NamedTuple):
    """The numbers of a quantized array in a narrow type; each run of them is multiplied by a scale.

    `scales` are the scales of the runs, in float64, 1 for a run of zeros, and `run` the number of elements along
    the last axis that share one, or None if all do. `changed` is the number of rounded elements, whose values the
    narrow type lacks.
    """

    numbers: npt.NDArray[Any]
    scales: npt.NDArray[np.float64]
    run: int | None
    changed: int

    def scales_of_runs(self, length: int) -> npt.NDArray[np.float64]:
        """Return one scale per `length` elements along the last axis; the length of a run is a multiple of it."""
        shape = self.numbers.shape
        if self.run is None:
            return np.broadcast_to(self.scales.reshape(-1)[:1], (*shape[:-1], shape[-1] // length))
        scales = self.scales.reshape(*shape[:-1], shape[-1] // self.run)
        return np.repeat(scales, self.run // length, axis=-1)


def as_floats(q: exmy.Quantized, dtype: npt.DTypeLike) -> Scaled:
    """Return the values in a float of ml_dtypes; raise `NoCounterpart` unless groups are along the last axis."""
    target = np.dtype(dtype)
    finfo: Any = ml_dtypes.finfo(target)  # type: ignore[no-untyped-call]
    numbers = _table(q.format)
    least = np.min(numbers[numbers > 0])
    # the power of two that maps the least value of the format to the least of the type, but at least 1
    usual = max(0, _floor_log2(float(finfo.smallest_subnormal) / least))
    codes, run = _groups_of_codes(q)
    peaks = numbers[_magnitudes(codes, q.format.bits).max(axis=1, initial=0)]
    shifts = np.minimum(usual, _floor_log2(float(finfo.max) / np.where(peaks > 0, peaks, least)))
    out, changed = np.empty(codes.shape, np.uint8), 0
    for shift in np.unique(shifts).tolist():
        shifted = np.ldexp(numbers, shift)
        with np.errstate(over="ignore"):  # codes above the peaks of these groups are not looked up
            rounded = shifted.astype(target)
        exact = rounded.astype(np.float64) == shifted
        rows = slice(None) if (shifts == shift).all() else np.flatnonzero(shifts == shift)
        out[rows] = rounded.view(np.uint8)[codes[rows]]
        changed += 0 if exact.all() else int(np.count_nonzero(~exact[codes[rows]]))
    scales = np.where(peaks > 0, np.ldexp(_scales(q), -shifts), 1)
    return Scaled(out.view(target).reshape(q.shape), scales, run, changed)


def _floor_log2(x: Any) -> Any:
    return np.frexp(x)[1].astype(np.int64) - 1


def as_integers(q: exmy.Quantized, limit: int) -> Scaled:
    """Return the values as int8 of at most `limit`; raise `NoCounterpart` if there are larger ones.

    The sign of zero is lost, which integers lack.
    """
    numbers = _table(q.format)
    step = np.min(numbers[numbers > 0])
    codes, run = _groups_of_codes(q)
    peaks = numbers[_magnitudes(codes, q.format.bits).max(axis=1, initial=0)] / step
    if (peak := float(peaks.max(initial=0))) > limit:
        raise NoCounterpart(f"it has values of {peak:g} times the least step of {q.format}, more than {limit}")
    table = np.where(np.abs(numbers / step) <= limit, numbers / step, 0).astype(np.int8)
    return Scaled(table[codes].reshape(q.shape), np.where(peaks > 0, _scales(q) * step, 1), run, 0)


@functools.lru_cache(16)
def _table(f: exmy.Format) -> npt.NDArray[np.float64]:
    """Return the value of each code."""
    codes = np.arange(1 << f.bits, dtype=np.uint8 if f.bits <= 8 else np.uint16)
    values: npt.NDArray[np.float64] = exmy.decode(codes, f, "float64")
    return values


def _magnitudes(codes: npt.NDArray[Any], bits: int) -> npt.NDArray[Any]:
    """Return the codes without their signs; larger ones have larger values."""
    magnitudes: npt.NDArray[Any] = codes & codes.dtype.type((1 << (bits - 1)) - 1)
    return magnitudes


def _groups_of_codes(q: exmy.Quantized) -> tuple[npt.NDArray[Any], int | None]:
    """Return the codes, a row for each group, and the length of a group along the last axis, or None for all."""
    if q.axis is None:
        return q.codes().reshape(1, -1), None
    if q.axis != len(q.shape) - 1:
        raise NoCounterpart(f"its values share offsets along axis {q.axis}, not along the last one")
    run = q.block or q.shape[-1]
    return q.codes().reshape(-1, run) if q.size else q.codes().reshape(0, 1), run


def _scales(q: exmy.Quantized) -> npt.NDArray[np.float64]:
    """Return the scale of each group."""
    if q.scales is not None:
        return q.scales.reshape(-1).astype(np.float64)
    return np.ldexp(1.0, -q.offsets.reshape(-1).astype(np.int64))
