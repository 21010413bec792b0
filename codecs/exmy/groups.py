"""Scale groups: the elements of an array that share an offset or scale, and their layout in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from exmy.elements import Array
from exmy.errors import FormatError, SizeError

__all__ = ["BLOCKS", "Granularity", "Groups"]

Granularity: TypeAlias = Literal["tensor", "row", "block"]

BLOCKS = (16, 32, 64, 128, 256)
"""The supported block lengths."""

_STRIP_SIZE = 1 << 18  # elements per strip


@dataclass(frozen=True, slots=True)
class Groups:
    """The scale groups of an array of a given `shape`, numbered in C order.

    With `axis` None, the whole tensor is one group. With an axis alone, a group is a row: all elements along that
    axis, for fixed other indices. With a block, a group is a run of `block` elements along the axis.
    """

    shape: tuple[int, ...]
    axis: int | None
    block: int | None

    @staticmethod
    def from_shape(shape: tuple[int, ...], axis: int | None, block: int | None) -> Groups:
        """Return the groups of an array. A block without an axis uses the last axis.

        Raise `FormatError` for an unsupported block length, `SizeError` for an invalid axis and for a block that
        does not divide the length of the axis.
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
                f"blocks of {block} do not divide axis {axis} of length {shape[axis]}; pad the array to a "
                "multiple of the block, or give each row its own offset with block=None"
            )
        return Groups(shape, axis, None if block is None else int(block))

    @property
    def granularity(self) -> Granularity:
        """What each group consists of: the tensor, a row, or a block."""
        return "tensor" if self.axis is None else "row" if self.block is None else "block"

    @property
    def length(self) -> int:
        """The number of elements per group."""
        if self.axis is None:
            return math.prod(self.shape)
        return self.block or self.shape[self.axis]

    @property
    def inner(self) -> int:
        """The stride of a group: the distance in C order between its consecutive elements, in elements."""
        return 1 if self.axis is None else math.prod(self.shape[self.axis + 1 :])

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of groups along each axis: the shape of an array with one element per group."""
        if self.axis is None:
            return ()
        blocks = () if self.block is None else (self.shape[self.axis] // self.block,)
        return self.shape[: self.axis] + blocks + self.shape[self.axis + 1 :]

    def index(self, first: int, stop: int) -> Array:
        """Return the group index of each of the elements first ... stop-1."""
        i = np.arange(first, stop)
        return i // (self.length * self.inner) * self.inner + i % self.inner

    def strips(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of groups to pass to `kernels.runs`: about 2^18 elements each, but at least one group."""
        count, inner = math.prod(self.counts), self.inner
        step = max(1, _STRIP_SIZE // self.length)
        if step < inner:  # part of a set of `inner` interleaved groups
            for low in range(0, count, inner):
                yield from ((c, min(c + step, low + inner)) for c in range(low, low + inner, step))
        else:  # whole sets of `inner` interleaved groups
            step = step // inner * inner
            yield from ((low, min(low + step, count)) for low in range(0, count, step))
