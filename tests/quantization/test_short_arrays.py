"""The choice of formats for short arrays, whose packed codes may take fewer bytes than entropy-coded ones."""

from __future__ import annotations

from collections.abc import Mapping

import exmy
import numpy as np
import pytest

from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.quantization.plan import SourceArray, plan_by_rules
from tstore.quantization.policy import Bits
from tstore.quantization.request import Request
from tstore.quantization.studied_plan import StudiedPlan
from tstore.quantization.study import Study, Undecided, encoded_meta, stored_bytes, study
from tstore.quantization.values import Values

RNG = np.random.default_rng(0)


async def test_a_correction_leaves_the_sizes_of_packed_codes() -> None:
    """Those are exact: if entropy-coded values take twice as much as estimated, packed ones fill the budget."""
    x = RNG.laplace(size=(64, 64)).astype("f4")
    arrays = {"w": SourceArray(meta := ArrayMeta.new(x.shape, x.dtype, x.shape), stored_bytes(meta))}
    plan = plan_by_rules(arrays, Request(None, Bits(4.5)))

    async def studied(undecided: Mapping[str, Undecided]) -> list[Study]:
        return [study(Values.in_memory("w", meta, x), each) for each in undecided.values()]

    plans = StudiedPlan(plan, arrays, studied)
    first = (decided := await plans.decide(1.0)).choices["w"]
    plans.correct(decided, {"w": 2 * first.size})
    choice = (await plans.decide(1.0)).choices["w"]
    assert choice.codecs != first.codecs
    assert choice.size == stored_bytes(encoded_meta(meta, choice.codecs[0]))


@pytest.mark.parametrize(("side", "widths"), [(64, {3, 4}), (16, {2, 3, 4})])
def test_packed_codes_of_short_arrays_are_studied_in_the_widths_around(side: int, widths: set[int]) -> None:
    """A width is a whole number of bits, and a header takes more bits per value the shorter the array is."""
    x = RNG.laplace(size=(side, side)).astype("f4")
    arrays = {"w": SourceArray(meta := ArrayMeta.new(x.shape, x.dtype, x.shape), stored_bytes(meta))}
    undecided = plan_by_rules(arrays, Request(None, Bits(4.5))).undecided["w"]._replace(bits=(3.2, 3.8))
    estimates = study(Values.in_memory("w", meta, x), undecided).estimates
    assert {exmy.Format(e.codecs["format"]).bits for e in estimates if e.is_exact} == widths
