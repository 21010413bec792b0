"""Plans: the codecs that each array of a version gets, from a rule or, without a rule, from the array's values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy.typing as npt

from tstore.errors import InvalidArgument
from tstore.format.array_metadata import ArrayMeta
from tstore.format.codecs import FLOATS, Codecs, as_configuration, is_exmy, with_configuration
from tstore.format.grid import default_chunks
from tstore.quantization.encoding import MIN_VALUES, Choice
from tstore.quantization.policy import ONE_DIMENSIONAL, Bits, Default, Match, MinSqnr, Rules, Target
from tstore.quantization.request import Request
from tstore.quantization.study import Configuration, Estimate, Study, encoded_meta, stored_bytes, study
from tstore.quantization.values import Values, in_threads

__all__ = [
    "WIDTHS",
    "Plan",
    "Point",
    "SourceArray",
    "allocate",
    "lower_hull",
    "plan_by_rules",
    "plan_for",
    "rules_for",
]

WIDTHS = range(2, 17)
"""The widths of the formats that arrays without a rule may get."""

_MARGIN = 0.05
"""dB by which an estimate must exceed the required SQNR before its format is tried."""

_TRIES = 3  # formats to try for each array, smallest first

C = TypeVar("C")


class SourceArray(NamedTuple):
    """An array of the version to quantize: its metadata, and its encoded bytes."""

    meta: ArrayMeta
    size: int


class Plan(NamedTuple):
    """What happens to each array of a version.

    `choices` has the codecs of the arrays to encode, `unchanged` a reason for each array that stays unchanged.
    `undecided` has the granularity and scale of each array whose format depends on its values.
    """

    choices: dict[str, Choice]
    unchanged: dict[str, str]
    undecided: dict[str, Configuration]


class Point(NamedTuple, Generic[C]):
    """One way to store an array: its bytes, its error, and the choice that leads to them."""

    size: int
    error: float
    choice: C


class _Defaults:
    """The default granularity and scale of eXmY codecs, and whether they fit any array."""

    def __init__(self, settings: Configuration) -> None:
        self._settings = settings
        self._fitting = 0
        self._misfit: InvalidArgument | None = None

    def complete(self, path: str, meta: ArrayMeta, codecs: Codecs) -> Codecs:
        """Return the codecs completed by the defaults, or with one offset per array if the defaults do not fit it.

        Raise `InvalidArgument` if the codecs do not fit even without the defaults.
        """
        explicit = as_configuration(codecs)
        settings = {**self._settings, **explicit}
        try:
            encoded_meta(meta, with_configuration(codecs, settings))
        except InvalidArgument as error:
            if settings == explicit:
                raise InvalidArgument(f"{path}: {error}") from None
            self._misfit = self._misfit or InvalidArgument(
                f"{dict(self._settings)} fits no array of this checkpoint; {path}: {error}"
            )
            settings = {k: v for k, v in settings.items() if k in explicit or k not in ("axis", "block")}
            encoded_meta(meta, with_configuration(codecs, settings))
        else:
            self._fitting += 1
        return with_configuration(codecs, settings)

    def check(self) -> None:
        """Raise `InvalidArgument` if the settings fit none of the arrays."""
        if self._misfit is not None and not self._fitting:
            raise self._misfit


def plan_by_rules(arrays: Mapping[str, SourceArray], rules: Rules | None, request: Request) -> Plan:
    """Return the plan by the rules; if the request has a target, float arrays without a rule are undecided.

    An array that the request's defaults do not fit (a vector has no second axis) gets one offset for all values.
    Raise `InvalidArgument` if the defaults fit no array at all, or a rule is invalid.
    """
    plan, defaults = Plan({}, {}, {}), _Defaults(request.defaults)
    for path, (meta, _) in arrays.items():
        matched = None if rules is None else rules.match(path, meta.dtype, len(meta.shape))
        by_data = matched is None and request.target is not None
        codecs, reason = matched or (_default_match(meta) if by_data else Match(None, _unsupported(meta)))
        if meta.size < MIN_VALUES and (is_exmy(codecs) or reason == ONE_DIMENSIONAL):
            plan.unchanged[path] = f"fewer than {MIN_VALUES} values"
        elif codecs is None:
            plan.unchanged[path] = reason
        elif not is_exmy(codecs):
            plan.choices[path] = Choice((codecs,))
        elif not by_data:
            plan.choices[path] = Choice((defaults.complete(path, meta, codecs),))
        else:
            block = _automatic_block(meta) if request.auto_block else None
            settings = as_configuration(codecs) if block is None else {**as_configuration(codecs), "block": block}
            plan.undecided[path] = as_configuration(defaults.complete(path, meta, settings))
    defaults.check()
    return plan


def _default_match(meta: ArrayMeta) -> Match:
    """Return the match of an array without a rule; e4m3 is a placeholder until its values decide the format."""
    if reason := _unsupported(meta):
        return Match(None, reason)
    return Match(None, ONE_DIMENSIONAL) if len(meta.shape) == 1 else Match("e4m3")


def _unsupported(meta: ArrayMeta) -> str:
    """Return why arrays of this dtype can't be in eXmY formats; empty if they can."""
    return "" if meta.dtype.name in FLOATS else f"{meta.dtype} is not encoded"


def _automatic_block(meta: ArrayMeta) -> int | None:
    """Return the largest block of 128, 64 and 32 that divides rows and chunks, or None if there is none.

    Blocks of 128 cost a sixteenth of a bit a value and gain more than that on the weights of a model.
    """
    if len(meta.shape) < 2:
        return None
    length = math.gcd(meta.shape[-1], meta.chunks[-1])
    return next((block for block in (128, 64, 32) if length % block == 0), None)


def plan_for(
    target: Target | Default, plan: Plan, studies: Sequence[Study], arrays: Mapping[str, SourceArray]
) -> Plan:
    """Return the plan with a decision for each undecided array, by its study and the target."""
    match target:
        case MinSqnr(decibel):
            return _plan_min_sqnr(plan, studies, decibel, arrays)
        case Bits():
            return _plan_bits(plan, studies, target, arrays)
        case Default():
            return _plan_eight_bits(plan, arrays)


def _plan_eight_bits(plan: Plan, arrays: Mapping[str, SourceArray]) -> Plan:
    """Return the plan with 8 bits per value for each undecided array that takes more than that."""
    choices, unchanged = dict(plan.choices), dict(plan.unchanged)
    for path, configuration in plan.undecided.items():
        grouped = configuration.get("axis") is not None or configuration.get("block") is not None
        codecs = {**configuration, "format": "e2m5" if grouped else "e3m4"}
        if stored_bytes(encoded_meta(arrays[path].meta, codecs)) < arrays[path].size:
            choices[path] = Choice((codecs,))
        else:
            unchanged[path] = "it takes 8 bits per value or less already"
    return Plan(choices, unchanged, {})


def _plan_min_sqnr(
    plan: Plan, studies: Sequence[Study], decibel: float, arrays: Mapping[str, SourceArray]
) -> Plan:
    """Return the plan with the few smallest formats that are expected to keep an SQNR, for each studied array."""
    choices, unchanged = dict(plan.choices), dict(plan.unchanged)
    for studied in studies:
        if studied.obstacle:
            unchanged[studied.path] = studied.obstacle
            continue
        allowed = studied.signal * 10 ** (-(decibel + _MARGIN) / 10)
        smaller = (c for c in studied.estimates if c.size < arrays[studied.path].size and c.error <= allowed)
        best: dict[int, Estimate] = {}  # of each size, the one with the least error
        for estimate in sorted(smaller, key=lambda c: (c.size, c.error)):
            best.setdefault(estimate.size, estimate)
        if best:
            choices[studied.path] = Choice(tuple(c.codecs for c in best.values())[:_TRIES], decibel)
        else:
            unchanged[studied.path] = f"no smaller format is expected to keep {decibel:g} dB"
    return Plan(choices, unchanged, {})


def _plan_bits(plan: Plan, studies: Sequence[Study], target: Bits, arrays: Mapping[str, SourceArray]) -> Plan:
    """Return the plan with the formats that minimize the total error of the studied arrays within the budget.

    Raise `InvalidArgument`, naming the least possible, if even the smallest formats exceed the budget.
    """
    choices, unchanged = dict(plan.choices), dict(plan.unchanged)
    unchanged |= {s.path: s.obstacle for s in studies if s.obstacle}
    fixed = sum(arrays[path].size for path in unchanged)
    fixed += sum(stored_bytes(encoded_meta(arrays[p].meta, c.codecs[0])) for p, c in choices.items())
    encodable = [s for s in studies if not s.obstacle]
    curves = [_curve(studied, target, arrays[studied.path]) for studied in encodable]
    values = sum(array.meta.size for array in arrays.values())
    budget = int(target.average * values / 8) - fixed
    least = sum(min(point.size for point in curve) for curve in curves)
    if least > budget:
        possible = math.ceil(8000 * (least + fixed) / max(1, values)) / 1000  # rounded up, so that it can be met
        raise InvalidArgument(
            f"bits={target.average:g} can't be met: the least possible is {possible:.3f} bits per value, of which "
            f"{8 * fixed / max(1, values):.3f} belong to {len(unchanged)} unchanged arrays and those with a rule; "
            "allow more bits, or name these arrays in rules for smaller formats"
        )
    for studied, point in zip(encodable, allocate(curves, budget), strict=True):
        if point.choice is None:
            unchanged[studied.path] = "the budget has room for all its bits"
        else:
            choices[studied.path] = Choice((point.choice,))
    return Plan(choices, unchanged, {})


def _curve(studied: Study, target: Bits, array: SourceArray) -> list[Point[Configuration | None]]:
    """Return the sizes and weighted errors of an array unchanged and in the codecs that make it smaller."""
    weight = target.weight(studied.signal, array.meta.size)
    curve: list[Point[Configuration | None]] = [Point(array.size, 0.0, None)]
    curve += [Point(c.size, weight * c.error, c.codecs) for c in studied.estimates if c.size < array.size]
    return curve


def allocate(curves: Sequence[Sequence[Point[C]]], budget: int) -> list[Point[C]]:
    """Return one point of each curve, of at most `budget` bytes in total, with about the least total error.

    If even the smallest points exceed the budget, return these. Each curve has at least one point.

    A mix of two points of the lower convex hull of a curve beats any other point, so only hulls count. All arrays
    begin at their smallest point. The steps between neighbouring hull points of all arrays are taken in the order
    of the error that each byte removes, while they fit (Shoham and Gersho 1988). Up to the first step that does
    not fit, no other choice of that size has a smaller error, so the result is within one step of the optimum.
    """
    hulls = [lower_hull(curve) for curve in curves]
    chosen = [hull[0] for hull in hulls]
    room = budget - sum(point.size for point in chosen)
    steps = sorted(
        (-_gain(a, b), i, k) for i, hull in enumerate(hulls) for k, (a, b) in enumerate(itertools.pairwise(hull))
    )
    stopped: set[int] = set()
    for _, i, k in steps:  # the gains of one hull decrease, so its steps come in order
        more = hulls[i][k + 1].size - chosen[i].size
        if i not in stopped and more <= room:
            chosen[i] = hulls[i][k + 1]
            room -= more
        else:
            stopped.add(i)
    return chosen


def lower_hull(points: Sequence[Point[C]]) -> list[Point[C]]:
    """Return the points of the lower convex hull by size; the error falls from each to the next."""
    hull: list[Point[C]] = []
    for point in sorted(points, key=lambda p: (p.size, p.error)):
        if hull and point.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def _gain(a: Point[C], b: Point[C]) -> float:
    """Return the error that each additional byte removes."""
    return (a.error - b.error) / (b.size - a.size)


async def rules_for(target: Target, leaves: Mapping[str, npt.NDArray[Any]]) -> Rules:
    """Return rules that give each of these arrays the codecs chosen from its values."""
    arrays = {}
    for path, values in leaves.items():
        meta = ArrayMeta.new(values.shape, values.dtype, default_chunks(values.shape, values.dtype.itemsize))
        arrays[path] = SourceArray(meta, stored_bytes(meta))
    plan = plan_by_rules(arrays, None, Request(target=target))
    undecided = [Values.in_memory(path, arrays[path].meta, leaves[path]) for path in plan.undecided]
    studies = await in_threads(lambda v: study(v, plan.undecided[v.path], WIDTHS), undecided)
    chosen = plan_for(target, plan, studies, arrays).choices
    return Rules.from_paths({path: choice.codecs[0] for path, choice in chosen.items()})
