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
from tstore.quantization.encoding import MIN_VALUES, CodecChoice
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
"""The widths, in bits, of the formats that arrays without a rule may get."""

_MARGIN = 0.05
"""dB by which an estimate must exceed the required SQNR before its format is tried."""

_TRIES = 3  # formats to try for each array, smallest first

C = TypeVar("C")


class SourceArray(NamedTuple):
    """An array of the version to quantize: its metadata, and the size of its stored chunks in bytes."""

    meta: ArrayMeta
    encoded_bytes: int


class Plan(NamedTuple):
    """The codecs of each array of a version, or the reason why the array stays unchanged.

    `choices` has the codecs of the arrays to encode, `unchanged` the reasons of the unchanged arrays. `undecided`
    has the granularity and scale of each array whose format depends on its values and is not chosen yet.
    """

    choices: dict[str, CodecChoice]
    unchanged: dict[str, str]
    undecided: dict[str, Configuration]


class Point(NamedTuple, Generic[C]):
    """One way to store an array: the option chosen, and the size in bytes and the error that result."""

    size: int
    error: float
    option: C


class _Defaults:
    """The default granularity and scale of eXmY codecs, and whether these settings fit any array."""

    def __init__(self, settings: Configuration) -> None:
        self._settings = settings
        self._fits_any = False
        self._first_error: InvalidArgument | None = None

    def complete(self, path: str, meta: ArrayMeta, codecs: Codecs) -> Codecs:
        """Return the codecs completed by the defaults, or with one offset per array if the defaults do not fit.

        Raise `InvalidArgument` if the codecs do not fit even without the defaults.
        """
        explicit = as_configuration(codecs)
        settings = {**self._settings, **explicit}
        try:
            encoded_meta(meta, with_configuration(codecs, settings))
        except InvalidArgument as error:
            if settings == explicit:
                raise InvalidArgument(f"{path}: {error}") from None
            self._first_error = self._first_error or InvalidArgument(
                f"the settings {dict(self._settings)} fit no array of this checkpoint; {path}: {error}"
            )
            settings = {k: v for k, v in settings.items() if k in explicit or k not in ("axis", "block")}
            encoded_meta(meta, with_configuration(codecs, settings))
        else:
            self._fits_any = True
        return with_configuration(codecs, settings)

    def check(self) -> None:
        """Raise `InvalidArgument` if the settings fit none of the arrays."""
        if self._first_error is not None and not self._fits_any:
            raise self._first_error


def plan_by_rules(arrays: Mapping[str, SourceArray], rules: Rules | None, request: Request) -> Plan:
    """Return the plan by the rules; if the request has a target, float arrays without a rule are undecided.

    An array that the request's defaults do not fit (a vector has no second axis) gets one offset for all values.
    Raise `InvalidArgument` if the defaults fit no array at all, or a rule is invalid.
    """
    plan, defaults = Plan({}, {}, {}), _Defaults(request.defaults)
    for path, (meta, _) in arrays.items():
        matched = None if rules is None else rules.match(path, meta.dtype, len(meta.shape))
        from_values = matched is None and request.target is not None
        codecs, reason = matched or (_default_match(meta) if from_values else Match(None, _unsupported(meta)))
        if meta.size < MIN_VALUES and (is_exmy(codecs) or reason == ONE_DIMENSIONAL):
            plan.unchanged[path] = f"fewer than {MIN_VALUES} values"
        elif codecs is None:
            plan.unchanged[path] = reason
        elif not is_exmy(codecs):
            plan.choices[path] = CodecChoice((codecs,))
        elif not from_values:
            plan.choices[path] = CodecChoice((defaults.complete(path, meta, codecs),))
        else:
            block = _automatic_block(meta) if request.auto_block else None
            settings = as_configuration(codecs) if block is None else {**as_configuration(codecs), "block": block}
            plan.undecided[path] = as_configuration(defaults.complete(path, meta, settings))
    defaults.check()
    return plan


def _default_match(meta: ArrayMeta) -> Match:
    """Return the match of an array without a rule; e4m3 stands in until the format is chosen."""
    if reason := _unsupported(meta):
        return Match(None, reason)
    return Match(None, ONE_DIMENSIONAL) if len(meta.shape) == 1 else Match("e4m3")


def _unsupported(meta: ArrayMeta) -> str:
    """Return why arrays of this dtype can't be in eXmY formats; empty if they can."""
    return "" if meta.dtype.name in FLOATS else f"{meta.dtype} is not encoded"


def _automatic_block(meta: ArrayMeta) -> int | None:
    """Return the largest of the block lengths 128, 64 and 32 that divides the last axis and its chunks, or None.

    The offsets of blocks of 128 cost a sixteenth of a bit per value. On the weights of a model, the lower error is
    worth more than that.
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
        if stored_bytes(encoded_meta(arrays[path].meta, codecs)) < arrays[path].encoded_bytes:
            choices[path] = CodecChoice((codecs,))
        else:
            unchanged[path] = "it already takes 8 bits per value or less"
    return Plan(choices, unchanged, {})


def _plan_min_sqnr(
    plan: Plan, studies: Sequence[Study], decibel: float, arrays: Mapping[str, SourceArray]
) -> Plan:
    """Return the plan with the `_TRIES` smallest formats expected to keep an SQNR, for each studied array."""
    choices, unchanged = dict(plan.choices), dict(plan.unchanged)
    for studied in studies:
        if studied.obstacle:
            unchanged[studied.path] = studied.obstacle
            continue
        max_error = studied.signal * 10 ** (-(decibel + _MARGIN) / 10)
        size = arrays[studied.path].encoded_bytes
        suitable = (e for e in studied.estimates if e.size < size and e.error <= max_error)
        best_by_size: dict[int, Estimate] = {}  # the estimate of the least error for each size, smallest first
        for estimate in sorted(suitable, key=lambda e: (e.size, e.error)):
            best_by_size.setdefault(estimate.size, estimate)
        if best_by_size:
            codecs = tuple(estimate.codecs for estimate in best_by_size.values())
            choices[studied.path] = CodecChoice(codecs[:_TRIES], decibel)
        else:
            unchanged[studied.path] = f"no smaller format is expected to keep {decibel:g} dB"
    return Plan(choices, unchanged, {})


def _plan_bits(plan: Plan, studies: Sequence[Study], target: Bits, arrays: Mapping[str, SourceArray]) -> Plan:
    """Return the plan with the formats that minimize the total error of the studied arrays within the budget.

    Raise `InvalidArgument`, naming the fewest possible bits, if even the smallest formats exceed the budget.
    """
    choices, unchanged = dict(plan.choices), dict(plan.unchanged)
    unchanged |= {s.path: s.obstacle for s in studies if s.obstacle}
    fixed_bytes = sum(arrays[path].encoded_bytes for path in unchanged)
    fixed_bytes += sum(stored_bytes(encoded_meta(arrays[p].meta, c.codecs[0])) for p, c in choices.items())
    encodable = [s for s in studies if not s.obstacle]
    curves = [_curve(studied, target, arrays[studied.path]) for studied in encodable]
    values = sum(array.meta.size for array in arrays.values())
    budget = int(target.average * values / 8) - fixed_bytes
    least_bytes = sum(min(point.size for point in curve) for curve in curves)
    if least_bytes > budget:
        total_bytes = least_bytes + fixed_bytes
        possible = math.ceil(8000 * total_bytes / max(1, values)) / 1000  # rounded up, so that it can be met
        raise InvalidArgument(
            f"bits={target.average:g} can't be met: the least possible is {possible:.3f} bits per value, of which "
            f"{8 * fixed_bytes / max(1, values):.3f} belong to {len(unchanged)} unchanged arrays and to arrays "
            "with a rule; allow more bits, or name these arrays in rules for smaller formats"
        )
    for studied, point in zip(encodable, allocate(curves, budget), strict=True):
        if point.option is None:
            unchanged[studied.path] = "the budget has room for all its bits"
        else:
            choices[studied.path] = CodecChoice((point.option,))
    return Plan(choices, unchanged, {})


def _curve(studied: Study, target: Bits, array: SourceArray) -> list[Point[Configuration | None]]:
    """Return the points of an array, with weighted errors: unchanged, and in each codec that makes it smaller."""
    weight = target.weight(studied.signal, array.meta.size)
    size = array.encoded_bytes
    curve: list[Point[Configuration | None]] = [Point(size, 0.0, None)]
    curve += [Point(e.size, weight * e.error, e.codecs) for e in studied.estimates if e.size < size]
    return curve


def allocate(curves: Sequence[Sequence[Point[C]]], budget: int) -> list[Point[C]]:
    """Return one point of each curve, of at most `budget` bytes in total, with about the least total error.

    If even the smallest points exceed the budget, return the smallest points. Each curve has at least one point.

    A mix of two points of the lower convex hull of a curve beats any other point, so only hulls count. All arrays
    begin at their smallest point. The steps between neighbouring hull points of all arrays are taken in the order
    of the error that each byte removes, while they fit (Shoham and Gersho 1988). Up to the first step that does
    not fit, no other points of that total size have a smaller error: the result is within a step of the optimum.
    """
    hulls = [lower_hull(curve) for curve in curves]
    chosen = [hull[0] for hull in hulls]
    room = budget - sum(point.size for point in chosen)
    steps = sorted(
        (-_gain(a, b), i, k) for i, hull in enumerate(hulls) for k, (a, b) in enumerate(itertools.pairwise(hull))
    )
    stopped: set[int] = set()  # the curves with a step that did not fit
    for _, i, k in steps:  # the gains of one hull decrease, so its steps come in order
        added = hulls[i][k + 1].size - chosen[i].size
        if i not in stopped and added <= room:
            chosen[i] = hulls[i][k + 1]
            room -= added
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
