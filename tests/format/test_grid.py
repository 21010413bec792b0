"""Grid arithmetic against NumPy's own indexing."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tstore.core.format.arrays.grid import (
    Selection,
    axis_projections,
    boxes,
    chunk_counts,
    default_chunks,
    only_projection,
    part_of,
    projections,
)

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = draw(shapes)
    return shape, tuple(draw(st.integers(1, 6)) for _ in shape)


def index_of(selection: Selection) -> tuple[Any, ...]:
    """Return a NumPy index of the same elements, made of lists of numbers."""
    return np.ix_(*[np.array(list(r), int) for r in selection.axes])


@given(grids(), st.data())
def test_covers_contain_every_selected_element_once(
    grid: tuple[tuple[int, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    shape, chunks = grid
    values = np.arange(math.prod(shape)).reshape(shape)
    selection = Selection(tuple(range(n)[data.draw(st.slices(n))] for n in shape))
    full_rank = tuple(len(r) for r in selection.axes)
    result = np.full(full_rank, -1)
    seen = []
    for projection in projections(selection, shape, chunks):
        place = tuple(slice(i * c, (i + 1) * c) for i, c in zip(projection.chunk, chunks, strict=True))
        chunk = part_of(values, place)
        target = part_of(result, projection.result)
        assert (target == -1).all()
        target[...] = part_of(chunk, projection.inside)
        assert projection.full == (target.size == chunk.size)
        assert all(s.step is None or s.step >= 1 for s in projection.inside)
        seen.append(projection.chunk)
    assert np.array_equal(result, values[index_of(selection)] if shape else values)
    assert seen == sorted(set(seen))
    assert set(seen) <= set(itertools.product(*[range(n) for n in chunk_counts(shape, chunks)]))


@given(st.integers(0, 40), st.integers(1, 12), st.data())
def test_covers_along_one_axis(length: int, chunk: int, data: st.DataObject) -> None:
    selected = range(length)[data.draw(st.slices(length))]
    for part in axis_projections(selected, length, chunk):
        elements = list(range(part.chunk * chunk, min((part.chunk + 1) * chunk, length))[part.inside])
        assert elements
        assert list(selected[part.result]) == elements
    of_one_chunk = axis_projections(selected, length, length or 1)
    assert sum(len(range(length)[p.inside]) for p in of_one_chunk) == len(selected)


@given(st.lists(st.integers(0, 6), max_size=3), st.integers(0, 40))
def test_boxes_cut_a_grid_into_runs(counts: list[int], most: int) -> None:
    cut = list(boxes(counts, most))
    numbers = np.arange(math.prod(counts)).reshape(counts)
    joined = []
    for box in cut:
        assert math.prod(len(r) for r in box) <= max(1, most)
        joined += numbers[np.ix_(*box)].ravel().tolist() if counts else numbers.ravel().tolist()
    assert joined == list(range(numbers.size))


@given(shapes, st.integers(1, 16), st.integers(1, 400))
def test_default_chunks_cover_the_array_in_pieces_of_about_the_target(
    shape: tuple[int, ...], itemsize: int, target: int
) -> None:
    chunks = default_chunks(shape, itemsize, target=target)
    assert len(chunks) == len(shape)
    assert all(1 <= c <= max(1, n) for c, n in zip(chunks, shape, strict=True))
    assert math.prod(chunks) * itemsize <= max(2 * target, itemsize)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 30)), min_size=1, max_size=3), st.integers(1, 200))
def test_default_chunks_never_cross_a_shard(parts: list[tuple[int, int]], target: int) -> None:
    shape, shard = tuple(k * n for k, n in parts), tuple(n for _, n in parts)
    chunks = default_chunks(shape, 4, shard, target)
    for c, s, n in zip(chunks, shard, shape, strict=True):
        assert s % c == 0 or s == n


@given(grids(), st.data())
def test_the_only_chunk_of_a_selection_is_found_at_once(
    grid: tuple[tuple[int, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    shape, chunks = grid
    selection = Selection(tuple(range(n)[data.draw(st.slices(n))] for n in shape))
    general, only = list(projections(selection, shape, chunks)), only_projection(selection, shape, chunks)
    if len(general) != 1 or any(r.step < 1 for r in selection.axes):
        assert only is None
        return
    assert only is not None
    assert (only.chunk, only.full) == (general[0].chunk, general[0].full)
    for mine, theirs, length in zip(only.inside, general[0].inside, chunks, strict=True):
        assert list(range(length)[mine]) == list(range(length)[theirs])
        assert mine.stop == range(length)[mine][-1] + 1  # which readers rely on
    assert [range(n)[s] for s, n in zip(only.result, selection.shape, strict=True)] == [
        *map(range, selection.shape)
    ]
