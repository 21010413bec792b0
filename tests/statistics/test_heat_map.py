"""`heat_map`: the cells of a matrix against NumPy, zoom by views, samples without holes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tstore.sync as blocking
from tests.support.stored_array import stored
from tstore.errors import InvalidArgument

NUMBERS = np.random.default_rng(0).standard_normal((2000, 1024)).astype("f4")


@given(
    hnp.arrays("f4", hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=9)),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_the_cells_are_those_of_numpy(
    values: np.ndarray[Any, Any], cells: tuple[int, int], chunks: tuple[int, int]
) -> None:
    result = blocking.heat_map(stored(values, chunks[: values.ndim]), cells=cells, budget=None)
    matrix = values.reshape((1,) * (2 - values.ndim) + values.shape).astype(np.longdouble)
    assert result.means.shape == tuple(min(n, most) for n, most in zip(matrix.shape, cells, strict=True))
    assert result.coverage.complete
    for i, j in np.ndindex(result.means.shape):
        (top, bottom), (left, right) = result.rows[i : i + 2], result.columns[j : j + 2]
        cell = matrix[top:bottom, left:right]
        finite = cell[np.isfinite(cell)]
        assert cell.size
        assert result.nonfinite[i, j] == cell.size - finite.size
        if not finite.size:
            assert np.isnan(result.means[i, j])
            continue
        largest = float(np.abs(matrix[np.isfinite(matrix)]).max())
        assert result.means[i, j] == pytest.approx(float(finite.mean()), rel=1e-9, abs=1e-12 * largest)
        assert result.rms[i, j] == pytest.approx(float(np.sqrt((finite**2).mean())), rel=1e-9, abs=1e-12 * largest)


def test_a_view_zooms() -> None:
    array = stored(NUMBERS, (256, 1024))
    result = blocking.heat_map(array[100:110, 500:504])
    assert result.means.tolist() == NUMBERS[100:110, 500:504].tolist()
    assert (result.rows.tolist(), result.columns.tolist()) == (list(range(11)), list(range(5)))
    assert result.coverage.values == 40


@pytest.mark.parametrize("chunks", [(2000, 1024), (250, 1024), (100, 100), (1, 1024), (7, 11)])
@pytest.mark.parametrize("budget", [1 << 10, 1 << 16, 1 << 20])
def test_a_sample_has_coarser_cells_without_holes(chunks: tuple[int, int], budget: int) -> None:
    result = blocking.heat_map(stored(NUMBERS, chunks), cells=(32, 32), budget=budget)
    assert not result.coverage.complete
    assert result.coverage.bytes_read <= budget
    assert np.isfinite(result.means).all()
    assert (result.rows[0], result.rows[-1], result.columns[0], result.columns[-1]) == (0, 2000, 0, 1024)
    assert (len(result.rows), len(result.columns)) == tuple(n + 1 for n in result.means.shape)


def test_bad_arguments_are_named() -> None:
    array = stored(np.zeros((2, 3, 4), "f4"))
    with pytest.raises(InvalidArgument, match=r"3 axes; index all but two of them, such as array\[0, :, :\]"):
        blocking.heat_map(array)
    for cells in ((0, 3), (3,), "ab", (1, 2000), (1.5, 2)):
        with pytest.raises(InvalidArgument, match="cells="):
            blocking.heat_map(array[0], cells=cells)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="not numbers"):
        blocking.heat_map(stored(np.array(["a"])))


def test_the_second_call_reads_nothing() -> None:
    array = stored(NUMBERS, (250, 1024))
    first = blocking.heat_map(array)
    assert blocking.heat_map(array).means is first.means
    assert blocking.heat_map(array, cells=(8, 8)).means.shape == (8, 8)


def test_the_document_is_json() -> None:
    result = blocking.heat_map(stored(np.array([[np.nan, 1.0]])))
    document = json.loads(json.dumps(result.document(), allow_nan=False))
    assert (document["means"], document["nonfinite"]) == ([[None, 1.0]], [[1, 0]])
    assert "1×2 cells" in repr(result)
