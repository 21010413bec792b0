"""Views and their selections against NumPy's own indexing of coordinates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.indices import numpy_indices, orthogonal_indices, select_orthogonally, select_points, slices
from tstore.core.format.arrays import views
from tstore.core.format.arrays.grid import chunk_coordinates, chunk_counts, chunk_number, part_of, projections
from tstore.core.format.arrays.points import PointSelection, point_projections, touched_chunks
from tstore.core.format.arrays.views import View, whole_view
from tstore.errors import InvalidArgument, InvalidIndex

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def numbers_of(view: View, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the number of each selected element."""
    numbers = np.zeros(view.shape, np.int64)
    for length, selected, axes in zip(shape, view.positions, view.follows, strict=True):
        sides = [view.shape[axis] if axis in axes else 1 for axis in range(view.ndim)]
        numbers = numbers * length + (np.asarray(selected, np.int64).reshape(sides) if numbers.size else 0)
    return numbers


def narrowed(view: View, expected: Any, data: st.DataObject) -> tuple[View, Any]:
    """Index or transpose a view and the expected coordinates alike."""
    kind = data.draw(st.sampled_from(["index", "index", "oindex", "vindex", "transpose"]))
    if kind == "transpose":
        axes = data.draw(st.permutations(range(expected.ndim)))
        return view.transpose(axes), expected.transpose(axes)
    if kind == "oindex":
        item = data.draw(orthogonal_indices(expected.shape))
        return view.orthogonal(item), select_orthogonally(expected, item)
    item = data.draw(numpy_indices(expected.shape))
    select = view.vectorized if kind == "vindex" else view.narrow
    try:
        selected = select_points(expected, item) if kind == "vindex" else np.asarray(expected[item])
    except IndexError:
        with pytest.raises(InvalidIndex):
            select(item)
        return view, expected
    try:
        return select(item), selected
    except InvalidIndex:  # NumPy accepts any number on an axis if the result is empty
        assert selected.size == 0
        return view, expected


def read(view: View, shape: tuple[int, ...], chunks: tuple[int, ...], block: int) -> npt.NDArray[np.int64]:
    """Return the values of a view of coordinates, read from chunks, of which each long one is read in blocks."""
    values, selection = np.arange(math.prod(shape)).reshape(shape), view.selection()
    result = np.full(view.shape, -1)
    out = view.arranged(result)
    assert not out.size or np.shares_memory(out, result)
    seen = []
    if isinstance(selection, PointSelection):
        for points in point_projections(selection, shape, chunks):
            place = tuple(slice(i * c, (i + 1) * c) for i, c in zip(points.chunk, chunks, strict=True))
            chunk = np.full(chunks, -2)
            inside = tuple(map(slice, values[place].shape))
            chunk[inside] = values[place]
            selected = np.zeros(chunks, bool)
            points.target.assign(selected, True)
            assert points.covers(values[place].size) == selected[inside].all()
            blocks: list[int] = []
            for first, last, part in points.divide(block):
                part.read(chunk.reshape(-1)[first * block : last * block], first * block, out)
                assert not blocks or first > blocks[-1] + 1
                blocks += range(first, last)
            assert blocks == np.unique(np.flatnonzero(selected) // block).tolist()
            seen.append(points.chunk)
        counts = [-(-n // c) for n, c in zip(shape, chunks, strict=True)]
        numbers = np.ravel_multi_index(np.array(seen, int).reshape(-1, len(shape)).T, counts) if shape else []
        if result.size:
            assert sorted(numbers) == sorted(touched_chunks(selection, chunks, counts).tolist())
    else:
        for projection in projections(selection, shape, chunks):
            place = tuple(slice(i * c, (i + 1) * c) for i, c in zip(projection.chunk, chunks, strict=True))
            part_of(out, projection.result)[...] = part_of(part_of(values, place), projection.inside)
    if (last := view.repeated) is not None:
        result[...] = result[last]
    return result


@given(shapes, st.data())
def test_views_of_views_equal_numpy(shape: tuple[int, ...], data: st.DataObject) -> None:
    expected: Any = np.arange(math.prod(shape)).reshape(shape)
    view = whole_view(shape)
    for _ in range(data.draw(st.integers(1, 4))):
        view, expected = narrowed(view, expected, data)
    assert view.shape == expected.shape
    assert np.array_equal(numbers_of(view, shape), expected)
    chunks = tuple(data.draw(st.integers(1, 6)) for _ in shape)
    assert np.array_equal(read(view, shape, chunks, data.draw(st.integers(1, 6))), expected)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (3, "index 3 is out of range for axis 0 of length 3"),
        (-4, "index -4 is out of range for axis 0 of length 3"),
        ((0, 4), "index 4 is out of range for axis 1 of length 4"),
        ((slice(None), [0, 4]), "index 4 is out of range for axis 1 of length 4"),
        (([0], slice(None), [-6]), "index -6 is out of range for axis 2 of length 5"),
        (np.array([2**64 - 1], "u8"), "index 18446744073709551615 is out of range for axis 0"),
        ((0, 0, 0, 0), "too many indices: got 4 for an array of 3 dimensions"),
        (np.zeros((3, 4, 5, 1), bool), "too many indices: got 4"),
        ((..., ...), "only one ellipsis"),
        (1.0, "expected an integer"),
        ([1.5], "expected an integer"),
        (np.zeros(0), "expected an integer"),
        ("x", "expected an integer"),
        ({}, "expected an integer"),
        ([[0], [0, 1]], "inhomogeneous"),
        (slice("a"), "slice"),
        (slice(0, 1, 0), "zero"),
        ([True, False], "boolean array of length 2 does not fit axis 0 of length 3"),
        ((0, np.ones((4, 4), bool)), "boolean array of length 4 does not fit axis 2 of length 5"),
        (([0, 1], [0, 1, 2]), r"shapes \(2,\) \(3,\) can't be broadcast"),
        (([[True], [False], [True]]), "boolean array of length 1 does not fit axis 1"),
    ],
    ids=repr,
)
def test_invalid_indices_are_refused(index: Any, message: str) -> None:
    view = whole_view((3, 4, 5))
    for error in (InvalidArgument, IndexError):
        with pytest.raises(error, match=message):
            view.narrow(index)


@pytest.mark.parametrize("index", [[[0]], np.zeros((3, 4), bool), True], ids=repr)
def test_oindex_takes_arrays_of_one_dimension(index: Any) -> None:
    with pytest.raises(InvalidIndex, match="one dimension"):
        whole_view((3, 4)).orthogonal(index)


def test_an_index_array_may_change_after_the_view_was_made() -> None:
    numbers, mask = np.array([0, 2]), np.array([True, False, True, True])
    view = whole_view((3, 4)).narrow(numbers).narrow((slice(None), mask))
    before = numbers_of(view, (3, 4))
    numbers[:], mask[:] = 1, False
    assert np.array_equal(numbers_of(view, (3, 4)), before)


def test_index_arrays_of_ix_do_not_vary_together() -> None:
    view = whole_view((100, 100, 3)).narrow(np.ix_(range(0, 100, 7), range(9)))
    assert view.follows == ((0,), (1,), (2,))
    assert [np.ndim(selected) for selected in view.positions] == [1, 1, 1]


def test_numpy_integers_are_integers() -> None:
    assert whole_view((3, 4)).narrow((np.int64(-1), np.array(2))) == whole_view((3, 4)).narrow((-1, 2))


@given(shapes.filter(lambda shape: 0 not in shape), st.data())
def test_the_chunks_of_a_view_with_elements_of_chunks_of_its_array(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    values = np.arange(math.prod(shape)).reshape(shape)
    view, expected = whole_view(shape), values
    for _ in range(data.draw(st.integers(0, 3))):
        item = data.draw(
            st.tuples(*(slices(n) | st.integers(-n, n - 1) if n else slices(n) for n in expected.shape))
        )
        item = (None, *item) if data.draw(st.integers(0, 3)) == 0 else item
        view, expected = view.narrow(item), expected[item]
        order = data.draw(st.permutations(range(view.ndim)))
        view, expected = view.transpose(order), np.asarray(expected).transpose(order)
    sides = st.integers(1, 4)
    chunks, own = (data.draw(st.tuples(*[sides] * n)) for n in (len(shape), view.ndim))
    numbers = data.draw(
        st.lists(st.integers(0, math.prod(chunk_counts(shape, chunks)) - 1), unique=True, max_size=5)
    )
    places = {chunk_coordinates(n, chunk_counts(shape, chunks)) for n in numbers}
    wanted = set()
    for place in np.ndindex(expected.shape):
        at = np.unravel_index(expected[place], shape) if shape else ()
        if tuple(int(i) // n for i, n in zip(at, chunks, strict=True)) in places:
            cell = [i // n for i, n in zip(place, own, strict=True)]
            wanted.add(chunk_number(cell, chunk_counts(view.shape, own)))
    together = data.draw(st.sampled_from([1, 3, 1 << 20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "_TOGETHER", together)
        parts = list(views.view_chunks(view, shape, chunks, np.array(numbers, np.int64), own))
    assert set().union(*(part.tolist() for part in parts)) == wanted
