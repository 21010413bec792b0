"""Allocate a budget of bytes to arrays that can each be stored in several ways; pure, no I/O."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Point", "allocate", "lower_hull"]

C = TypeVar("C")


class Point(NamedTuple, Generic[C]):
    """One way to store an array: the option chosen, and the size in bytes and the error that result."""

    size: int
    error: float
    option: C


def allocate(curves: Sequence[Sequence[Point[C]]], budget: int) -> list[Point[C]]:
    """Return one point of each curve, of at most `budget` bytes in total, with about the least total error.

    If even the smallest points exceed the budget, return the smallest points. Each curve has at least one point.

    A mix of two points of the lower convex hull of a curve beats any other point, so only hulls count at first.
    All arrays begin at their smallest point. The steps between adjacent hull points of all arrays are taken in the
    order of the error removed per byte, as long as they fit (Shoham and Gersho 1988). The array whose step is the
    first that does not fit takes the point, on the hull or not, that leaves the least error together with the
    steps of others that then fit. The result is within that one step of the optimum. The remaining bytes go to
    single points of the arrays whose error falls most.
    """
    hulls = [lower_hull(curve) for curve in curves]
    steps = sorted(
        (
            _Step(-_gain(a, b), i, b.size - a.size, a.error - b.error, b)
            for i, hull in enumerate(hulls)
            for a, b in itertools.pairwise(hull)
        ),
        key=lambda step: step[:2],  # stable: the gains of one hull decrease, so its steps stay in order
    )
    chosen = [hull[0] for hull in hulls]
    room = budget - sum(point.size for point in chosen)
    fitting = bisect.bisect_right(list(itertools.accumulate(step.size for step in steps)), room)
    for step in steps[:fitting]:
        chosen[step.curve] = step.point
        room -= step.size
    if fitting < len(steps):
        i = steps[fitting].curve
        steps = [step for step in steps[fitting:] if step.curve != i]
        room += chosen[i].size
        chosen[i] = _best_beside(steps, curves[i], chosen[i], room)
        room -= chosen[i].size
        stopped: set[int] = set()  # the curves with a step that did not fit
        for step in steps:
            if step.curve not in stopped and step.size <= room:
                chosen[step.curve] = step.point
                room -= step.size
            else:
                stopped.add(step.curve)
    options = [_best(curve, point, room) for curve, point in zip(curves, chosen, strict=True)]
    for i in sorted(range(len(curves)), key=lambda i: options[i].error - chosen[i].error):
        point = _best(curves[i], chosen[i], room)
        room -= point.size - chosen[i].size
        chosen[i] = point
    return chosen


class _Step(NamedTuple, Generic[C]):
    """A step from a point of a curve's hull to the next, `point`: the bytes it adds, and the error it removes.

    Steps are sorted by `order`, the negative of the error that each byte removes.
    """

    order: float
    curve: int
    size: int
    error: float
    point: Point[C]


def _best_beside(steps: Sequence[_Step[C]], curve: Sequence[Point[C]], chosen: Point[C], room: int) -> Point[C]:
    """Return the point of up to `room` bytes that leaves the least error together with steps of other curves."""
    sizes = [0, *itertools.accumulate(step.size for step in steps)]
    removed = [0.0, *itertools.accumulate(step.error for step in steps)]

    def remaining_error(point: Point[C]) -> float:
        return point.error - removed[bisect.bisect_right(sizes, room - point.size) - 1]

    return min((p for p in curve if p.size <= room), key=remaining_error, default=chosen)


def _best(curve: Sequence[Point[C]], chosen: Point[C], room: int) -> Point[C]:
    """Return the point of least error that takes up to `room` bytes more than the chosen one."""
    return min((p for p in curve if p.size <= chosen.size + room), key=lambda p: (p.error, p.size), default=chosen)


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
