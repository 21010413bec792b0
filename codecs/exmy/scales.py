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
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from exmy import importance as weighted
from exmy import kernels, reference
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
    "ScaleMultiples",
    "fit_scales",
    "fixed_scale",
    "is_float_scale",
    "parse_scales",
    "relative_scales",
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
    """How the scales are stored: as float32 ("float"), in "e4m3", or in "6bit"."""
    values: NDArray[np.float32]
    """The scale of each group, of shape `Groups.counts`."""
    stored: NDArray[np.uint8]
    """The stored bytes of the scales, flat."""

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
    """Return the scale of a whole array, cached, because computing it takes a tenth of decoding a chunk."""
    scales = _equal_scales(scale, ())
    scales.values.flags.writeable = scales.stored.flags.writeable = False
    return scales


def relative_scales(scale: float, elements: Array, kind: Kind, groups: Groups) -> GroupScales:
    """Return for each group the scale in e4m3 nearest to `scale` times the root mean square of its elements."""
    if not elements.size:
        stored = np.zeros(scales_size("e4m3", groups), np.uint8)
        return GroupScales("e4m3", np.ones(groups.counts, np.float32), stored)
    runs = reference.widen(elements, kind).reshape(-1, groups.length, groups.inner)
    peak = max(float(runs.max()), -float(runs.min())) or 1.0  # squares of quotients stay in the range of float64
    rms = peak * np.sqrt(np.mean(np.square(runs / peak), axis=1)).reshape(-1)
    largest = np.finfo(np.float32).max / 2
    ideal = np.clip(scale * rms, np.finfo(np.float32).tiny, largest).astype(np.float32)
    below, above = ScaleMultiples.largest("e4m3", ideal, groups).nearest(ideal)
    is_above = above.values.astype(np.float64) * below.values < np.square(ideal, dtype=np.float64)
    return above.where(is_above, below).group_scales


def scales_size(encoding: FloatScale, groups: Groups) -> int:
    """Return the number of bytes that store the scales of these groups."""
    count = math.prod(groups.counts)
    if encoding == "float":
        return 4 * count
    if encoding == "e4m3":
        return 4 + count
    return 2 * _run_count(groups) + packed_size(count, 6)


@dataclass(frozen=True, slots=True, eq=False)
class ScaleMultiples:
    """Scales of the encodings "e4m3" and "6bit": multiples of a unit that a run of groups shares."""

    encoding: FloatScale
    groups: Groups
    units: NDArray[np.float32]
    """The unit of each run; with "e4m3", all groups are one run."""
    codes: NDArray[np.uint8]
    """The multiple of each group: a code of e4m3, or an integer."""

    @staticmethod
    def parse(encoding: FloatScale, stored: NDArray[np.uint8], groups: Groups) -> ScaleMultiples:
        """Return the scales in `scales_size` bytes of a header; raise `FormatError` if they are invalid."""
        if encoding == "e4m3":
            if (stored[4:] > 127).any():
                raise FormatError("a scale of a group has a code of e4m3 with a sign; expected a positive scale")
            return ScaleMultiples(encoding, groups, stored[:4].view("<f4").astype(np.float32), stored[4:])
        end = 2 * _run_count(groups)
        units = (stored[:end].view("<u2").astype(np.uint32) << 16).view(np.float32)
        codes = unpack(stored[end:], 6, math.prod(groups.counts))
        if not np.array_equal(pack(codes, 6), stored[end:]):
            raise FormatError("the padding of the 6-bit scales is not zero")
        return ScaleMultiples(encoding, groups, units, codes)

    @staticmethod
    def largest(encoding: FloatScale, ideal: NDArray[np.float32], groups: Groups) -> ScaleMultiples:
        """Return the largest multiples of the least units that reach the ideal scale of every group."""
        if encoding == "e4m3":
            unit = np.float32(ideal.max() / _E4M3_VALUES[-1])
            units = np.array([max(unit, np.finfo(np.float32).tiny)])
            return ScaleMultiples(encoding, groups, units, np.full(ideal.size, 127, np.uint8))
        return ScaleMultiples(encoding, groups, _units(ideal, groups), np.full(ideal.size, 63, np.uint8))

    def nearest(self, ideal: NDArray[Any]) -> tuple[ScaleMultiples, ScaleMultiples]:
        """Return the multiples next below and next above the ideal scales; they are equal beyond the range."""
        if self.encoding == "e4m3":
            above = np.clip(np.searchsorted(_E4M3_VALUES, ideal / self._unit_of_group), 1, 127).astype(np.uint8)
            return replace(self, codes=np.maximum(above - 1, 1).astype(np.uint8)), replace(self, codes=above)
        below = np.clip(np.floor(ideal / self._unit_of_group), 1, 63).astype(np.uint8)
        return replace(self, codes=below), replace(self, codes=np.minimum(below + 1, 63).astype(np.uint8))

    def raised(self, octaves: NDArray[Any]) -> ScaleMultiples:
        """Return the same multiples, with each run's unit raised by the most octaves that any group needs."""
        most = np.maximum.reduceat(octaves, self._starts).astype(np.int32)
        with np.errstate(over="ignore"):
            return replace(self, units=np.ldexp(self.units, most))

    def where(self, chosen: NDArray[np.bool_], other: ScaleMultiples) -> ScaleMultiples:
        """Return the scales of the chosen groups, and for the others those of `other`.

        Where the units differ, all groups of a run or none must be chosen.
        """
        units, codes = (
            np.where(chosen[self._starts], self.units, other.units),
            np.where(chosen, self.codes, other.codes),
        )
        return replace(self, units=units, codes=codes)

    def whole_runs(self, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the groups in runs whose groups are all chosen."""
        whole = np.logical_and.reduceat(chosen, self._starts)
        return np.repeat(whole, np.diff(self._starts, append=chosen.size))

    @property
    def values(self) -> NDArray[np.float32]:
        """The scale of each group, as a flat array."""
        multiples = _E4M3_VALUES[self.codes] if self.encoding == "e4m3" else self.codes
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return (self._unit_of_group * multiples).astype(np.float32)

    @property
    def group_scales(self) -> GroupScales:
        """The scales, and the bytes that store them."""
        if self.encoding == "e4m3":
            stored = [self.units.astype("<f4").view(np.uint8), self.codes]
        else:
            stored = [(self.units.view(np.uint32) >> 16).astype("<u2").view(np.uint8), pack(self.codes, 6)]
        return GroupScales(self.encoding, self.values.reshape(self.groups.counts), np.concatenate(stored))

    @property
    def _starts(self) -> NDArray[np.intp]:
        """The first group of each run."""
        per_run = self.codes.size if self.encoding == "e4m3" else _groups_per_run(self.groups)
        return np.arange(0, self.codes.size, per_run)

    @property
    def _unit_of_group(self) -> NDArray[np.float64]:
        with np.errstate(invalid="ignore"):  # a damaged header may have a signaling NaN
            units = self.units.astype(np.float64)
        return (
            units if self.encoding == "e4m3" else np.repeat(units, _groups_per_run(self.groups))[: self.codes.size]
        )


def parse_scales(encoding: FloatScale, stored: NDArray[np.uint8], groups: Groups) -> GroupScales:
    """Return the scales in `scales_size` bytes of a header; raise `FormatError` if one is invalid."""
    if encoding == "float":
        values = stored.view("<f4").astype(np.float32)
    else:
        values = ScaleMultiples.parse(encoding, stored, groups).values
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
    """Return storable scales: for each group, the one of the two nearest to the ideal that has less error."""
    if encoding == "float":
        return GroupScales.from_values(ideal.reshape(groups.counts))
    if not ideal.size:
        stored = np.zeros(scales_size(encoding, groups), np.uint8)
        return GroupScales(encoding, ideal.reshape(groups.counts), stored)
    below, above = ScaleMultiples.largest(encoding, ideal, groups).nearest(ideal)
    low_noise, high_noise = (
        _noise(elements, kind, layout, groups, each.values, importance, threads) for each in (below, above)
    )
    return above.where(high_noise < low_noise, below).group_scales


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
        runs = kernels.runs(groups, elements, low, high)
        weights = None if importance is None else importance.runs(groups, low, high)
        weighted.noise(kind, layout, runs, weights, factors[low:high], np.ones(1), noise[low:high])

    run_parts(measure, groups.strips(), threads)
    return noise[:, 0] / (factors * factors)


def _units(ideal: NDArray[np.float32], groups: Groups) -> NDArray[np.float32]:
    """Return for each run the least bfloat16 that is, times 63, at least the largest scale of the run."""
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
