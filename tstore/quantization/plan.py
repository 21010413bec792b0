"""Plans: which codecs each array of a version gets, by the rules or, where those are silent, by its data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from tstore.errors import InvalidArgument
from tstore.format.array_metadata import ArrayMeta
from tstore.format.codecs import FLOATS, Codecs, as_configuration, is_exmy, with_configuration
from tstore.format.grid import default_chunks
from tstore.quantization.allocation import Point, allocate
from tstore.quantization.encoding import SMALLEST, Choice
from tstore.quantization.policy import ONE_DIMENSIONAL, Bits, Default, Match, MinSqnr, Rules, Target
from tstore.quantization.rechunk import encoded_meta, stored_bytes
from tstore.quantization.study import Configuration, Study, nonfinite_reason, study
from tstore.quantization.values import Values, in_threads

__all__ = ["WIDTHS", "Plan", "SourceArray", "plan_by_rules", "plan_for", "rules_for"]

WIDTHS = range(2, 17)
"""The widths of formats that the data may choose from."""

_MARGIN = 0.05
"""dB: an estimate from a sample must lie that much above a floor to be tried first."""

_TRIES = 3


class SourceArray(NamedTuple):
    """An array as it is: its metadata, and the encoded bytes that it takes."""

    meta: ArrayMeta
    size: int


class Plan(NamedTuple):
    """What becomes of the arrays of a version: `choices` are encoded, `kept` stay as they are, for a reason.

    The data decides on those `left`, in the granularity and scale that are given with each.
    """

    choices: dict[str, Choice]
    kept: dict[str, str]
    left: dict[str, Configuration]


def plan_by_rules(
    arrays: Mapping[str, SourceArray],
    rules: Rules | None,
    recipe: Configuration,
    *,
    data: bool,
    automatic: bool = True,
) -> Plan:
    """Return what the rules say of each array; with `data`, float arrays without a rule are left to their data.

    `recipe` is the granularity and scale of eXmY codecs that name none; an array that it does not fit (a vector
    has no second axis) has one offset. With `automatic`, arrays that are left to their data have the blocks of
    `automatic_block`. `InvalidArgument` where the recipe fits no array at all, or a rule is wrong.
    """
    plan, misfits, fitting = Plan({}, {}, {}), list[InvalidArgument](), 0

    def fitted(path: str, meta: ArrayMeta, codecs: Codecs) -> Codecs:
        nonlocal fitting
        asked = as_configuration(codecs)
        own = {**recipe, **asked}
        try:
            encoded_meta(meta, with_configuration(codecs, own))
        except InvalidArgument as error:
            if own == asked:
                raise InvalidArgument(f"{path}: {error}") from None
            misfits.append(InvalidArgument(f"{dict(recipe)} fits no array of this checkpoint; {path}: {error}"))
            own = {key: value for key, value in own.items() if key in asked or key not in ("axis", "block")}
            encoded_meta(meta, with_configuration(codecs, own))
        else:
            fitting += 1
        return with_configuration(codecs, own)

    for path, (meta, _) in arrays.items():
        matched = None if rules is None else rules.match(path, meta.dtype, len(meta.shape))
        by_data = matched is None and data
        codecs, reason = matched or _unmatched(meta, data=data)
        if meta.size < SMALLEST and (is_exmy(codecs) or reason == ONE_DIMENSIONAL):
            plan.kept[path] = f"fewer than {SMALLEST} values"
        elif codecs is None:
            plan.kept[path] = reason
        elif not is_exmy(codecs):
            plan.choices[path] = Choice((codecs,))
        elif not by_data:
            plan.choices[path] = Choice((fitted(path, meta, codecs),))
        else:
            block = automatic_block(meta) if automatic else None
            asked = as_configuration(codecs) if block is None else {**as_configuration(codecs), "block": block}
            plan.left[path] = as_configuration(fitted(path, meta, asked))
    if misfits and not fitting:
        raise misfits[0]
    return plan


def _unmatched(meta: ArrayMeta, *, data: bool) -> Match:
    """Return what an array gets that no rule matches: some eXmY format where its data decides."""
    if meta.dtype.name not in FLOATS:
        return Match(None, f"{meta.dtype} is not encoded")
    if not data:
        return Match(None)
    return Match(None, ONE_DIMENSIONAL) if len(meta.shape) == 1 else Match("e4m3")


def automatic_block(meta: ArrayMeta) -> int | None:
    """Return how many values share an offset: the most of 128, 64 and 32 that fit rows and chunks, None without.

    Blocks of 128 cost a sixteenth of a bit a value and gain more than that on the weights of a model. Where no
    block fits, the whole array shares one offset.
    """
    if len(meta.shape) < 2:
        return None
    length = math.gcd(meta.shape[-1], meta.chunks[-1])
    return next((block for block in (128, 64, 32) if length % block == 0), None)


def plan_for(
    target: Target | Default, plan: Plan, studies: Sequence[Study], arrays: Mapping[str, SourceArray]
) -> Plan:
    """The plan with what the studies say of the arrays that were left to their data."""
    match target:
        case MinSqnr(decibel):
            return _above(plan, studies, decibel, arrays)
        case Bits():
            return _within(plan, studies, target, arrays)
        case Default():
            return _in_eight_bits(plan, arrays)


def _in_eight_bits(plan: Plan, arrays: Mapping[str, SourceArray]) -> Plan:
    """Return the plan with a format of 8 bits for each array left; those that are no larger now are kept."""
    choices, kept = dict(plan.choices), dict(plan.kept)
    for path, recipe in plan.left.items():
        shared = recipe.get("axis") is not None or recipe.get("block") is not None
        codecs = {**recipe, "format": "e2m5" if shared else "e3m4"}
        if stored_bytes(encoded_meta(arrays[path].meta, codecs)) < arrays[path].size:
            choices[path] = Choice((codecs,))
        else:
            kept[path] = "it takes 8 bits a value or less already"
    return Plan(choices, kept, {})


def _above(plan: Plan, studies: Sequence[Study], decibel: float, arrays: Mapping[str, SourceArray]) -> Plan:
    """For each studied array the smallest formats that are expected to keep an SQNR, the best few of them."""
    choices, kept = dict(plan.choices), dict(plan.kept)
    for found in studies:
        if found.nonfinite:
            kept[found.path] = nonfinite_reason(found.nonfinite, arrays[found.path].meta.size)
            continue
        most = arrays[found.path].size
        allowed = found.signal * 10 ** (-(decibel + _MARGIN) / 10)
        able = sorted((size, error, i) for i, (_, size, error) in enumerate(found.candidates) if error <= allowed)
        best = {size: i for size, _, i in reversed(able) if size < most}  # the least error of each size
        tries = [found.candidates[i][0] for _, i in sorted(best.items())][:_TRIES]
        if tries:
            choices[found.path] = Choice(tuple(tries), decibel)
        else:
            kept[found.path] = f"no smaller format is expected to keep {decibel:g} dB"
    return Plan(choices, kept, {})


def _within(plan: Plan, studies: Sequence[Study], target: Bits, arrays: Mapping[str, SourceArray]) -> Plan:
    """For the studied arrays together the formats of the least error, at so many bits a value over all arrays.

    `InvalidArgument`, with the least that is possible, where even the smallest formats are too big.
    """
    choices, kept = dict(plan.choices), dict(plan.kept)
    fixed = sum(arrays[path].size for path in kept)
    fixed += sum(stored_bytes(encoded_meta(arrays[p].meta, c.codecs[0])) for p, c in choices.items())
    curves: list[list[Point[Configuration | None]]] = []
    studied = [s for s in studies if not s.nonfinite]
    for found in studies:
        size = arrays[found.path].size
        if found.nonfinite:
            kept[found.path] = nonfinite_reason(found.nonfinite, arrays[found.path].meta.size)
            fixed += size
        else:
            curve: list[Point[Configuration | None]] = [Point(size, 0.0, None)]
            weight = target.weight(found.signal, arrays[found.path].meta.size)
            curve += [Point(b, weight * e, c) for c, b, e in found.candidates if b < size]
            curves.append(curve)
    values = sum(given.meta.size for given in arrays.values())
    budget = int(target.average * values / 8) - fixed
    least = sum(min(point.size for point in curve) for curve in curves)
    if least > budget:
        possible = 8 * (least + fixed) / max(1, values)
        raise InvalidArgument(
            f"bits={target.average:g} can't be met: the least possible is {possible:.3f} bits a value, of which "
            f"{8 * fixed / max(1, values):.3f} are {len(kept)} arrays that keep their bits and those with a rule; "
            "allow more bits, or name these arrays in rules for smaller formats"
        )
    for found, point in zip(studied, allocate(curves, budget), strict=True):
        if point.choice is None:
            kept[found.path] = "the budget has room for all its bits"
        else:
            choices[found.path] = Choice((point.choice,))
    return Plan(choices, kept, {})


async def rules_for(target: Target, leaves: Mapping[str, npt.NDArray[Any]]) -> Rules:
    """The codecs of arrays in memory that their data decides, as rules of their paths."""
    arrays = {}
    for path, values in leaves.items():
        meta = ArrayMeta.new(values.shape, values.dtype, default_chunks(values.shape, values.dtype.itemsize))
        arrays[path] = SourceArray(meta, stored_bytes(meta))
    plan = plan_by_rules(arrays, None, {}, data=True)
    held = [Values.held(path, arrays[path].meta, leaves[path]) for path in plan.left]
    studies = await in_threads(lambda v: study(v, plan.left[v.path], WIDTHS), held)
    chosen = plan_for(target, plan, studies, arrays).choices
    return Rules.exact({path: choice.codecs[0] for path, choice in chosen.items()})
