"""The states of the jobs: groups of arrays, the first of which has a tenth of the arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.save.workloads import Workload

Tree = dict[str, dict[str, Any]]
"""The leaves of each group by name."""
Piece = tuple[str, tuple[slice, ...], npt.NDArray[Any]]
"""The name of an array, a region of it, and the values there."""

_GROUPS = 10
_ARRAYS = 20
_COLUMNS = 4096


def large(nbytes: int) -> Workload:
    """Return arrays of about `nbytes` in total, which jobs shard: both dimensions are multiples of 8."""
    rows = max(8, nbytes // (_ARRAYS * 4 * _COLUMNS) // 8 * 8)
    shape = (rows, _COLUMNS)
    total = _ARRAYS * 4 * rows * _COLUMNS / 2**20
    return Workload("large", f"{total:,.0f} MiB in {_ARRAYS} arrays of {rows}×{_COLUMNS}", _ARRAYS, shape, shape)


def leaves(count: int) -> Workload:
    """Return `count` one-dimensional arrays of 4 KiB, which are replicated on every device of a job."""
    return Workload("leaves", f"{count:,} leaves of 4 KiB", count, (1024,), (1024,))


def is_sharded(workload: Workload) -> bool:
    return len(workload.shape) > 1


def grouped(workload: Workload, items: Iterable[tuple[str, Any]]) -> Tree:
    """Return the leaves in groups `group0` to `group9`."""
    tree: Tree = {}
    for number, (name, leaf) in enumerate(items):
        tree.setdefault(f"group{number * _GROUPS // workload.count}", {})[name] = leaf
    return tree


def tenth(tree: Tree) -> Tree:
    """Return the first group, a tenth of the leaves."""
    return {"group0": tree["group0"]}


def flat(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yield the names and the leaves."""
    for group in tree.values():
        yield from group.items()


def check(workload: Workload, pieces: Iterable[Piece]) -> None:
    """Raise `ValueError` unless the pieces have the values of the workload."""
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece[0], []).append(piece)
    for name, array in workload.items():
        for _, index, values in by_name.pop(name):
            if not np.array_equal(array[index], values):
                raise ValueError(f"the restored values of {name} differ")
    if by_name:
        raise ValueError(f"unexpected names were restored, such as {next(iter(by_name))}")
