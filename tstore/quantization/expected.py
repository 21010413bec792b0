"""The range of bits per value that arrays are likely to get, so that their studies leave out all other formats.

What a study left out is studied if it turns out to matter: the result is the same, only sooner.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from tstore.errors import InvalidArgument
from tstore.quantization.plan import Group, Plan, SourceArray, decide, planned_bytes
from tstore.quantization.policy import Bits, MinSqnr, Target
from tstore.quantization.sensitivity import Importance
from tstore.quantization.study import ALL_BITS, Study

__all__ = ["unexpected", "with_all_bits", "with_expected_bits"]

_DECIBELS_PER_BIT = 20 * math.log10(2)
_MIN_WEIGHT = 1e-9  # that counts
_MARGINS = {
    (True, "entropy"): (-0.8, 1.2),
    (True, "packed"): (-2.5, 2.5),
    (False, "entropy"): (-0.5, 1.1),
    (False, "packed"): (-0.5, 5.0),
}
"""The bits to study beside those expected: for budgets and for SQNRs, by coding."""


def with_expected_bits(plan: Plan, arrays: Mapping[str, SourceArray]) -> Plan:
    """Return the plan with the range of bits to study for each array: near those that it is likely to get."""
    groups: list[Group] = []
    expected = {p: planned_bytes(plan, p, arrays[p]) * 8.0 for p in arrays}  # stored bits
    for group in plan.groups:
        bits = _expected_bits(plan, group, arrays, expected)
        margins = _MARGINS[isinstance(group.target, Bits), group.target.coding]
        undecided = {}
        for path, each in group.undecided.items():
            expected[path] = bits[path] * arrays[path].meta.size
            studied = (bits[path] + margins[0], bits[path] + margins[1])
            undecided[path] = each._replace(bits=studied if _is_relative(group.target) else ALL_BITS)
        groups.append(group._replace(undecided=undecided))
    return plan._replace(groups=groups)


def _is_relative(target: Target) -> bool:
    """Return whether the bits of an array depend on its values only by their distribution."""
    return isinstance(target, MinSqnr) or target.error == "relative"


def _expected_bits(
    plan: Plan, group: Group, arrays: Mapping[str, SourceArray], expected: Mapping[str, float]
) -> dict[str, float]:
    """Return the expected bits per value of the undecided arrays of a group.

    `expected` has the stored bits of the arrays of earlier groups and of those that are decided.
    """
    target = group.target
    if isinstance(target, MinSqnr):
        return dict.fromkeys(group.undecided, target.decibel / _DECIBELS_PER_BIT)
    paths = list(group.undecided) if group.paths is None else group.paths
    sizes = {p: arrays[p].meta.size for p in group.undecided}
    values = max(1, sum(sizes.values()))
    others = sum(expected[p] for p in paths if p not in group.undecided)
    average = (target.average * sum(arrays[p].meta.size for p in paths) - others) / values
    # the weighted errors become equal, so an array with four times the weight gets one more bit
    weights = {p: max(plan.importance.get(p, Importance()).weight, _MIN_WEIGHT) for p in sizes}
    gains = {p: math.log2(weight) / 2 for p, weight in weights.items()}
    mean = sum(gains[p] * sizes[p] for p in sizes) / values
    return {p: average + gains[p] - mean for p in sizes}


def unexpected(
    plan: Plan, studies: Mapping[str, Study], arrays: Mapping[str, SourceArray], share: float
) -> set[str]:
    """Return the arrays to study again, with all bits: they would get none, or the first or last of those studied.

    `share` is as for `decide`.
    """
    partly_studied = {path for path, each in plan.undecided.items() if each.bits != ALL_BITS}
    try:
        choices = decide(plan, studies, arrays, share).choices
    except InvalidArgument:
        return partly_studied
    codecs = {path: choices[path].codecs if path in choices else () for path in partly_studied}
    chosen = {path: [e for e in studies[path].estimates if e.codecs in codecs[path]] for path in partly_studied}
    return {path for path in partly_studied if not chosen[path] or any(e.is_last for e in chosen[path])}


def with_all_bits(plan: Plan, paths: Collection[str]) -> Plan:
    """Return the plan with all bits to study for these arrays."""
    groups = []
    for group in plan.groups:
        every = {p: each._replace(bits=ALL_BITS) for p, each in group.undecided.items() if p in paths}
        groups.append(group._replace(undecided=group.undecided | every))
    return plan._replace(groups=groups)
