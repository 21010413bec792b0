"""Plans: the codecs of each array of a version, from a rule or, for a target, from the array's values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.codecs import FLOATS, Codecs, as_configuration, is_exmy, with_configuration
from tstore.errors import InvalidArgument
from tstore.quantization.allocation import Point, allocate
from tstore.quantization.encoding import MIN_VALUES, CodecChoice, fits_importance
from tstore.quantization.policy import ONE_DIMENSIONAL, Bits, Match, MinSqnr, Target
from tstore.quantization.request import Request
from tstore.quantization.sensitivity import Importance
from tstore.quantization.study import Estimate, Study, Undecided, encoded_meta, stored_bytes

__all__ = [
    "Plan",
    "SourceArray",
    "TargetedArrays",
    "check_measurable",
    "decide",
    "excess",
    "plan_by_rules",
    "planned_bytes",
    "with_importance",
]

_MARGIN = 0.05
"""dB by which an estimate must exceed the required SQNR before its codecs are tried."""

_TRIES = (0.0, 0.2, 1.0)
"""dB to add to that margin for the codecs of the first, second and third try."""


class SourceArray(NamedTuple):
    """An array of the version to quantize: its metadata, and the size of its stored chunks in bytes."""

    meta: ArrayMeta
    encoded_bytes: int


class TargetedArrays(NamedTuple):
    """The arrays with a common target: those of one rule, or those without a rule.

    `undecided` are the arrays whose codecs depend on their values. A budget counts the values and the bytes of all
    `paths`: of the undecided arrays, of those that stay unchanged and, without a rule, of those with other rules.
    If `paths` is None, it counts the undecided arrays that eXmY can encode, which `decide` finds out. `pattern` is
    that of the rule, and empty without one.
    """

    target: Target
    paths: list[str] | None
    undecided: dict[str, Undecided]
    pattern: str = ""

    @property
    def prefix(self) -> str:
        """The beginning of messages about the target."""
        return f"the rule {self.pattern!r}: " if self.pattern else ""


class Plan(NamedTuple):
    """The codecs of each array of a version, or the reason why the array stays unchanged.

    `choices` has the codecs of the arrays to encode, `unchanged` the reasons of the unchanged arrays, and
    `targeted` the arrays whose codecs a target decides. `importance` has that of some arrays in budgets.
    """

    choices: dict[str, CodecChoice]
    unchanged: dict[str, str]
    targeted: list[TargetedArrays]
    importance: Mapping[str, Importance]

    @property
    def undecided(self) -> dict[str, Undecided]:
        """The undecided arrays of all targets."""
        return {path: undecided for each in self.targeted for path, undecided in each.undecided.items()}


class _Defaults:
    """The default granularity and scale of eXmY codecs, and whether these settings fit any array."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._fits_any = False
        self._first_error: InvalidArgument | None = None

    def complete(self, path: str, meta: ArrayMeta, codecs: Codecs) -> Codecs:
        """Return the codecs completed by the defaults, or with one offset per array if the defaults do not fit.

        Raise `InvalidArgument` if the codecs do not fit even without the defaults.
        """
        explicit = as_configuration(codecs)
        settings = {**self._applicable(explicit), **explicit}
        one_offset = {k: v for k, v in settings.items() if k in explicit or k not in ("axis", "block")}
        try:
            completed = _fitting(path, meta, with_configuration(codecs, settings))
        except InvalidArgument as error:
            if settings == one_offset:
                raise
            self._first_error = self._first_error or InvalidArgument(
                f"the settings {dict(self._settings)} fit no array of this checkpoint; {error}"
            )
            return _fitting(path, meta, with_configuration(codecs, one_offset))
        self._fits_any = True
        return completed

    def _applicable(self, explicit: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults without those that contradict the settings of a rule."""
        has_groups = explicit.get("axis") is not None or explicit.get("block") is not None
        scale, excluded = explicit.get("scale", "search"), set()
        if scale == "none" or not isinstance(scale, str):
            excluded = {"axis", "block"}
        if has_groups and self._settings.get("scale") == "none":
            excluded.add("scale")
        return {key: value for key, value in self._settings.items() if key not in excluded}

    def check(self) -> None:
        """Raise `InvalidArgument` if the settings fit none of the arrays."""
        if self._first_error is not None and not self._fits_any:
            raise self._first_error


def _fitting(path: str, meta: ArrayMeta, codecs: Codecs) -> Codecs:
    """Return codecs that fit an array; raise `InvalidArgument`, naming its path, if they do not."""
    try:
        encoded_meta(meta, codecs)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from None
    return codecs


def plan_by_rules(arrays: Mapping[str, SourceArray], request: Request) -> Plan:
    """Return the plan by the rules; float arrays with a target are undecided.

    An array that the request's defaults do not fit (a vector has no second axis) gets one offset for all values.
    Raise `InvalidArgument` if the defaults fit no array at all, or a rule is invalid.
    """
    plan, defaults, rules = Plan({}, {}, [], {}), _Defaults(request.defaults), request.rules
    targets = {} if rules is None else rules.targets
    members: dict[str, list[str]] = {pattern: [] for pattern in targets}
    of_rules = {p: TargetedArrays(target, members[p], {}, p) for p, target in targets.items()}
    others = None
    if request.target is not None:
        others = TargetedArrays(request.target, None if request.is_default else list(arrays), {})
    for path, (meta, _) in arrays.items():
        matched = None if rules is None else rules.match(path, meta.dtype, len(meta.shape))
        match = matched or _default_match(meta, request.target)
        codecs, reason = match.codecs, match.reason
        targeted = others if matched is None else of_rules.get(match.pattern)
        if match.pattern in members:
            members[match.pattern].append(path)
        is_target = isinstance(codecs, MinSqnr | Bits)
        if meta.size < MIN_VALUES and (is_target or _is_exmy(codecs) or reason == ONE_DIMENSIONAL):
            plan.unchanged[path] = f"fewer than {MIN_VALUES} values"
        elif codecs is None:
            plan.unchanged[path] = reason
        elif (is_target or _is_exmy(codecs)) and not np.isfinite(np.float64(meta.fill_value)):
            plan.unchanged[path] = f"eXmY can't encode its fill value {meta.fill_value}"
        elif isinstance(codecs, MinSqnr | Bits):
            assert targeted is not None
            settings: dict[str, Any] = {}
            if codecs.coding == "packed":
                block = _automatic_block(meta) if request.auto_block else None
                stand_in = {"format": "e4m3"} if block is None else {"format": "e4m3", "block": block}
                settings = {**as_configuration(defaults.complete(path, meta, stand_in))}
                del settings["format"]
            targeted.undecided[path] = Undecided(codecs.coding, settings)
        elif _is_exmy(codecs):
            plan.choices[path] = CodecChoice((defaults.complete(path, meta, codecs),))
        else:
            plan.choices[path] = CodecChoice((codecs,))
    defaults.check()
    return plan._replace(targeted=[*of_rules.values(), *([] if others is None else [others])])


def check_measurable(plan: Plan, arrays: Mapping[str, SourceArray]) -> None:
    """Raise `InvalidArgument` if a rule has codecs that change values, whose errors can't be measured."""
    for path, choice in plan.choices.items():
        [codecs] = choice.codecs
        if not is_exmy(codecs) and not encoded_meta(arrays[path].meta, codecs).chain.lossless:
            raise InvalidArgument(
                f"{path}: the codecs of its rule change values, but tstore.quantize measures errors only if the "
                "first codec is 'exmy'; name an eXmY format, or pass these codecs to tstore.save"
            )


def _is_exmy(codecs: Any) -> bool:
    return not isinstance(codecs, MinSqnr | Bits) and is_exmy(codecs)


def _default_match(meta: ArrayMeta, target: Target | None) -> Match:
    """Return the match of an array without a rule."""
    if meta.dtype.name not in FLOATS:
        return Match(None, f"{meta.dtype} is not encoded")
    return Match(None, ONE_DIMENSIONAL) if target is not None and len(meta.shape) == 1 else Match(target)


def _automatic_block(meta: ArrayMeta) -> int | None:
    """Return the largest of the block lengths 128, 64 and 32 that divides the last axis and its chunks, or None.

    The offsets of blocks of 128 cost a sixteenth of a bit per value. On the weights of a model, the lower error is
    worth more than that.
    """
    if len(meta.shape) < 2:
        return None
    length = math.gcd(meta.shape[-1], meta.chunks[-1])
    return next((block for block in (128, 64, 32) if length % block == 0), None)


def with_importance(plan: Plan, importance: Mapping[str, Importance]) -> Plan:
    """Return the plan with the importance of arrays and of their values.

    Raise `InvalidArgument` if an array with a target for its SQNR has a weight, or if the importance of the values
    of one with a rule can't affect its codes.
    """
    for path in sorted(plan.choices.keys() & importance.keys()):
        codecs = plan.choices[path].codecs[0]
        if importance[path].of_values is not None and is_exmy(codecs) and not fits_importance(codecs):
            raise InvalidArgument(
                f"sensitivity of {path}: importance of rows or columns can't affect the codes of its rule, which "
                "has a fixed scale or compresses them; name a format with the scale 'search', 'float', 'e4m3' or "
                "'6bit' alone"
            )
    all_targeted = []
    for targeted in plan.targeted:
        for path in sorted(targeted.undecided.keys() & importance.keys()):
            if isinstance(targeted.target, MinSqnr) and importance[path].weight != 1:
                raise InvalidArgument(
                    f"sensitivity of {path}: a number applies to budgets of bits, but min_sqnr="
                    f"{targeted.target.decibel:g} decides the codecs of this array alone"
                )
        undecided = {
            path: each._replace(importance=importance.get(path, Importance()).of_values)
            for path, each in targeted.undecided.items()
        }
        all_targeted.append(targeted._replace(undecided=undecided))
    return plan._replace(targeted=all_targeted, importance=importance)


def decide(
    plan: Plan,
    studies: Mapping[str, Study],
    arrays: Mapping[str, SourceArray],
    share: float,
) -> Plan:
    """Return the plan with codecs for each undecided array, or the reason why it stays unchanged.

    `share`: how much of a budget the estimated sizes of entropy-coded arrays may fill. Raise `InvalidArgument`,
    naming the fewest possible bits, if even the smallest codecs exceed a budget.
    """
    decided = Plan(dict(plan.choices), dict(plan.unchanged), [], plan.importance)
    for targeted in plan.targeted:
        studied = [studies[path] for path in targeted.undecided]
        decided.unchanged.update({s.path: s.obstacle for s in studied if s.obstacle})
        suitable = [s for s in studied if not s.obstacle]
        paths = [s.path for s in suitable] if targeted.paths is None else targeted.paths
        decided.targeted.append(targeted._replace(paths=paths, undecided={}))
        match targeted.target:
            case MinSqnr(decibel):
                _keep_sqnr(decided, suitable, decibel, arrays)
            case Bits() as target:
                _share_budget(decided, target, paths, suitable, arrays, share, targeted.prefix)
    for path in decided.choices.keys() & plan.importance.keys():
        choice = decided.choices[path]
        decided.choices[path] = choice._replace(importance=plan.importance[path].of_values)
    return decided


def _keep_sqnr(plan: Plan, studies: Sequence[Study], decibel: float, arrays: Mapping[str, SourceArray]) -> None:
    """Choose the smallest codecs that are expected to keep an SQNR; others are tried if they do not."""
    for studied in studies:
        smaller = sorted(
            (e for e in studied.estimates if e.size < arrays[studied.path].encoded_bytes),
            key=lambda e: (e.size, e.error),
        )
        tries: list[Estimate] = []
        for excess in _TRIES:
            most = studied.signal * 10 ** (-(decibel + _MARGIN + excess) / 10)
            least_size = tries[-1].size + 1 if tries else 0
            tries += [e for e in smaller if e.size >= least_size and e.error <= most][:1]
        if tries:
            plan.choices[studied.path] = CodecChoice(tuple(e.codecs for e in tries), decibel)
        else:
            plan.unchanged[studied.path] = f"no smaller format is expected to keep {decibel:g} dB"


def _share_budget(
    plan: Plan,
    target: Bits,
    paths: Sequence[str],
    studies: Sequence[Study],
    arrays: Mapping[str, SourceArray],
    share: float,
    prefix: str,
) -> None:
    """Choose the codecs that minimize the total error of the studied arrays within a budget for all of `paths`.

    The message of an error begins with `prefix`.
    """
    values = sum(arrays[path].meta.size for path in paths)
    decided = [path for path in paths if path in plan.unchanged or path in plan.choices]
    decided_bytes = {path: planned_bytes(plan, path, arrays[path]) for path in decided}
    fixed_bytes = sum(decided_bytes.values())
    curves = []
    for studied in studies:
        array = arrays[studied.path]
        weight = (
            target.weight(studied.signal, array.meta.size) * plan.importance.get(studied.path, Importance()).weight
        )
        curves.append(_curve(studied, weight, array.encoded_bytes, share))
    budget = int(target.average * values / 8) - fixed_bytes
    stored = sum(arrays[each.path].encoded_bytes for each in studies)
    if studies and stored <= budget:
        taken = 8 * (stored + fixed_bytes) / values
        raise InvalidArgument(
            f"{prefix}bits={target.average:g} changes nothing, because the arrays already take {taken:.3f} bits "
            "per value; pass fewer bits"
        )
    least_bytes = sum(min(point.size for point in curve) for curve in curves)
    if least_bytes > budget:
        total_bytes = least_bytes + fixed_bytes
        possible = math.ceil(8000 * total_bytes / max(1, values)) / 1000  # rounded up, so that it can be met
        message = (
            f"{prefix}bits={target.average:g} can't be met: the least possible is {possible:.3f} bits per value"
        )
        if not fixed_bytes:
            raise InvalidArgument(f"{message}; allow more bits")
        largest = max(decided, key=decided_bytes.__getitem__)
        fixed = 8 * fixed_bytes / max(1, values)
        raise InvalidArgument(
            f"{message}, of which {fixed:.3f} belong to arrays that stay unchanged or have a rule, the largest of "
            f"them {largest}; allow more bits, or add rules that make these smaller"
        )
    for studied, point in zip(studies, allocate(curves, budget), strict=True):
        if point.option is None:
            plan.unchanged[studied.path] = "the budget has room for all its bits"
        else:
            plan.choices[studied.path] = CodecChoice(
                (point.option.codecs,), size=point.option.size, header_size=point.option.header_size
            )


def planned_bytes(plan: Plan, path: str, array: SourceArray) -> int:
    """Return the size of an array whose codecs are chosen, which is estimated if it is entropy-coded."""
    choice = plan.choices.get(path)
    if choice is None:
        return array.encoded_bytes
    return choice.size or stored_bytes(encoded_meta(array.meta, choice.codecs[0]))


def _curve(studied: Study, weight: float, size: int, share: float) -> list[Point[Estimate | None]]:
    """Return the points of an array, with weighted errors: unchanged, and in each codec that makes it smaller."""
    curve: list[Point[Estimate | None]] = [Point(size, 0.0, None)]
    for e in studied.estimates:
        if e.size < size:
            size_in_budget = e.size - e.header_size if e.is_exact else math.ceil(e.size / share)
            curve.append(Point(size_in_budget, weight * e.error, e))
    return curve


def excess(decided: Plan, arrays: Mapping[str, SourceArray], sizes: Mapping[str, int]) -> str:
    """Return which budget of a decided plan the stored sizes exceed, and by how much; empty if they keep all.

    `sizes` has the stored sizes of the encoded arrays.
    """
    for targeted in decided.targeted:
        target, paths = targeted.target, targeted.paths
        assert paths is not None
        size = sum(sizes.get(path, arrays[path].encoded_bytes) for path in paths)
        size -= sum(decided.choices[path].header_size for path in paths if path in sizes)
        values = sum(arrays[path].meta.size for path in paths)
        if isinstance(target, Bits) and 8 * size > target.average * values:
            name = f"{targeted.prefix}bits={target.average:g}"
            return f"{name} can't be met, {8 * size / max(1, values):.3f} bits per value were stored"
    return ""
