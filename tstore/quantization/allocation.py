"""Allocation: the sizes of many arrays that together have the least error within a budget of bytes; pure.

1. Each array has a curve: what it costs in bytes and in error, in each of the ways that it can be stored.
2. Only the points on the lower convex hull of a curve are worth taking: any other is beaten by a mix of two.
3. All arrays begin at their smallest point. The steps from hull point to hull point of all arrays, sorted by how
   much error each byte takes away, are taken one after the other as long as they fit (Shoham and Gersho 1988).

Up to the first step that does not fit this is the least error that so many bytes allow, so a budget is missed by
less than one step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Point", "allocate", "lower_hull"]

C = TypeVar("C")


class Point(NamedTuple, Generic[C]):
    """One way to store an array: its bytes, its error, and what is chosen then."""

    size: int
    error: float
    choice: C


def lower_hull(points: Sequence[Point[C]]) -> list[Point[C]]:
    """The points of the lower convex hull, by size; error falls from each to the next."""
    hull: list[Point[C]] = []
    for point in sorted(points, key=lambda p: (p.size, p.error)):
        if hull and point.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def allocate(curves: Sequence[Sequence[Point[C]]], budget: int) -> list[Point[C]]:
    """One point of each curve, together of at most `budget` bytes; the smallest of each where that is too little.

    Curves have one point or more. What remains is spent on later steps that still fit.
    """
    hulls = [lower_hull(curve) for curve in curves]
    chosen = [hull[0] for hull in hulls]
    room = budget - sum(point.size for point in chosen)
    steps = sorted(
        (-_gain(a, b), i, k) for i, hull in enumerate(hulls) for k, (a, b) in enumerate(itertools.pairwise(hull))
    )
    stopped: set[int] = set()
    for _, i, k in steps:  # of one hull the gains fall, so its steps come in order
        if i in stopped:
            continue
        more = hulls[i][k + 1].size - chosen[i].size
        if more <= room:
            chosen[i] = hulls[i][k + 1]
            room -= more
        else:
            stopped.add(i)
    return chosen


def _gain(a: Point[C], b: Point[C]) -> float:
    """The error that each further byte takes away."""
    return (a.error - b.error) / (b.size - a.size)
