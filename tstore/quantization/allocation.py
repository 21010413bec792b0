"""Allocation of a budget of bytes to many arrays so that their total error is least; pure.

1. Each array has a curve of points, the size and the error of each way to store it.
2. Only the points on the lower convex hull of a curve matter: a mix of two hull points beats any other point.
3. All arrays begin at their smallest point. The steps between neighbouring hull points of all arrays, sorted by
   the error that each byte removes, are taken in turn while they fit (Shoham and Gersho 1988).

Up to the first step that does not fit this is the least error for that many bytes, so the result is within one
step of the optimum for the budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Point", "allocate", "lower_hull"]

C = TypeVar("C")


class Point(NamedTuple, Generic[C]):
    """One way to store an array: its bytes, its error, and the choice that leads to them."""

    size: int
    error: float
    choice: C


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


def allocate(curves: Sequence[Sequence[Point[C]]], budget: int) -> list[Point[C]]:
    """Return one point of each curve, at most `budget` bytes in all, or the smallest points if they exceed it.

    Each curve has at least one point. The remaining bytes go to later steps that still fit.
    """
    hulls = [lower_hull(curve) for curve in curves]
    chosen = [hull[0] for hull in hulls]
    room = budget - sum(point.size for point in chosen)
    steps = sorted(
        (-_gain(a, b), i, k) for i, hull in enumerate(hulls) for k, (a, b) in enumerate(itertools.pairwise(hull))
    )
    stopped: set[int] = set()
    for _, i, k in steps:  # the gains of one hull fall, so that its steps come in order
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
    """Return the error that each additional byte removes."""
    return (a.error - b.error) / (b.size - a.size)
