"""A model of a store in memory: dicts of NumPy arrays, and the rules for conflicts between transactions.

It implements the table at the top of `tstore/core/format/tree/changes.py` literally, without manifests or packs.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Grid", "Region", "Seen", "State", "Touch", "apart", "is_at_or_below", "same"]

Values = NDArray[Any]
Box = tuple[int, ...]
Region = tuple[slice, ...]


def is_at_or_below(path: str, top: str) -> bool:
    """Return whether the path is `top` or below it."""
    return path == top or path.startswith(top + "/")


def apart(path: str, other: str) -> bool:
    """Return whether neither path is at or below the other."""
    return not is_at_or_below(path, other) and not is_at_or_below(other, path)


class Grid:
    """One array: its written chunks, each of the full chunk shape, with zeros beyond the edge of the array."""

    def __init__(self, shape: Box, chunks: Box, sparse: bool, dtype: Any = np.int64) -> None:
        self.shape = shape
        self.chunks = chunks
        self.sparse = sparse
        self.dtype = np.dtype(dtype)
        self.blocks: dict[Box, Values] = {}

    def copy(self) -> Grid:
        """Return an independent copy."""
        copied = Grid(self.shape, self.chunks, self.sparse, self.dtype)
        copied.blocks = {at: block.copy() for at, block in self.blocks.items()}
        return copied

    def _box(self, at: Box) -> Region:
        """Return the region of the array that a chunk covers."""
        return tuple(
            slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(at, self.chunks, self.shape, strict=True)
        )

    def boxes(self) -> Iterable[Box]:
        """Return the indices of all chunks."""
        return itertools.product(*(range(-(-n // c)) for n, c in zip(self.shape, self.chunks, strict=True)))

    def touched(self, region: Region) -> tuple[set[Box], set[Box]]:
        """Return the indices of the chunks that the region touches, and of those that it covers entirely."""
        inside = np.zeros(self.shape, bool)
        inside[region] = True
        some = {at for at in self.boxes() if inside[self._box(at)].any()}
        return some, {at for at in some if inside[self._box(at)].all()}

    def write(self, region: Region, values: Any) -> None:
        """Set the values of a region."""
        whole = np.zeros(self.shape, self.dtype)
        whole[region] = values
        inside = np.zeros(self.shape, bool)
        inside[region] = True
        for at in self.touched(region)[0]:
            block = self.blocks.setdefault(at, np.zeros(self.chunks, self.dtype))
            box = self._box(at)
            # the ellipsis makes views of 0-d arrays too
            part: Any = (*(slice(0, s.stop - s.start) for s in box), ...)
            same_part: Any = (*box, ...)
            np.copyto(block[part], whole[same_part], where=inside[same_part])

    def read(self, region: Region) -> Values | None:
        """Return the values, or None if one of them was never written."""
        if not self.sparse and any(at not in self.blocks for at in self.touched(region)[0]):
            return None
        whole = np.zeros(self.shape, self.dtype)
        for at, block in self.blocks.items():
            box = self._box(at)
            whole[box] = block[tuple(slice(0, s.stop - s.start) for s in box)]
        values: Values = whole[region]
        return values

    def resize(self, shape: Box) -> None:
        """Change the shape; values that are cut off are lost."""
        self.shape = shape
        remaining = set(self.boxes())
        self.blocks = {at: block for at, block in self.blocks.items() if at in remaining}
        for at, block in self.blocks.items():
            for axis, s in enumerate(self._box(at)):
                block[(slice(None),) * axis + (slice(s.stop - s.start, None),)] = 0

    def append(self, axis: int, values: Values) -> Region:
        """Add values behind the end of an axis, and return their region."""
        region = [slice(None)] * len(self.shape)
        region[axis] = slice(self.shape[axis], self.shape[axis] + values.shape[axis])
        self.resize(tuple(n + values.shape[axis] * (i == axis) for i, n in enumerate(self.shape)))
        self.write(tuple(region), values)
        return tuple(region)

    def differing(self, other: Grid) -> int:
        """Return the number of chunks that differ, including those that only one array has."""
        both = self.blocks.keys() & other.blocks.keys()
        alone = len(self.blocks.keys() ^ other.blocks.keys())
        return alone + sum(not np.array_equal(self.blocks[at], other.blocks[at]) for at in both)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Grid):
            return NotImplemented
        mine, theirs = ((g.shape, g.chunks, g.sparse, g.dtype) for g in (self, other))
        return mine == theirs and self.differing(other) == 0

    __hash__ = None  # type: ignore[assignment]


@dataclass
class State:
    """The arrays, groups and tags of a version."""

    arrays: dict[str, Grid] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    tags: dict[str, int] = field(default_factory=dict)

    def copy(self) -> State:
        """Return an independent copy."""
        return State({p: g.copy() for p, g in self.arrays.items()}, copy.deepcopy(self.groups), dict(self.tags))

    def nodes(self) -> list[str]:
        """Return the paths of all arrays and groups."""
        return [*self.arrays, *self.groups]

    def free_for_array(self, path: str) -> bool:
        """Return whether an array can be created at the path."""
        below = any(is_at_or_below(p, path) for p in self.nodes())
        return not below and not any(is_at_or_below(path, p) for p in self.arrays)

    def free_for_group(self, path: str) -> bool:
        """Return whether a group can be created at the path."""
        return not any(is_at_or_below(path, p) for p in self.arrays)

    def remove(self, paths: Iterable[str]) -> None:
        """Remove arrays and groups."""
        for path in paths:
            self.arrays.pop(path, None)
            self.groups.pop(path, None)


@dataclass
class Touch:
    """The write set of a transaction: what other transactions can conflict with.

    `appended` has the axis of each array that the transaction only appended to, `groups` those of `fresh` that are
    groups; no two transactions give one the same attributes.
    """

    whole: dict[str, set[Box]] = field(default_factory=dict)
    touched: dict[str, set[Box]] = field(default_factory=dict)
    appended: dict[str, int] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    tags: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    replaces: bool = False

    def write(self, path: str, some: set[Box], whole: set[Box]) -> None:
        """Record written chunks: `some` of them touched, `whole` of them covered entirely."""
        if self.appended.pop(path, None) is not None:
            self.fresh.add(path)
        self.whole.setdefault(path, set()).update(whole)
        self.touched.setdefault(path, set()).update(some)

    def append(self, path: str, axis: int) -> None:
        """Record an append, which counts as a resize if the array has other changes."""
        is_changed = path in self.fresh or self.touched.get(path) or self.appended.get(path, axis) != axis
        if is_changed:
            self.write(path, set(), set())
            self.fresh.add(path)
        else:
            self.appended[path] = axis

    def forget(self, path: str) -> None:
        """Remove the path and everything below it from the write set."""
        for known in (self.whole, self.touched, self.appended):
            for p in [p for p in known if is_at_or_below(p, path)]:
                del known[p]
        self.fresh = {p for p in self.fresh if not is_at_or_below(p, path)}
        self.groups &= self.fresh

    def collides(self, path: str, other_path: str) -> bool:
        """Return whether a node that another changed is at a path that this one changed, or below its array."""
        return path == other_path or (path not in self.groups and is_at_or_below(other_path, path))

    @property
    def nodes(self) -> set[str]:
        """The paths of all changed nodes."""
        return self.fresh | self.touched.keys() | self.appended.keys()

    @property
    def patches(self) -> bool:
        """Whether chunks were written in part or resized, which reads their previous values."""
        return bool(self.fresh or self.appended) or any(
            self.touched[p] - self.whole.get(p, set()) for p in self.touched
        )

    def conflicts(self, newer: Touch) -> bool:
        """Return whether this write set conflicts with that of a commit above its base."""
        if self.tags & (newer.tags | newer.dropped) or self.dropped & newer.tags:
            return True
        if self.replaces:
            return False
        if newer.replaces:
            return bool(self.nodes or self.deleted)
        if any(is_at_or_below(p, d) for p in self.nodes for d in newer.deleted):
            return True
        if any(is_at_or_below(p, d) for p in newer.nodes for d in self.deleted):
            return True
        if any(self.collides(p, q) or newer.collides(q, p) for p in self.fresh for q in newer.fresh):
            return True
        for path in self.nodes & newer.nodes:
            if path in self.fresh or path in newer.fresh:
                return True
            if path in self.appended:
                if newer.appended.get(path, self.appended[path]) != self.appended[path]:
                    return True
                continue
            if newer.appended.get(path, 0) != 0:
                return True
            if self.whole.get(path, set()) & newer.touched.get(path, set()):
                return True
        return False


class Seen(NamedTuple):
    """A read of a transaction: `look` returned `result` after the first `ops` operations of the transaction."""

    ops: int
    look: Callable[[State], Any]
    result: Any
    paths: frozenset[str] | None

    def holds(self, state: State, ops: list[Callable[[State], object]]) -> bool:
        """Return whether the read returns the same result for a transaction that begins at that state."""
        view = state.copy()
        try:
            for op in ops[: self.ops]:
                op(view)
            return same(self.look(view), self.result)
        except KeyError:
            return False


def same(a: Any, b: Any) -> bool:
    """Return whether two values, which may be arrays, are equal."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b)
    return bool(a == b)
