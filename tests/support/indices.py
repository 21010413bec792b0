"""Random indices with every feature of NumPy's, for tests that compare with NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

import tstore

MAX_SIZE = 400
"""Views of more elements are not indexed by more arrays."""

STEPS = st.sampled_from([None, 1, 2, 3, -1, -2, -3])
DTYPES = ["int64", "int8", "uint64", "uint8", "int32"]


@st.composite
def slices(draw: st.DrawFn, length: int) -> slice:
    edge = st.none() | st.integers(-length - 2, length + 2)
    return slice(draw(edge), draw(edge), draw(STEPS))


@st.composite
def integers(draw: st.DrawFn, length: int, shape: tuple[int, ...]) -> Any:
    """Draw an index array of this shape, or a list, for an axis that is not empty unless the array is."""
    size, most = math.prod(shape), max(1, length)
    numbers = draw(st.lists(st.integers(-most, most - 1), min_size=size, max_size=size))
    dtype = draw(st.sampled_from(DTYPES))
    if dtype.startswith("u"):
        numbers = [n % length for n in numbers]
    array = np.array(numbers, dtype).reshape(shape)
    if draw(st.booleans()):
        array = np.asfortranarray(array)
    return array.tolist() if array.ndim and draw(st.integers(0, 3)) == 0 else array


@st.composite
def masks(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """Draw a boolean array of this shape, or a list."""
    size = math.prod(shape)
    mask = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool).reshape(shape)
    return mask.tolist() if size and draw(st.integers(0, 3)) == 0 else mask


@st.composite
def numpy_indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """Draw an index that NumPy accepts for an array of this shape, unless the shapes of its arrays differ."""
    arrays = math.prod(shape) <= MAX_SIZE
    wide = tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3]), min_size=1, max_size=2)))
    items: list[Any] = []
    axis = 0
    while axis < len(shape) and len(items) < 6:
        length = shape[axis]
        kind = draw(st.sampled_from(["slice", "slice", "array", "array", "int", "mask", "new", "bool", "end"]))
        if kind == "end":
            break
        if kind == "new":
            items.append(None)
        elif kind == "bool":
            items.append(draw(st.sampled_from([True, False, np.True_, np.array(False), None])) if arrays else None)
        elif kind == "int" and length:
            number = draw(st.integers(-length, length - 1))
            items.append(draw(st.sampled_from([number, np.int8(number), np.array(number)])))
            axis += 1
        elif kind == "array" and arrays:
            own = wide[draw(st.integers(0, len(wide))) :]
            own = tuple(draw(st.sampled_from([n, n, 1])) for n in own) if length else (0,)
            items.append(draw(integers(length, own)))
            axis += 1
        elif kind == "mask" and arrays:
            count = draw(st.integers(1, min(2, len(shape) - axis)))
            items.append(draw(masks(shape[axis : axis + count])))
            axis += count
        else:
            items.append(draw(slices(length)))
            axis += 1
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), ...)
    return items[0] if len(items) == 1 and draw(st.booleans()) else tuple(items)


@st.composite
def orthogonal_indices(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Draw an item for each of the first axes: an integer, a slice, or a one-dimensional array."""
    items: list[Any] = []
    for length in shape[: draw(st.integers(0, len(shape)))]:
        kind = draw(st.sampled_from(["slice", "array", "mask", "int"]))
        if kind == "int" and length:
            items.append(draw(st.integers(-length, length - 1)))
        elif kind == "array":
            items.append(draw(integers(length, (draw(st.integers(0, 4)) if length else 0,))))
        elif kind == "mask":
            items.append(draw(masks((length,))))
        else:
            items.append(draw(slices(length)))
    return tuple(items)


def select_orthogonally(values: np.ndarray[Any, Any], index: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    """Return what `oindex` selects, one axis after the other."""
    axis = 0
    for item in index:
        values = np.asarray(values[(slice(None),) * axis + (item,)])
        axis += not isinstance(item, int)
    return values


def select_points(values: np.ndarray[Any, Any], index: Any) -> np.ndarray[Any, Any]:
    """Return what `vindex` selects: NumPy puts the axes of arrays first if a slice stands between them."""
    items = index if isinstance(index, tuple) else (index,)
    marked = np.broadcast_to(values, (1, 101, *values.shape))[(0, slice(None), *items)]
    return np.asarray(np.take(marked, 0, marked.shape.index(101)))


def draw_view(data: st.DataObject, array: tstore.Array, numbers: Any, most: int = 3) -> tuple[tstore.Array, Any]:
    """Draw a chain of indices; return the view and the numbers of the elements that it selects."""
    view = array
    for _ in range(data.draw(st.integers(1, most))):
        kind = data.draw(st.sampled_from(["index", "index", "oindex", "vindex", "transpose"]))
        try:
            if kind == "transpose":
                axes = data.draw(st.permutations(range(numbers.ndim)))
                view, numbers = view.transpose(*axes) if axes else view.T, numbers.transpose(axes)
            elif kind == "oindex":
                orthogonal = data.draw(orthogonal_indices(numbers.shape))
                view, numbers = view.oindex[orthogonal], select_orthogonally(numbers, orthogonal)
            else:
                index = data.draw(numpy_indices(numbers.shape))
                selected = np.asarray(numbers[index]) if kind == "index" else select_points(numbers, index)
                view, numbers = view[index] if kind == "index" else view.vindex[index], selected
        except IndexError:  # of NumPy or, if the result is empty, of tstore alone
            pass
    return view, numbers
