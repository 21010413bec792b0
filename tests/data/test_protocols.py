"""Blocking arrays stand for their values in NumPy and Dask; awaited ones say that they can't."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tstore.sync as tstore
from tests.support.lazy import lazy
from tstore.errors import Misuse

da = lazy("dask.array")

VALUES = np.arange(100.0 * 60).reshape(100, 60)


@pytest.fixture
def array() -> tstore.Array:
    store = tstore.open(f"memory://{uuid.uuid4()}")
    with store.transaction() as tx:
        tx.create_array("a", VALUES.shape, VALUES.dtype, (16, 20), dimension_names=("layer", "row")).write(VALUES)
    return store.snapshot().array("a")


VIEWS: list[Any] = [
    lambda a: a,
    lambda a: a[10:],
    lambda a: a.T[::2],
    lambda a: a[:, [3, 1, 2]],
    lambda a: a[7],
    lambda a: a[a[:, 0] > 3000] if isinstance(a, np.ndarray) else a[VALUES[:, 0] > 3000],
    lambda a: a[5:5],
]


@pytest.mark.parametrize("view", VIEWS)
def test_numpy_reads_a_view(array: tstore.Array, view: Any) -> None:
    mine, expected = view(array), view(VALUES)
    assert np.array_equal(np.asarray(mine), expected)
    assert np.array_equal(np.asarray(mine, "f4"), expected.astype("f4"))
    assert np.array_equal(np.add(mine, 1), expected + 1)
    assert np.array_equal(VALUES[np.asarray(mine[:0], int)], VALUES[expected[:0].astype(int)])
    assert (np.shape(mine), np.ndim(mine), np.size(mine), len(mine)) == (
        expected.shape,
        expected.ndim,
        expected.size,
        len(expected),
    )
    assert mine.nbytes == expected.nbytes
    with pytest.raises(ValueError, match="omit copy=False"):
        np.asarray(mine, copy=False)
    with pytest.raises(TypeError, match="iterable"):
        iter(mine)


def test_the_values_of_a_view_are_written_to_another_array(array: tstore.Array) -> None:
    store = tstore.open(f"memory://{uuid.uuid4()}")
    with store.transaction() as tx:
        other = tx.create_array("b", (60, 100), "f4", sparse=True)
        other.write(array.T)
        other[:3].write(values=other[5:8])
        other.append(array[:60, :40], axis=1)
    written = np.concatenate([VALUES.T, VALUES[:60, :40]], axis=1)
    written[:3] = written[5:8]
    written[:3, 100:] = VALUES[:3, :40]
    assert np.array_equal(store.snapshot().array("b").read(), written.astype("f4"))


@pytest.mark.parametrize("view", VIEWS)
def test_dask_reads_a_view(array: tstore.Array, view: Any) -> None:
    mine, expected = view(array), view(VALUES)
    for chunks in ("auto", mine.chunks, mine.chunksize):
        lazily = da.from_array(mine, chunks=chunks)
        assert (lazily.shape, lazily.dtype) == (expected.shape, expected.dtype)
        assert np.array_equal(lazily.compute(), expected)
        assert np.array_equal(lazily[::-3].compute(), expected[::-3])
    assert float(da.from_array(mine).sum().compute()) == expected.sum()


def test_dask_reads_the_chunks_of_an_array(array: tstore.Array) -> None:
    lazily = da.from_array(array, chunks=array.chunks)
    assert lazily.chunksize == array.chunksize == (16, 20)
    assert lazily.numblocks == (7, 3)
    assert np.array_equal(lazily[[5, 99, 5], ::2].compute(), VALUES[[5, 99, 5], ::2])


def test_indexers_block_too(array: tstore.Array) -> None:
    assert np.array_equal(array.oindex[[5, 3], [True, False] * 30].read(), VALUES[[5, 3], ::2])
    assert np.array_equal(array.vindex[[5, 3], [1, 2]].read(), VALUES[[5, 3], [1, 2]])
    assert np.array_equal(array.isel(row=3)[::-1].read(), VALUES[::-1, 3])
    rows: npt.NDArray[Any] = np.array([4, 2])
    assert np.array_equal(array[rows].T.transpose(1, 0).read(), VALUES[rows])
    assert isinstance(array.T, tstore.Array)
    assert isinstance(array.oindex[0], tstore.Array)
    with pytest.raises(TypeError, match="iterable"):
        iter(array.vindex)  # type: ignore[call-overload]


def test_an_axis_of_any_name_is_selected() -> None:
    with tstore.open(f"memory://{uuid.uuid4()}").transaction() as tx:
        array = tx.create_array("a", (2, 3), "i4", dimension_names=("self", "a b"))
        array.write([[1, 2, 3], [4, 5, 6]])
        assert array.isel(**{"self": 1, "a b": [0, 2]}).read().tolist() == [4, 6]


def test_an_awaited_array_refuses_to_be_converted(array: tstore.Array) -> None:
    awaited = array._wrapped  # type: ignore[attr-defined]
    for convert in (np.asarray, np.sum, lambda a: VALUES[a], lambda a: VALUES + a):
        with pytest.raises(Misuse, match=r"a: NumPy can.t convert a tstore.Array; pass the values"):
            convert(awaited)
    with pytest.raises(TypeError, match="iterable"):
        list(awaited)


def test_chunks_of_a_view_are_what_it_selects_of_chunks(array: tstore.Array) -> None:
    assert array.chunks == (16, 20)
    assert array[::2, ::-5].chunks == (8, 4)
    assert array[::3, ::40].chunks == array[5:][::-3, ::8][:, ::5].chunks == (6, 1)
    assert array[7, :][None].T.chunks == (20, 1)
    assert array[[3, 4, 5]].chunks == (16, 20)
    assert array.vindex[[3, 4, 5], [1, 2, 3]].chunks == (3,)
