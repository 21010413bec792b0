"""Float scales of groups: how headers store them, and how they are chosen for an array.

- "float": the scale of each group, as float32.
- "e4m3": one float32, the unit; for each group a positive code of e4m3, whose value times the unit is its scale.
- "6bit": for each run of groups of 256 elements a unit, as bfloat16; for each group an integer of 1 to 63, which
  times the unit of its run is its scale.

FORMAT.md, section 8, has the bytes. NVFP4 stores scales like "e4m3", and the K-quants of llama.cpp like "6bit".
"""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from exmy import importance as weighted
from exmy import reference
from exmy.elements import Array, Kind, Layout
from exmy.errors import FormatError
from exmy.format import Format
from exmy.groups import Groups
from exmy.importance import Importance
from exmy.packing import pack, packed_size, unpack
from exmy.threads import run_parts

__all__ = [
    "FLOAT_SCALES",
    "FloatScale",
    "GroupScales",
    "fit_scales",
    "fixed_scale",
    "is_float_scale",
    "parse_scales",
    "scales_size",
]

FloatScale: TypeAlias = Literal["float", "e4m3", "6bit"]

FLOAT_SCALES: tuple[FloatScale, ...] = ("float", "e4m3", "6bit")
"""The scales that are floats, not powers of two, by how headers store them: as 1, 2 and 3."""

_RUN_LENGTH = 256  # elements whose 6-bit scales share a unit
_E4M3 = Format("e4m3").layout
_E4M3_VALUES: NDArray[np.float64] = reference.decode(np.arange(128, dtype=np.uint8), _E4M3)


class GroupScales(NamedTuple):
    """The scales of an array's groups, and the bytes that store them."""

    encoding: FloatScale
    values: NDArray[np.float32]
    """The scale of each group, of shape `Groups.counts`."""
    stored: NDArray[np.uint8]

    @staticmethod
    def from_values(values: NDArray[np.float32]) -> GroupScales:
        """Return scales that are stored as float32."""
        return GroupScales("float", values, values.reshape(-1).astype("<f4").view(np.uint8))


def is_float_scale(scale: object) -> TypeGuard[FloatScale]:
    """Return whether a scale of `exmy.quantize` gives each group a float scale fitted to its values."""
    return isinstance(scale, str) and scale in FLOAT_SCALES


def fixed_scale(scale: float, groups: Groups) -> GroupScales:
    """Return the same scale for all groups."""
    return _one_scale(scale) if groups.axis is None else _equal_scales(scale, groups.counts)


def _equal_scales(scale: float, counts: tuple[int, ...]) -> GroupScales:
    return GroupScales.from_values(np.full(counts, scale, np.float32))


@functools.lru_cache
def _one_scale(scale: float) -> GroupScales:
    """Return the scale of a whole array; decoding a chunk would spend a tenth of its time on making it again."""
    scales = _equal_scales(scale, ())
    scales.values.flags.writeable = scales.stored.flags.writeable = False
    return scales


def scales_size(encoding: FloatScale, groups: Groups) -> int:
    """Return the number of bytes that store the scales of these groups."""
    count = math.prod(groups.counts)
    if encoding == "float":
        return 4 * count
    if encoding == "e4m3":
        return 4 + count
    return 2 * _run_count(groups) + packed_size(count, 6)


def parse_scales(encoding: FloatScale, stored: NDArray[np.uint8], groups: Groups) -> GroupScales:
    """Return the scales in `scales_size` bytes of a header; raise `FormatError` if one is invalid."""
    count = math.prod(groups.counts)
    if encoding == "float":
        values = stored.view("<f4").astype(np.float32)
    elif encoding == "e4m3":
        unit, codes = stored[:4].view("<f4").astype(np.float32), stored[4:]
        if (codes > 127).any():
            raise FormatError("a scale of a group has a code of e4m3 with a sign; expected a positive scale")
        values = _e4m3_scales(unit[0], codes)
    else:
        end = 2 * _run_count(groups)
        units = (stored[:end].view("<u2").astype(np.uint32) << 16).view(np.float32)
        numbers = unpack(stored[end:], 6, count)
        if not np.array_equal(pack(numbers, 6), stored[end:]):
            raise FormatError("the padding of the 6-bit scales is not zero")
        values = _six_bit_scales(units, numbers, groups)
    if not np.all((values > 0) & np.isfinite(values)):
        raise FormatError("a scale of a group is not a finite, positive number")
    return GroupScales(encoding, values.reshape(groups.counts), stored)


def fit_scales(
    elements: Array,
    kind: Kind,
    layout: Layout,
    groups: Groups,
    ideal: NDArray[np.float32],
    encoding: FloatScale,
    importance: Importance | None,
    threads: int,
) -> GroupScales:
    """Return storable scales near the ideal ones: of the two nearest of each group, the one with less error."""
    if encoding == "float" or not ideal.size:
        if encoding == "float":
            return GroupScales.from_values(ideal.reshape(groups.counts))
        stored = np.zeros(scales_size(encoding, groups), np.uint8)
        return GroupScales(encoding, ideal.reshape(groups.counts), stored)
    if encoding == "e4m3":
        unit = np.float32(ideal.max() / _E4M3_VALUES[-1])
        unit = max(unit, np.finfo(np.float32).tiny)
        above = np.clip(np.searchsorted(_E4M3_VALUES, ideal / np.float64(unit)), 1, 127).astype(np.uint8)
        below = np.maximum(above - 1, 1).astype(np.uint8)
        low, high = _e4m3_scales(unit, below), _e4m3_scales(unit, above)
    else:
        units = _units(ideal, groups)
        of_group = np.repeat(units, _groups_per_run(groups))[: ideal.size].astype(np.float64)
        below = np.clip(np.floor(ideal / of_group), 1, 63).astype(np.uint8)
        above = np.minimum(below + 1, 63).astype(np.uint8)
        low, high = _six_bit_scales(units, below, groups), _six_bit_scales(units, above, groups)
    low_noise, high_noise = (
        _noise(elements, kind, layout, groups, scales, importance, threads) for scales in (low, high)
    )
    take_high = high_noise < low_noise
    codes = np.where(take_high, above, below)
    values = np.where(take_high, high, low)
    if encoding == "e4m3":
        stored = np.concatenate([np.array([unit], "<f4").view(np.uint8), codes])
    else:
        unit_bytes = (units.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
        stored = np.concatenate([unit_bytes, pack(codes, 6)])
    return GroupScales(encoding, values.reshape(groups.counts), stored)


def _noise(
    elements: Array,
    kind: Kind,
    layout: Layout,
    groups: Groups,
    scales: NDArray[np.float32],
    importance: Importance | None,
    threads: int,
) -> NDArray[np.float64]:
    """Return the sum of squared errors of each group with its scale, weighted unless all its weights are equal."""
    noise = np.zeros((scales.size, 1))
    if not elements.size:
        return noise[:, 0]
    factors = 1 / scales.astype(np.float64)

    def measure(low: int, high: int) -> None:
        runs = groups.runs(elements, low, high)
        weights = None if importance is None else importance.runs(groups, low, high)
        weighted.noise(kind, layout, runs, weights, factors[low:high], np.ones(1), noise[low:high])

    run_parts(measure, groups.strips(), threads)
    return noise[:, 0] / (factors * factors)


def _e4m3_scales(unit: np.float32, codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    with np.errstate(over="ignore", under="ignore"):
        return (_E4M3_VALUES[codes] * np.float64(unit)).astype(np.float32)


def _six_bit_scales(units: NDArray[np.float32], numbers: Array, groups: Groups) -> NDArray[np.float32]:
    of_group = np.repeat(units.astype(np.float64), _groups_per_run(groups))[: numbers.size]
    with np.errstate(over="ignore", under="ignore"):
        return (of_group * numbers).astype(np.float32)


def _units(ideal: NDArray[np.float32], groups: Groups) -> NDArray[np.float32]:
    """Return for each run the least bfloat16 of which 63 times is at least the largest scale of the run."""
    padded = np.zeros(_run_count(groups) * _groups_per_run(groups), np.float32)
    padded[: ideal.size] = ideal
    exact = padded.reshape(-1, _groups_per_run(groups)).max(axis=1) / np.float32(63)
    rounded = (exact.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    units: NDArray[np.float32] = np.maximum(rounded.view(np.float32), np.finfo(np.float32).tiny)
    return units


def _groups_per_run(groups: Groups) -> int:
    return max(1, _RUN_LENGTH // groups.length) if groups.length else 1


def _run_count(groups: Groups) -> int:
    return -(-math.prod(groups.counts) // _groups_per_run(groups))
