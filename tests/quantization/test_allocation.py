"""The allocation of a budget: within the budget, on the hulls of the curves, and close to the optimum."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tstore.quantization.allocation import Point, allocate, lower_hull

POINTS = st.tuples(st.integers(1, 30), st.integers(0, 1000)).map(lambda p: Point(p[0], float(p[1]), p))
CURVES = st.lists(st.lists(POINTS, min_size=1, max_size=5), min_size=1, max_size=4)


@given(st.lists(POINTS, min_size=1, max_size=12))
def test_no_point_lies_below_the_hull(points: list[Point[object]]) -> None:
    hull = lower_hull(points)
    sizes, errors = [p.size for p in hull], [p.error for p in hull]
    assert sizes == sorted(set(sizes))
    assert errors == sorted(set(errors), reverse=True)
    assert errors[-1] == min(p.error for p in points)
    slopes = [(a.error - b.error) / (b.size - a.size) for a, b in itertools.pairwise(hull)]
    assert all(a > b for a, b in itertools.pairwise(slopes))
    for p in points:
        for a, b in itertools.pairwise(hull):
            if a.size <= p.size <= b.size:
                assert p.error >= a.error - (a.error - b.error) * (p.size - a.size) / (b.size - a.size) - 1e-9


@given(CURVES, st.integers(1, 150))
def test_the_error_is_the_least_but_for_the_bytes_of_one_step(
    curves: list[list[Point[object]]], budget: int
) -> None:
    chosen = allocate(curves, budget)
    assert all(p in curve for p, curve in zip(chosen, curves, strict=True))
    least = sum(min(p.size for p in curve) for curve in curves)
    assert sum(p.size for p in chosen) <= max(budget, least)
    step = max((b.size - a.size for curve in curves for a, b in itertools.pairwise(lower_hull(curve))), default=0)
    others = [
        sum(p.error for p in points)
        for points in itertools.product(*curves)
        if sum(p.size for p in points) <= budget - step
    ]
    assert sum(p.error for p in chosen) <= min(others, default=float("inf")) + 1e-9


def test_bytes_go_where_they_take_most_error_away() -> None:
    steep = [Point(10, 100.0, "a"), Point(20, 10.0, "b"), Point(40, 1.0, "c")]
    flat = [Point(10, 20.0, "a"), Point(20, 15.0, "b")]
    assert [p.option for p in allocate([steep, flat], 30)] == ["b", "a"]
    assert [p.option for p in allocate([steep, flat], 40)] == ["b", "b"]
    assert [p.option for p in allocate([steep, flat], 60)] == ["c", "b"]
    assert [p.option for p in allocate([steep, flat], 5)] == ["a", "a"]


def test_a_point_above_the_hull_is_taken_only_for_bytes_that_are_left() -> None:
    curve = [Point(10, 100.0, "small"), Point(20, 99.0, "bad"), Point(30, 0.0, "large")]
    assert [p.option for p in allocate([curve], 19)] == ["small"]
    assert [p.option for p in allocate([curve], 29)] == ["bad"]
    assert [p.option for p in allocate([curve], 30)] == ["large"]
    assert [p.option for p in allocate([curve, curve], 49)] == ["large", "small"]


def test_a_point_above_the_hull_is_taken_where_the_next_step_does_not_fit() -> None:
    curve = [Point(0, 100.0, "small"), Point(40, 50.0, "above"), Point(60, 10.0, "large")]
    other = [Point(10, 200.0, "x"), Point(20, 100.0, "y"), Point(50, 60.0, "z")]
    assert [p.option for p in allocate([curve, other], 65)] == ["above", "y"]
    assert [p.option for p in allocate([curve, other], 80)] == ["large", "y"]
    assert [p.option for p in allocate([curve, other], 59)] == ["small", "z"]


def test_equal_sizes_have_the_lesser_error() -> None:
    assert lower_hull([Point(10, 3.0, "x"), Point(10, 2.0, "y")]) == [Point(10, 2.0, "y")]
    with pytest.raises(IndexError):
        allocate([[]], 10)
