"""The allotment of a budget of bytes to arrays, each of which can be stored in several ways; pure, no I/O."""

from __future__ import annotations

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

    A mix of two points of the lower convex hull of a curve beats any other point, so only hulls count. All arrays
    begin at their smallest point. The steps between neighbouring hull points of all arrays are taken in the order
    of the error that each byte removes, while they fit (Shoham and Gersho 1988). Up to the first step that does
    not fit, no other points of that total size have a smaller error: the result is within a step of the optimum.
    What is left goes to single points, on a hull or not, of the arrays whose error falls most.
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
    options = [_best(curve, point, room) for curve, point in zip(curves, chosen, strict=True)]
    for i in sorted(range(len(curves)), key=lambda i: options[i].error - chosen[i].error):
        point = _best(curves[i], chosen[i], room)
        room -= point.size - chosen[i].size
        chosen[i] = point
    return chosen


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
