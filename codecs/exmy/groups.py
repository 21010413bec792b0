"""Groups: which elements of an array share a scale, and how such a group lies in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from exmy import kernels
from exmy.elements import Array
from exmy.errors import FormatError, SizeError

__all__ = ["BLOCKS", "Granularity", "Groups"]

Granularity: TypeAlias = Literal["tensor", "row", "block"]

BLOCKS = (16, 32, 64, 128)
"""The lengths of blocks that may share a scale."""

_STRIP = 1 << 18  # elements that are looked at together


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of an array of some shape in C order.

    axis None: the whole tensor is one group.  An axis alone: a row is all elements along it, with the other
    indices fixed.  With a block: runs of that many elements along the axis.
    """

    shape: tuple[int, ...]
    axis: int | None
    block: int | None

    @staticmethod
    def of(shape: tuple[int, ...], axis: int | None, block: int | None) -> Groups:
        """Return the groups; a block without an axis lies along the last one.

        SizeError for an axis that the shape has not, and for a block that does not divide the axis.
        """
        if block is not None and (isinstance(block, bool) or block not in BLOCKS):
            raise FormatError(f"block is {block!r}; expected one of {', '.join(map(str, BLOCKS))}")
        if axis is None and block is None:
            return Groups(shape, None, None)
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, (int, np.integer))):
            raise SizeError(f"axis is {axis!r}; expected an integer or None")
        axis = -1 if axis is None else int(axis)
        if not -len(shape) <= axis < len(shape):
            raise SizeError(f"axis {axis} does not fit an array of {len(shape)} dimensions")
        axis %= len(shape)
        if block is not None and shape[axis] % block:
            raise SizeError(
                f"blocks of {block} do not fit axis {axis} of length {shape[axis]}; pad the array to a multiple "
                "of the block, or give each row its own offset with block=None"
            )
        return Groups(shape, axis, None if block is None else int(block))

    @property
    def granularity(self) -> Granularity:
        """What shares a scale: the tensor, each row, or each block."""
        return "tensor" if self.axis is None else "row" if self.block is None else "block"

    @property
    def length(self) -> int:
        """Elements of a group."""
        if self.axis is None:
            return math.prod(self.shape)
        return self.block or self.shape[self.axis]

    @property
    def inner(self) -> int:
        """Elements from one of a group to its next, in C order."""
        return 1 if self.axis is None else math.prod(self.shape[self.axis + 1 :])

    @property
    def counts(self) -> tuple[int, ...]:
        """The shape of an array with one element for each group."""
        if self.axis is None:
            return ()
        blocks = () if self.block is None else (self.shape[self.axis] // self.block,)
        return self.shape[: self.axis] + blocks + self.shape[self.axis + 1 :]

    def index(self, first: int, stop: int) -> Array:
        """Return the group of each of the elements first ... stop-1."""
        i = np.arange(first, stop)
        return i // (self.length * self.inner) * self.inner + i % self.inner

    def strips(self) -> Iterator[tuple[int, int]]:
        """Yield bounds of groups that `runs` takes: some for a few hundred thousand elements each."""
        count, inner = math.prod(self.counts), self.inner
        step = max(1, _STRIP // self.length)
        if step < inner:  # columns of one matrix
            for low in range(0, count, inner):
                yield from ((c, min(c + step, low + inner)) for c in range(low, low + inner, step))
        else:  # whole matrices
            step = step // inner * inner
            yield from ((low, min(low + step, count)) for low in range(0, count, step))

    def runs(self, elements: Array, low: int, high: int) -> Array:
        """Return the groups low ... high-1 of one strip, each a contiguous row."""
        length, inner = self.length, self.inner
        if inner == 1:
            return elements[low * length : high * length].reshape(high - low, length)
        out = np.empty((high - low, length), elements.dtype)
        at = low
        while at < high:
            outer, column = divmod(at, inner)
            matrix = elements[outer * length * inner : (outer + 1) * length * inner].reshape(length, inner)
            stop = min(high, at - column + inner)
            kernels.columns(matrix, column, out[at - low : stop - low])
            at = stop
        return out
