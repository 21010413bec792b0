"""Choose the codecs of arrays with a target by studying the formats that each is likely to get.

An array that gets none of the studied formats, or one at an end of their range, is studied again in all formats.
The result equals that of studying all arrays in all formats, in less time.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import default_chunks
from tstore.errors import InvalidArgument
from tstore.quantization.plan import Plan, SourceArray, TargetedArrays, decide, plan_by_rules, planned_bytes
from tstore.quantization.policy import Bits, MinSqnr, QuantizeRules, Rules, Target
from tstore.quantization.request import Request
from tstore.quantization.sensitivity import Importance
from tstore.quantization.study import ALL_BITS, Profile, Study, Undecided, stored_bytes, study
from tstore.quantization.values import Values, in_threads

__all__ = ["StudiedPlan", "rules_for"]

_DECIBELS_PER_BIT = 20 * math.log10(2)
_STAIRCASE = 4  # corrections, after which the size of an array is treated as a step function
_UNCORRECTED_SHARE = 0.99  # the share of a budget for estimated sizes that no stored sizes correct
_MIN_WEIGHT = 1e-9  # smaller weights are raised to this
_MARGINS = {
    (True, "entropy"): (-0.8, 1.2),
    (True, "packed"): (-2.5, 2.5),
    (False, "entropy"): (-0.5, 1.1),
    (False, "packed"): (-0.5, 5.0),
}
"""The bits to study in addition to those expected: for budgets and for SQNRs, by coding."""


class StudiedPlan:
    """A plan whose undecided arrays are studied, with sizes that are estimates until stored ones correct them."""

    def __init__(
        self,
        plan: Plan,
        arrays: Mapping[str, SourceArray],
        study: Callable[[Mapping[str, Undecided]], Awaitable[Sequence[Study]]],
    ) -> None:
        self._plan = _with_expected_bits(plan, arrays)
        self._arrays, self._study = arrays, study
        self._studies: dict[str, Study] = {}
        self._ratios: dict[str, list[float]] = {}  # stored / estimated size of arrays, by correction

    @property
    def profiles(self) -> dict[str, Profile]:
        """The profiles of the studied arrays, by path."""
        return {path: each.profile for path, each in self._studies.items()}

    async def decide(self, share: float) -> Plan:
        """Return the plan with codecs for each undecided array, as `plan.decide` does; study arrays as needed."""
        paths: Collection[str] = self._plan.undecided.keys() - self._studies.keys()
        while True:
            unstudied = {path: each for path, each in self._plan.undecided.items() if path in paths}
            self._studies |= {each.path: each for each in await self._study(unstudied)}
            studies = {path: self._corrected(each) for path, each in self._studies.items()}
            partly_studied = {path for path, each in self._plan.undecided.items() if each.bits != ALL_BITS}
            try:
                decided = decide(self._plan, studies, self._arrays, share)
            except InvalidArgument:
                if not partly_studied:
                    raise
                paths = partly_studied
            else:
                paths = {path for path in partly_studied if _is_unexpected(studies[path], decided)}
                if not paths:
                    return decided
            self._plan = _with_all_bits(self._plan, paths)

    def correct(self, decided: Plan, sizes: Mapping[str, int]) -> None:
        """Correct the estimated sizes of each array by its stored size in the codecs of a decided plan."""
        for path, choice in decided.choices.items():
            if choice.size and path in sizes:
                ratios = self._ratios.setdefault(path, [])
                ratios.append(self._ratio(path) * sizes[path] / choice.size)

    def _ratio(self, path: str) -> float:
        """Return the ratio by which the estimated sizes of an array are multiplied."""
        ratios = self._ratios.get(path, [])
        if not ratios:
            return 1.0
        return ratios[-1] if len(ratios) < _STAIRCASE else ratios[0]

    def _corrected(self, study: Study) -> Study:
        """Return a study with corrected sizes.

        If several corrections did not suffice, the size is a step function. Interpolation misses its steps, and
        the later ratios hold for one step only, so the study keeps only measured sizes and the first ratio.
        """
        if study.path not in self._ratios:
            return study
        ratio, estimates = self._ratio(study.path), study.estimates
        if len(self._ratios[study.path]) >= _STAIRCASE:
            estimates = [e for e in estimates if e.is_measured]
        corrected = [e if e.is_exact else e._replace(size=math.ceil(e.size * ratio)) for e in estimates]
        return study._replace(estimates=corrected)


def _is_unexpected(study: Study, decided: Plan) -> bool:
    """Return whether an array gets none of the studied formats, or the first or last of those studied."""
    choice = decided.choices.get(study.path)
    chosen = [e for e in study.estimates if choice is not None and e.codecs in choice.codecs]
    return not chosen or any(e.is_edge for e in chosen)


def _with_expected_bits(plan: Plan, arrays: Mapping[str, SourceArray]) -> Plan:
    """Return the plan with the range of bits to study for each array: near those that it is likely to get."""
    all_targeted: list[TargetedArrays] = []
    expected = {p: planned_bytes(plan, p, arrays[p]) * 8.0 for p in arrays}  # stored bits
    for targeted in plan.targeted:
        bits = _expected_bits(plan, targeted, arrays, expected)
        margins = _MARGINS[isinstance(targeted.target, Bits), targeted.target.coding]
        undecided = {}
        for path, each in targeted.undecided.items():
            expected[path] = bits[path] * arrays[path].meta.size
            studied = (bits[path] + margins[0], bits[path] + margins[1])
            undecided[path] = each._replace(bits=studied if _is_relative(targeted.target) else ALL_BITS)
        all_targeted.append(targeted._replace(undecided=undecided))
    return plan._replace(targeted=all_targeted)


def _is_relative(target: Target) -> bool:
    """Return whether the bits of an array depend on its values only by their distribution."""
    return isinstance(target, MinSqnr) or target.error == "relative"


def _expected_bits(
    plan: Plan, targeted: TargetedArrays, arrays: Mapping[str, SourceArray], expected: Mapping[str, float]
) -> dict[str, float]:
    """Return the expected bits per value of the undecided arrays with a common target.

    `expected` has the stored bits of the arrays of earlier targets and of those that are decided.
    """
    target, undecided = targeted.target, targeted.undecided
    if isinstance(target, MinSqnr):
        return dict.fromkeys(undecided, target.decibel / _DECIBELS_PER_BIT)
    paths = list(undecided) if targeted.paths is None else targeted.paths
    sizes = {p: arrays[p].meta.size for p in undecided}
    values = max(1, sum(sizes.values()))
    others = sum(expected[p] for p in paths if p not in undecided)
    average = (target.average * sum(arrays[p].meta.size for p in paths) - others) / values
    # the weighted errors become equal, so an array with four times the weight gets one more bit
    weights = {p: max(plan.importance.get(p, Importance()).weight, _MIN_WEIGHT) for p in sizes}
    gains = {p: math.log2(weight) / 2 for p, weight in weights.items()}
    mean = sum(gains[p] * sizes[p] for p in sizes) / values
    return {p: average + gains[p] - mean for p in sizes}


def _with_all_bits(plan: Plan, paths: Collection[str]) -> Plan:
    """Return the plan with all bits to study for these arrays."""
    all_targeted = []
    for targeted in plan.targeted:
        every = {p: each._replace(bits=ALL_BITS) for p, each in targeted.undecided.items() if p in paths}
        all_targeted.append(targeted._replace(undecided=targeted.undecided | every))
    return plan._replace(targeted=all_targeted)


async def rules_for(codecs: QuantizeRules | Target, leaves: Mapping[str, npt.NDArray[Any]]) -> Rules:
    """Return rules that give each of these arrays the codecs of its rule, or those chosen from its values."""
    rules = None if isinstance(codecs, MinSqnr | Bits) else Rules(codecs)
    request = Request(rules, codecs if isinstance(codecs, MinSqnr | Bits) else None)
    arrays, chosen = {}, {}
    for path, values in leaves.items():
        meta = ArrayMeta.new(values.shape, values.dtype, default_chunks(values.shape, values.dtype.itemsize))
        arrays[path] = SourceArray(meta, stored_bytes(meta))
        chosen[path] = None if rules is None else rules.codecs(path, values.dtype)
    plan = plan_by_rules(arrays, request)
    undecided = plan.undecided
    all_values = [Values.in_memory(path, arrays[path].meta, leaves[path]) for path in undecided]
    studies = await in_threads(lambda v: study(v, undecided[v.path]), all_values)
    choices = decide(plan, {s.path: s for s in studies}, arrays, _UNCORRECTED_SHARE).choices
    return Rules.from_paths(chosen | {path: choices[path].codecs[0] for path in undecided if path in choices})
