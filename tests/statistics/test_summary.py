"""`summarize`: whole arrays against NumPy, samples within a budget, hostile arrays, and the cache."""

from __future__ import annotations

import asyncio
import json
import math
import tracemalloc
import uuid
from typing import Any

import exmy
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tstore
import tstore.sync as blocking
from tests.support.stored_array import stored
from tstore.errors import InvalidArgument, NotFound
from tstore.lab.conformance.faults import open_faulty
from tstore.service.statistics.results import ResultCache

NUMBERS = np.random.default_rng(0).standard_normal((3000, 1000)).astype("f4")

DTYPES = [
    *("float16", "float32", "float64", "int8", "uint8", "int16", "uint32", "int64", "uint64", "bool"),
    *("complex64", "complex128", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "int4", "uint2"),
]


def expected_magnitudes(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return finite values as float64, of complex ones the magnitudes."""
    with np.errstate(all="ignore"):
        floats = np.abs(values) if values.dtype.kind == "c" else values
        floats = floats.astype("f8")
    return floats[np.isfinite(floats)]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


@st.composite
def arrays(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], tuple[int, ...]]:
    """Draw an array of any dtype and up to four axes, with its chunks."""
    dtype = dtype_of(draw(st.sampled_from(DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7))
    if dtype.isbuiltin == 1:
        values = draw(hnp.arrays(dtype, shape))
    else:
        integers = draw(hnp.arrays("i8", shape, elements=st.integers(0, 3)))
        values = integers.astype("f4").astype(dtype)
    return values, tuple(draw(st.integers(1, max(1, n))) for n in shape)


@given(arrays())
def test_all_values_give_the_numbers_of_numpy(case: tuple[np.ndarray[Any, Any], tuple[int, ...]]) -> None:
    values, chunks = case
    summary = blocking.summarize(stored(values, chunks), budget=None)
    finite = expected_magnitudes(values)
    assert summary.coverage.complete
    assert summary.coverage.values_read == values.size
    assert summary.nonfinite == values.size - finite.size
    assert summary.zeros == np.count_nonzero(finite == 0)
    assert summary.negative == np.count_nonzero(finite < 0)
    assert summary.exponents.zeros == summary.zeros
    assert summary.exponents.count == finite.size
    histogram = summary.histogram
    assert histogram.counts.sum() + histogram.below + histogram.above == finite.size
    if not finite.size:
        assert math.isnan(summary.minimum)
        assert math.isnan(summary.mean)
        assert math.isnan(summary.rms)
        return
    if values.dtype.kind in "iu":
        assert (summary.minimum, summary.maximum) == (int(values.min()), int(values.max()))
    else:
        assert (summary.minimum, summary.maximum) == (finite.min(), finite.max())
    longs = finite.astype(np.longdouble)
    scale = float(np.abs(longs).max())
    assert summary.mean == pytest.approx(float(longs.mean()), rel=1e-9, abs=1e-12 * scale)
    assert summary.rms == pytest.approx(float(np.sqrt((longs**2).mean())), rel=1e-9)


@given(arrays())
@example((np.array(1.2e308), ()))
@example((np.array(-1.7e308), ()))
@example((np.full((1, 4), 8.99e307), (1, 1)))
def test_histograms_and_norms_are_those_of_numpy(case: tuple[np.ndarray[Any, Any], tuple[int, ...]]) -> None:
    values, chunks = case
    summary = blocking.summarize(stored(values, chunks), budget=None)
    finite = expected_magnitudes(values)
    edges = summary.histogram.edges
    if finite.size:
        assert (np.diff(edges) > 0).all()
        assert summary.histogram.below == np.count_nonzero(finite < edges[0])
        assert summary.histogram.above == np.count_nonzero(finite > edges[-1])
        _, exponents = np.frexp(finite[finite != 0])
        bins = np.bincount(exponents - 1 - summary.exponents.lowest) if exponents.size else np.zeros(0)
        assert summary.exponents.counts.tolist() == bins.tolist()
    longs = np.abs(values).astype("f8") if values.dtype.kind == "c" else values.astype("f8")
    longs = np.where(np.isfinite(longs), longs, 0).astype(np.longdouble)
    for axis, strips in ((-2, summary.rows), (-1, summary.columns)):
        if values.ndim < -axis:
            assert strips is None
            continue
        assert strips is not None
        assert strips.axis == values.ndim + axis
        others = tuple(i for i in range(values.ndim) if i != strips.axis)
        with np.errstate(over="ignore"):
            norms = np.sqrt((longs**2).sum(axis=others)).astype("f8")
        read = strips.counts > 0
        assert strips.norms[read].tolist() == pytest.approx(norms[read].tolist(), rel=1e-9, nan_ok=True)
        assert strips.counts.sum() == finite.size


def test_the_histogram_is_that_of_numpy_between_its_bounds() -> None:
    values = NUMBERS[:500]
    histogram = blocking.summarize(stored(values), bins=32).histogram
    counts, _ = np.histogram(values, 32, (histogram.edges[0], histogram.edges[-1]))
    assert histogram.counts.tolist() == counts.tolist()


def test_one_outlier_does_not_flatten_the_histogram() -> None:
    values = NUMBERS[:500].copy()
    values[3, 7] = 1e30
    summary = blocking.summarize(stored(values))
    assert summary.maximum == np.float32(1e30)
    assert summary.histogram.above >= 1
    assert 3 < summary.histogram.edges[-1] < 10
    assert np.count_nonzero(summary.histogram.counts) > 50


def test_few_integers_have_a_bin_each() -> None:
    histogram = blocking.summarize(stored(np.array([3, 3, 5, 9], "i4"))).histogram
    assert histogram.edges.tolist() == [k - 0.5 for k in range(3, 11)]
    assert histogram.counts.tolist() == [2, 0, 1, 0, 0, 0, 1]


def test_a_sample_stays_within_its_budget_and_says_so() -> None:
    array = stored(NUMBERS, (256, 1000))
    summary = blocking.summarize(array, budget=1 << 20)
    coverage = summary.coverage
    assert not coverage.complete
    assert (coverage.values, coverage.nbytes) == (NUMBERS.size, NUMBERS.nbytes)
    assert 1 << 19 <= coverage.bytes_read <= 1 << 20
    assert coverage.bytes_read == 4 * coverage.values_read
    assert coverage.stored_bytes_read >= coverage.bytes_read
    assert summary.rms == pytest.approx(1, abs=0.01)
    assert summary.rows is not None
    read = np.flatnonzero(summary.rows.counts)
    assert read[0] < 32
    assert read[-1] > 224  # spread over the rows
    assert np.isnan(summary.rows.norms[summary.rows.counts == 0]).all()
    again = blocking.summarize(array, budget=1 << 20)
    assert (again.mean, again.coverage) == (summary.mean, coverage)
    assert "of 3,000,000 values" in repr(summary)


def test_a_budget_beyond_the_array_reads_it_once() -> None:
    values = NUMBERS[:300]
    coverage = blocking.summarize(stored(values, (100, 300)), budget=values.nbytes).coverage
    assert coverage.complete
    assert coverage.bytes_read == values.nbytes


def test_rows_and_columns_can_be_chosen_and_are_at_most_256() -> None:
    values = NUMBERS[:1000, :12].reshape(1000, 3, 4)
    summary = blocking.summarize(stored(values), rows=0, columns=1)
    assert summary.rows is not None
    assert summary.columns is not None
    assert (summary.rows.axis, len(summary.rows.counts)) == (0, 256)
    assert (summary.columns.axis, len(summary.columns.counts)) == (1, 3)
    parts = np.add.reduceat(np.square(values.astype("f8")).sum(axis=(1, 2)), summary.rows.bounds[:-1])
    assert summary.rows.norms.tolist() == pytest.approx(np.sqrt(parts).tolist())
    assert summary.rows.rms.tolist() == pytest.approx(np.sqrt(parts / summary.rows.counts).tolist())


def test_a_view_has_the_statistics_of_its_values() -> None:
    view = stored(NUMBERS, (256, 1000))[10:20, ::3]
    summary = blocking.summarize(view)
    assert summary.shape == (10, 334)
    assert summary.mean == pytest.approx(float(NUMBERS[10:20, ::3].mean(dtype="f8")))


def test_extremes_neither_overflow_nor_vanish() -> None:
    summary = blocking.summarize(stored(np.array([[1e308, -1e308], [1e308, np.nan], [np.inf, 5e-324]])))
    assert (summary.minimum, summary.maximum, summary.nonfinite) == (-1e308, 1e308, 2)
    assert summary.mean == pytest.approx(1e308 / 4)
    assert summary.rms == pytest.approx(1e308 * math.sqrt(3 / 4))
    assert summary.rows is not None
    assert summary.rows.norms.tolist() == pytest.approx([1e308 * math.sqrt(2), 1e308, 5e-324], abs=0, rel=1e-9)
    tiny = blocking.summarize(stored(np.full(10, 1e-200)))
    assert tiny.rms == pytest.approx(1e-200)


def test_a_hostile_shape_takes_neither_memory_nor_time() -> None:
    store = blocking.open(f"memory://{uuid.uuid4()}")
    with store.transaction() as tx:
        tx.create_array("huge", (1 << 40, 1 << 10), "float32", (1 << 10, 1 << 10), sparse=True)
        tx.create_array("tiny", (1 << 58,), "int8", (1,), sparse=True)
        tx.create_array("long", (1 << 50,), "int8", (1 << 30,), codecs="lossless", sparse=True)
    snapshot = store.snapshot()
    for path in ("huge", "tiny"):
        summary = blocking.summarize(snapshot.array(path), budget=1 << 12)
        assert (summary.minimum, summary.maximum) == (0, 0)
        assert 0 < summary.coverage.bytes_read <= 1 << 12
    with pytest.raises(InvalidArgument, match="GB, which must be decoded whole"):
        blocking.summarize(snapshot.array("long"))


def test_memory_does_not_grow_with_the_array() -> None:
    store = blocking.open(f"memory://{uuid.uuid4()}")
    with store.transaction() as tx:
        tx.create_array("a", (1 << 24,), "float32", (1 << 20,), fill_value=1, sparse=True)
    array = store.snapshot().array("a")
    tracemalloc.start()
    try:
        summary = blocking.summarize(array, budget=None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert summary.coverage.complete
    assert summary.histogram.counts.sum() == 1 << 24
    assert peak < 120 << 20


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: blocking.summarize(a, budget=0), "budget=0"),
        (lambda a: blocking.summarize(a, budget="8"), "budget='8'"),
        (lambda a: blocking.summarize(a, budget=True), "budget=True"),
        (lambda a: blocking.summarize(a, bins=0), "bins=0"),
        (lambda a: blocking.summarize(a, rows=2), "rows=2: expected an axis of the array, which has 2"),
        (lambda a: blocking.summarize(a, columns="x"), "columns='x'"),
        (lambda a: blocking.summarize(np.zeros(3)), "is not an array of a snapshot"),
    ],
)
def test_bad_arguments_are_named(call: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call(stored(NUMBERS[:3, :3]))


@pytest.mark.parametrize(
    "values", [np.array(["a", "b"]), np.array([b"x"]), np.zeros(2, "M8[s]"), np.zeros(2, [("x", "i4")])]
)
def test_values_that_are_not_numbers_are_refused(values: np.ndarray[Any, Any]) -> None:
    with pytest.raises(InvalidArgument, match="not numbers"):
        blocking.summarize(stored(values))


def test_a_chunk_that_was_never_written_is_an_error() -> None:
    store = blocking.open(f"memory://{uuid.uuid4()}")
    with store.transaction() as tx:
        tx.create_array("a", (8,), "float32", (4,))[:4].write(1)
    with pytest.raises(NotFound, match="never written"):
        blocking.summarize(store.snapshot().array("a"))


def test_the_range_of_a_format_follows_its_scales() -> None:
    values = NUMBERS[:64] * 2.0**-20
    summary = blocking.summarize(stored(values, (64, 1000), codecs="e4m3"))
    f = exmy.Format("e4m3")
    assert summary.range is not None
    assert summary.range.name == "e4m3"
    assert 0.5 * summary.maximum <= summary.range.largest <= 4 * summary.maximum
    assert summary.range.smallest == summary.range.largest / f.max * f.smallest_subnormal
    plain = blocking.summarize(stored(values.astype(ml_dtypes.bfloat16)))
    assert plain.range is not None
    assert plain.range[:2] == ("bfloat16", 2.0**-133)
    assert blocking.summarize(stored(np.zeros(3, bool))).range is None


async def test_arrays_of_a_transaction_are_read_with_their_changes() -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        array = await tx.create_array("a", (4,), "float32")
        await array.write(2)
        assert (await tstore.summarize(array)).mean == 2
        await array.write(3)
        assert (await tstore.summarize(array)).mean == 3


async def test_equal_chunks_are_read_once_whatever_their_path_and_version() -> None:
    url = f"memory://{uuid.uuid4()}"
    store = await tstore.open(url)
    big = NUMBERS[:1000]
    async with store.transaction() as tx:
        for path in ("a", "b"):
            await (await tx.create_array(path, big.shape, "float32", (100, 1000))).write(big)
    async with store.transaction() as tx:
        await (await tx.create_array("c", (3,), "float32")).write(1)
    faulty, faults = await open_faulty(url, "r")
    first = await tstore.summarize(await (await faulty.snapshot(1)).array("a"))
    read = faults.bytes_read
    assert read >= big.nbytes
    for at, path in ((2, "a"), (1, "b"), (2, "b")):
        again = await tstore.summarize(await (await faulty.snapshot(at)).array(path))
        assert (again.path, again.mean) == (path, first.mean)
    assert faults.bytes_read - read < big.nbytes / 10
    other = await tstore.summarize(await (await faulty.snapshot(2)).array("a"), bins=10)
    assert len(other.histogram.counts) == 10
    view = await tstore.summarize((await (await faulty.snapshot(2)).array("a"))[:500])
    assert view.mean != first.mean


async def test_a_changed_chunk_is_read_again() -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        await (await tx.create_array("a", (8,), "float32", (4,))).write(1)
    assert (await tstore.summarize(await (await store.snapshot()).array("a"))).mean == 1
    async with store.transaction() as tx:
        await (await tx.array("a"))[:4].write(3)
    assert (await tstore.summarize(await (await store.snapshot()).array("a"))).mean == 2


async def test_a_cancelled_call_stops_between_batches() -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        await tx.create_array("endless", (1 << 50,), "int8", (1 << 20,), sparse=True)
    array = await (await store.snapshot()).array("endless")
    task = asyncio.create_task(tstore.summarize(array, budget=None))
    done, _ = await asyncio.wait([task], timeout=0.2)
    assert not done
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 30)


def test_the_cache_stays_within_its_limit() -> None:
    cache = ResultCache(100)
    for number in range(10):
        cache.put(bytes([number]), number, 30)
    assert cache.size <= 100
    assert [cache.get(bytes([number])) for number in (0, 7, 8, 9)] == [None, 7, 8, 9]
    cache.get(bytes([7]))
    cache.put(b"x", "x", 30)
    assert cache.get(bytes([8])) is None  # the one that was not used for the longest time
    assert cache.get(bytes([7])) == 7
    cache.put(b"x", "y", 30)
    assert (cache.get(b"x"), cache.size) == ("y", 90)
    cache.put(b"large", "", 101)
    assert cache.get(b"large") is None


def test_the_document_is_json() -> None:

    summary = blocking.summarize(stored(np.array([[np.nan, np.inf, 1.0]])))
    document = json.loads(json.dumps(summary.document(), allow_nan=False))
    assert (document["nonfinite"], document["mean"], document["coverage"]["complete"]) == (2, 1.0, True)
    assert document["rows"]["norms"] == [1.0]
    empty = blocking.summarize(stored(np.zeros((0, 3)))).document()
    assert (empty["minimum"], empty["columns"]["norms"]) == (None, [None] * 3)
    assert "not finite" in summary.table()
