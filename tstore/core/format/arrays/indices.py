"""The items of an index, with NumPy's meaning; pure, no I/O."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tstore.core.format.arguments import quote
from tstore.errors import InvalidIndex

__all__ = ["Index", "IndexItem", "Indexer", "Item", "as_positions", "out_of_range", "parsed", "place_of"]

T = TypeVar("T")

IndexItem = int | slice | EllipsisType | None | npt.ArrayLike
"""One item of an index: an integer, a slice, `...`, `np.newaxis`, or an array of integers or booleans."""
Index = IndexItem | tuple[IndexItem, ...]

Item = int | slice | EllipsisType | None | npt.NDArray[Any]
"""An item with a checked type."""


class Indexer(Generic[T]):
    """Index an array by rules other than those of `array[index]`: see `Array.oindex` and `Array.vindex`."""

    def __init__(self, select: Callable[[Index], T]) -> None:
        self._select = select

    def __getitem__(self, index: Index) -> T:
        return self._select(index)

    __iter__ = None


def parsed(index: Index, ndim: int) -> list[Item]:
    """Return the items of an index into `ndim` axes, with a slice for each axis that it does not mention.

    An ellipsis stays, before its slices.
    """
    items: list[Item] = []
    taken, dots = 0, None
    for item in index if isinstance(index, tuple) else (index,):
        if isinstance(item, slice) or type(item) is int:
            taken += 1
            items.append(item)
        elif item is None:
            items.append(None)
        elif item is Ellipsis:
            if dots is not None:
                raise InvalidIndex("an index can have only one ellipsis ('...')")
            dots = len(items) + 1
            items.append(item)
        else:
            number = _as_number(item)
            taken += number.ndim if isinstance(number, np.ndarray) and number.dtype.kind == "b" else 1
            items.append(number)
    if taken > ndim:
        raise InvalidIndex(f"too many indices: got {taken} for an array of {ndim} dimensions")
    at = len(items) if dots is None else dots
    items[at:at] = [slice(None)] * (ndim - taken)
    return items


def _as_number(item: object) -> int | npt.NDArray[Any]:
    """Return an integer, or an array of integers or booleans."""
    if not isinstance(item, (bool, np.bool_)):
        try:
            return operator.index(item)  # type: ignore[arg-type]
        except TypeError:
            pass
    try:
        array = np.asarray(item)
    except ValueError as error:
        raise InvalidIndex(f"index {quote(item)}: {error}") from None
    if array.size == 0 and not isinstance(item, np.ndarray):
        array = array.astype(np.int64)  # an empty list
    if array.dtype.kind not in "iub":
        raise InvalidIndex(
            f"index {quote(item)}: expected an integer, a slice, '...', None, or an array of integers or booleans"
        )
    return array


def place_of(items: Sequence[Item]) -> int:
    """Return the position of the axes that the index arrays create, by NumPy's rule.

    They replace the arrays in place if the arrays and integers are adjacent, or else come first: `x[:, i, j]` → 1,
    and
    """
    kept, place, ended = 0, -1, False
    for item in items:
        if isinstance(item, (int, np.ndarray)):
            if ended:
                return 0
            place = kept if place < 0 else place
        else:
            ended = place >= 0
            kept += item is not Ellipsis
    return place


def as_positions(item: npt.NDArray[Any], axis: int, shape: Sequence[int]) -> Sequence[npt.NDArray[np.int64]]:
    """Return the positions that an index array selects on each axis from `axis` on; raise `InvalidIndex`."""
    if item.dtype.kind == "b":
        if item.ndim == 0:
            return [np.zeros(int(item), np.int64)]
        for i, (n, length) in enumerate(zip(item.shape, shape[axis:], strict=False), axis):
            if n != length:
                raise InvalidIndex(f"a boolean array of length {n} does not fit axis {i} of length {length}")
        return item.nonzero()
    length = shape[axis]
    if item.size:
        for number in (int(item.min()), int(item.max())):
            if not -length <= number < length:
                raise out_of_range(number, axis, length)
    positions = item.astype(np.int64)
    return [np.where(positions < 0, positions + length, positions)]


def out_of_range(number: int, axis: int, length: int) -> InvalidIndex:
    """Return the error for a position that an axis does not have."""
    return InvalidIndex(f"index {number} is out of range for axis {axis} of length {length}")
