"""Reading and writing through views equals NumPy's indexing and assignment, for any chain of indices."""

from __future__ import annotations

import asyncio
import itertools
import math
import uuid
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tstore
from tests.support.indices import draw_view
from tstore.core.data.reader import pack_reader
from tstore.errors import Conflict, Corrupt, InvalidArgument, InvalidIndex, Misuse, NotFound

ZSTD: list[dict[str, Any]] = [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 0}}]
SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)


async def new_store() -> tstore.Store:
    return await tstore.open(f"memory://{uuid.uuid4()}")


async def stored(values: npt.NDArray[Any], chunks: Any, **options: Any) -> tuple[tstore.Store, tstore.Array]:
    """Commit an array with these values, and return the store and the array from a snapshot."""
    store = await new_store()
    async with store.transaction() as tx:
        array = await tx.create_array("a", values.shape, values.dtype, chunks, **options)
        await array.write(values)
    return store, await (await store.snapshot()).array("a")


async def read_back(store: tstore.Store) -> npt.NDArray[Any]:
    """Return the values of the newest version."""
    return await (await (await store.snapshot()).array("a")).read()


DTYPES = st.sampled_from(["u1", "i8", "f4", "c16"])
CODECS = st.sampled_from([None, None, ZSTD])


@given(SHAPES, DTYPES, CODECS, st.data())
def test_reading_a_view_equals_numpy(shape: Any, dtype: str, codecs: Any, data: st.DataObject) -> None:
    async def check() -> None:
        chunks = tuple(data.draw(st.integers(1, 7)) for _ in shape)
        numbers = np.arange(math.prod(shape)).reshape(shape)
        _, array = await stored(numbers.astype(dtype), chunks, codecs=codecs)
        view, selected = draw_view(data, array, numbers)
        expected = selected.astype(dtype)
        values = await view.read()
        assert (values.dtype, values.shape, values.flags.c_contiguous) == (expected.dtype, view.shape, True)
        assert np.array_equal(values, expected)
        steps = (slice(None, None, -1),) * (expected.ndim > 0)
        out = np.zeros((*expected.shape[::-1], 2), data.draw(st.sampled_from([dtype, "c16"])))[(*steps, ..., 1)].T
        assert await view.read(out=out) is out
        assert np.array_equal(out, expected)
        assert (view.ndim, view.size, view.nbytes) == (expected.ndim, expected.size, expected.nbytes)
        assert len(view.chunks) == view.ndim

    asyncio.run(check())


@given(SHAPES, CODECS, st.booleans(), st.data())
def test_writing_to_views_equals_numpy(shape: Any, codecs: Any, sparse: bool, data: st.DataObject) -> None:
    """Writes of one transaction, with reads between them, and of a concurrent one to other elements."""

    async def check() -> None:
        chunks = tuple(data.draw(st.integers(1, 7)) for _ in shape)
        numbers = np.arange(math.prod(shape)).reshape(shape)
        store = await new_store()
        model = np.full(shape, 0 if sparse else 7, "i4")
        async with store.transaction() as tx:
            array = await tx.create_array("a", shape, "i4", chunks, sparse=sparse, codecs=codecs)
            if not sparse:
                await array.write(7)
        async with store.transaction() as tx:
            array = await tx.array("a")
            for turn in range(1, data.draw(st.integers(2, 4))):
                view, selected = draw_view(data, array, numbers)
                values = np.arange(selected.size).reshape(selected.shape) + 1000 * turn
                if data.draw(st.booleans()):
                    values = values[..., :1] if selected.ndim else np.asarray(turn)
                await view.write(values)
                model.reshape(-1)[selected.reshape(-1)] = np.broadcast_to(values, selected.shape).reshape(-1)
                if data.draw(st.booleans()):
                    assert np.array_equal(await array.read(), model)
                    view, selected = draw_view(data, array, numbers)
                    assert np.array_equal(await view.read(), model.reshape(-1)[selected])
        assert np.array_equal(await read_back(store), model)
        assert (await store.verify()).ok

    asyncio.run(check())


async def test_assignments_equal_those_of_numpy() -> None:
    """The model above assigns one number after the other; this is NumPy's own assignment."""
    indices: list[Any] = [
        np.s_[[3, 0, 3, -1]],
        np.s_[:, [1, 1, 0]],
        np.s_[[0, 2], :, [1, 3]],
        np.s_[::-2, [[0, 1], [2, 2]]],
        np.s_[np.arange(4) % 2 == 0],
        np.s_[:, np.eye(5, 6, dtype=bool)],
        np.s_[1, ..., [True, False, True, False, False, True]],
        np.s_[np.ix_([0, 3], [4, 1], [0, 5])],
        np.s_[None, [1], None, 2:4],
        np.s_[[]],
        np.s_[True],
    ]
    model = np.zeros((4, 5, 6), "i4")
    store, _ = await stored(model, (2, 3, 4))
    for turn, index in enumerate(indices, 1):
        values = turn * 1000 + np.arange(model[index].size).reshape(model[index].shape)
        model[index] = values
        async with store.transaction() as tx:
            await (await tx.array("a"))[index].write(values)
        assert np.array_equal(await read_back(store), model), index


async def test_views_are_lazy_and_compose() -> None:
    values = np.arange(40 * 6 * 5).reshape(40, 6, 5)
    _, array = await stored(values, (7, 4, 5), dimension_names=("layer", "row", None))
    view = array[10:][::2].T[3]
    assert np.array_equal(await view.read(), values[10:][::2].T[3])
    assert view.dimension_names == ("row", "layer")
    assert np.array_equal(await view.isel(layer=3).read(), values[16, :, 3])
    assert np.array_equal(
        await array.isel(layer=[1, 1, 39], row=slice(None, None, -2)).read(), values[[1, 1, 39], ::-2]
    )
    both = await array.isel(row=[5, 0, 0], layer=[True, False] * 20).read()  # each along its own axis
    assert np.array_equal(both, values[::2][:, [5, 0, 0]])
    assert array.transpose(2, 0, 1).dimension_names == (None, "layer", "row")
    assert array[None, [2, 3]].dimension_names == (None, "layer", "row", None)
    assert array.vindex[[1, 2], [3, 4]].dimension_names == (None, None)
    for axes in ((2, 0, 1), ((2, 0, 1),), (-1, 0, 1), (), (None,)):
        assert np.array_equal(await array.transpose(*axes).read(), values.transpose(*axes))  # type: ignore[arg-type]
    for axes in ((0, 1), (0, 1, 1), (0, 1, 3), ("x",)):
        with pytest.raises(InvalidArgument, match=r"a: axes .* are not a permutation of 3 axes"):
            array.transpose(*axes)  # type: ignore[arg-type]
    for names in ({"column": 3}, {"layer": None}, {"layer": ...}, {"layer": 40}, {"row": "x"}):
        with pytest.raises(InvalidArgument, match=r"^a: "):
            array.isel(**names)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"no axis has the name 'column'; the names are: 'layer', 'row'"):
        array.isel(column=3)
    _, array = await stored(values, (7, 4, 5), dimension_names=("row", "layer", "row"))
    with pytest.raises(InvalidArgument, match="several axes have the name 'row'"):
        array.isel(row=3)
    assert np.array_equal(await array[:, :, 2].isel(row=3).read(), values[3, :, 2])


async def test_the_chunks_of_a_view() -> None:
    _, array = await stored(np.zeros((40, 30, 20), "i1"), (10, 7, 20))
    assert array.chunks == array.chunksize == (10, 7, 20)
    assert array[3].chunks == (7, 20)
    assert array.T[::3].chunks == (7, 7, 10)
    assert array[None, ::-1, [1, 2, 3]].chunks == (1, 10, 7, 20)
    assert array.vindex[[1, 2], [1, 2]].chunks == (2, 20)
    assert len(array[5:]) == 35
    assert array[:0]  # as before there was a length
    with pytest.raises(TypeError, match="a has no axes"):
        len(array[0, 0, 0])


@pytest.mark.parametrize("index", [40, (0, 0, 0), [40], [True], "x", np.zeros((40, 5), bool)], ids=str)
async def test_errors_name_the_array(index: Any) -> None:
    _, array = await stored(np.zeros((40, 6), "i1"), (10, 6))
    for select in (array.__getitem__, array.oindex.__getitem__, array.vindex.__getitem__):
        with pytest.raises(InvalidIndex, match=r"^a: ") as caught:
            select(index)
        assert isinstance(caught.value, IndexError)


async def test_wrong_values_are_refused() -> None:
    store, _ = await stored(np.zeros((4, 6), "i2"), (2, 6))
    async with store.transaction() as tx:
        array = await tx.array("a")
        with pytest.raises(
            InvalidArgument, match=r"values of shape \(3,\) do not fit the region of shape \(2, 6\)"
        ):
            await array[[0, 1]].write([1, 2, 3])
        for casting in ("no", "equiv", "safe", "same_kind"):
            with pytest.raises(InvalidArgument, match=f"rule '{casting}' does not allow casting dtype float64"):
                await array.write(np.zeros((4, 6)), casting)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="rule 'safe' does not allow casting dtype int64"):
            await array.write(np.zeros(6, "i8"), casting="safe")
        with pytest.raises(InvalidArgument, match="casting must be one of no, equiv"):
            await array.write(0, casting="same kind")  # type: ignore[arg-type]
        for unsuitable in ("3", None, [None], np.zeros(6, "M8[s]")):
            with pytest.raises(InvalidArgument, match="does not allow casting"):
                await array.write(unsuitable, casting="unsafe")  # type: ignore[arg-type]
        await array[1].write([1.9, -2.9, 0, 70000, 1, 2], casting="unsafe")
        await array[:, 0].write(np.float64(8.5), casting="unsafe")
    expected = np.zeros((4, 6), "i2")
    expected[1], expected[:, 0] = np.array([1.9, -2.9, 0, 70000, 1, 2]).astype("i2"), 8
    assert np.array_equal(await read_back(store), expected)
    snapshot = await (await store.snapshot()).array("a")
    with pytest.raises(Misuse, match="snapshot"):
        await snapshot[[0, 1]].write(0)


async def test_a_view_that_repeats_elements_writes_the_last() -> None:
    store, _ = await stored(np.zeros(5, "i1"), (2,))
    async with store.transaction() as tx:
        array = await tx.array("a")
        await array[None][[0, 0, 0]].write([[1], [2], [3]])
        assert (await array.read()).tolist() == [3, 3, 3, 3, 3]
        await array[np.broadcast_to(1, (2, 3))].write([[4, 5, 6], [7, 8, 9]])
        assert (await array.read()).tolist() == [3, 9, 3, 3, 3]
        assert (await array[None][[0, 0], 1:3].read()).tolist() == [[9, 3], [9, 3]]
        await array[False].write(1)
    assert (await read_back(store)).tolist() == [3, 9, 3, 3, 3]


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn", "int4", "M8[s]", "i2,f8", "V3", "?"])
async def test_rows_by_an_index_array(dtype: str) -> None:
    dtype_ = np.dtype(getattr(ml_dtypes, dtype, dtype))
    raw = np.random.default_rng(0).integers(0, 2, (5, 4, dtype_.itemsize), "u1")
    values = raw.view(dtype_)[..., 0]
    store, array = await stored(values, (2, 4))
    assert (await array[[4, 1, 1], ::2].read()).tolist() == values[[4, 1, 1], ::2].tolist()
    async with store.transaction() as tx:
        await (await tx.array("a"))[[0, 3], 1:].write(values[[3, 0], 1:])
    values[[0, 3], 1:] = values[[3, 0], 1:]
    assert (await read_back(store)).tolist() == values.tolist()


async def test_points_of_unwritten_chunks() -> None:
    store = await new_store()
    async with store.transaction() as tx:
        for path, sparse in (("dense", False), ("sparse", True)):
            array = await tx.create_array(path, (6, 6), "f4", (2, 3), fill_value=9, sparse=sparse)
            await array[[0, 1], [0, 2]].write([1, 2])
    snapshot = await store.snapshot()
    dense, sparse = await snapshot.array("dense"), await snapshot.array("sparse")
    assert (await dense[[0, 0, 1], [0, 1, 2]].read()).tolist() == [1, 9, 2]
    with pytest.raises(NotFound, match=r"chunk \(1, 0\) of dense was never written"):
        await dense[[0, 2], [0, 1]].read()
    assert (await sparse[[5, 0, 1], [0, 0, 2]].read()).tolist() == [9, 1, 2]
    assert (await sparse[[5, 0], ::-5].read()).tolist() == [[9, 9], [9, 1]]


async def test_patches_of_points_are_applied_to_a_newer_commit() -> None:
    store, _ = await stored(np.zeros((8, 8), "i4"), (4, 8))
    model = np.zeros((8, 8), "i4")
    mask = np.random.default_rng(0).random((8, 8)) < 0.4
    async with store.transaction() as mine:
        await (await mine.array("a"))[mask].write(5)
        async with store.transaction() as other:
            await (await other.array("a"))[~mask].write(np.arange(np.count_nonzero(~mask)))
    model[mask], model[~mask] = 5, np.arange(np.count_nonzero(~mask))
    assert np.array_equal(await read_back(store), model)


async def test_points_are_written_as_whole_chunks_where_they_cover_them() -> None:
    model = np.arange(60).reshape(10, 6)
    store, _ = await stored(model, (4, 4))
    order = np.random.default_rng(0).permutation(10)
    async with store.transaction() as tx:
        await (await tx.array("a"))[order].write(model)
    expected = np.empty_like(model)
    expected[order] = model
    assert np.array_equal(await read_back(store), expected)
    late = store.transaction()
    await (await late.array("a"))[[3, 0, 1, 2], 0].write(1)
    whole = store.transaction()
    await (await whole.array("a"))[[3, 0, 1, 2]].write(model[:4])
    await late.commit()
    with pytest.raises(Conflict, match=r"a, chunk \(0, 0\)"):  # patches would have been merged
        await whole.commit()
    expected[[3, 0, 1, 2], 0] = 1
    assert np.array_equal(await read_back(store), expected)
    async with store.transaction() as tx:  # the first four rows are covered, with a row twice
        await (await tx.array("a"))[[0, 1, 0, 3, 2]].write(np.arange(5)[:, None])
        await (await tx.array("a"))[[5, 5, 5, 4]].write(np.arange(4)[:, None])
    expected[[0, 1, 0, 3, 2]], expected[[5, 5, 5, 4]] = np.arange(5)[:, None], np.arange(4)[:, None]
    assert np.array_equal(await read_back(store), expected)


async def test_a_serializable_transaction_reads_the_chunks_of_its_points() -> None:
    store, _ = await stored(np.zeros((8, 8), "i4"), (2, 8))

    async def commit(read: Any, changed: int) -> None:
        async with store.transaction(isolation="serializable") as tx:
            array = await tx.array("a")
            await array[read].read()
            await tx.create_array(uuid.uuid4().hex, (), "i1")
            async with store.transaction() as other:
                await (await other.array("a"))[changed].write(1)

    await commit(np.s_[[0, 5], [1, 1]], 2)
    await commit(np.s_[[], [1]], 2)
    with pytest.raises(Conflict, match=r"a, chunk \(2, 0\)"):
        await commit(np.s_[[0, 5], [1, 1]], 4)


async def test_resized_arrays_keep_points() -> None:
    store, _ = await stored(np.zeros((5, 4), "i4"), (3, 3), sparse=True)
    model = np.zeros((5, 4), "i4")
    async with store.transaction() as tx:
        array = await tx.array("a")
        await array[[4, 0, 2], [0, 3, 1]].write([1, 2, 3])
        model[[4, 0, 2], [0, 3, 1]] = [1, 2, 3]
        await array.resize((4, 6))
        model = np.pad(model[:4], ((0, 0), (0, 2)))
        await array[:, [5, 0]].write([[8, 9]])
        model[:, [5, 0]] = [8, 9]
        assert np.array_equal(await array.read(), model)
        await array.resize((6, 6))
        model = np.pad(model, ((0, 2), (0, 0)))
        with pytest.raises(InvalidArgument, match="whole"):
            await array[np.arange(6)].resize((5, 5))
        with pytest.raises(InvalidArgument, match="whole"):
            await array.T.resize((5, 5))
        await array[...].resize((6, 6))
    assert np.array_equal(await read_back(store), model)


async def test_points_of_a_lossy_chunk_leave_the_others_unchanged() -> None:
    values = np.linspace(-3, 3, 64, dtype="f4").reshape(8, 8)
    store, array = await stored(values, (8, 8), codecs="e4m3")
    before = await array.read()
    mask = np.eye(8, dtype=bool)
    async with store.transaction() as tx:
        await (await tx.array("a"))[mask].write(0.5)
    after = await read_back(store)
    assert np.array_equal(after[~mask], before[~mask])
    assert (after[mask] == 0.5).all()
    with pytest.raises(InvalidArgument, match="would change"):
        async with store.transaction() as tx:
            await (await tx.array("a"))[mask].write(1e6)


async def test_only_blocks_with_points_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(4 << 20, dtype="i4").reshape(64, 1 << 16)  # 16 blocks in one chunk
    _, array = await stored(values, values.shape)
    sizes: list[int] = []

    class Counting:
        def __init__(self, *arguments: Any) -> None:
            self._reader = pack_reader(*arguments)

        def read_into(self, offset: int, buffers: Any, size: int) -> None:
            sizes.append(size)
            self._reader.read_into(offset, buffers, size)

    monkeypatch.setattr("tstore.core.data.reader.pack_reader", Counting)

    async def blocks(view: tstore.Array, expected: npt.NDArray[Any]) -> float:
        sizes.clear()
        assert np.array_equal(await view.read(), expected)
        return sum(sizes) / (1 << 20)

    assert await blocks(array[[0, 63]], values[[0, 63]]) == 2
    assert await blocks(array[[0, 63, 0, 1], [0, -1, 5, 7]], values[[0, 63, 0, 1], [0, -1, 5, 7]]) == 2
    assert await blocks(array[np.ix_([0, 40], [0, 65535])], values[np.ix_([0, 40], [0, 65535])]) == 2
    assert await blocks(array[:, [3]], values[:, [3]]) == 16
    assert await blocks(array[[]], values[[]]) == 0
    mask = np.zeros(values.shape, bool)
    mask[[8, 9, 33], ::7] = True
    assert await blocks(array[mask], values[mask]) == 2


@pytest.mark.parametrize("codecs", [None, ZSTD], ids=str)
async def test_points_of_a_damaged_chunk(codecs: Any, tmp_path: Any) -> None:
    store = await tstore.open(tmp_path / "store")
    async with store.transaction() as tx:
        array = await tx.create_array("a", (3, 700_000), "i4", (1, 700_000), codecs=codecs)
        await array.write(np.random.default_rng(0).integers(0, 1 << 30, (3, 700_000), "i4"))
    row = (await store.snapshot()).tree.nodes["a"].row(1)
    assert row is not None
    pack = tmp_path / "store" / str(row.pack)
    data = bytearray(pack.read_bytes())
    data[row.offset + row.length // 2] ^= 1
    pack.write_bytes(data)
    store = await tstore.open(tmp_path / "store")
    array = await (await store.snapshot()).array("a")
    await array[[0, 2], [5, 6]].read()
    with pytest.raises(Corrupt, match=r"a, chunk \(1, 0\)"):
        await array[[0, 1, 2], [5, 350_000, 6]].read()


@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))), ids=str)
async def test_an_index_array_of_two_axes_is_transposed(axes: tuple[int, ...]) -> None:
    numbers = np.arange(60).reshape(12, 5)
    store, array = await stored(numbers, (5, 3))
    points = np.array([[1, 2, 9], [11, 0, 4]])
    view, expected = array[points].transpose(*axes), numbers[points].transpose(axes)
    assert np.array_equal(await view.read(), expected)
    assert np.array_equal(await view[1:, ::-1, [0, -1]].read(), expected[1:, ::-1, [0, -1]])
    async with store.transaction() as tx:
        await (await tx.array("a"))[points].transpose(*axes).write(-expected)
    numbers[points] *= -1
    assert np.array_equal(await read_back(store), numbers)
