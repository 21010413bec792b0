"""Copies of arrays into a transaction: the values of NumPy, with the bytes and the memory that are promised."""

from __future__ import annotations

import asyncio
import inspect
import tracemalloc
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tstore
import tstore.sync as blocking
from tests.support import http_server
from tests.support.fuzzing import bounded_time
from tests.support.thresholds import Thresholds
from tstore.convert.zarr_export import export_zarr
from tstore.core.format.arrays.codecs import Chain
from tstore.core.format.arrays.views import whole_view
from tstore.core.transactions import copies
from tstore.errors import AlreadyExists, Corrupt, InvalidArgument, Misuse, NotFound

MIB = 1 << 20


def anew() -> str:
    return f"memory://{uuid.uuid4()}"


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """A shape, and the chunks of the source and of the copy."""
    ndim = draw(st.integers(0, 3))
    shape, source, target = [
        draw(st.lists(st.integers(low, 9), min_size=ndim, max_size=ndim)) for low in (0, 1, 1)
    ]
    return shape, source, target


@given(
    grids(),
    st.sampled_from([None, "lossless"]),
    st.sampled_from(["same", "other chunks", "other codecs", "view"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 64),
)
@example(([9, 7], [2, 7], [9, 2]), None, "other chunks", False, False, 0)
async def test_a_copy_has_the_values_and_the_metadata(
    grid: tuple[list[int], list[int], list[int]],
    codecs: str | None,
    kind: str,
    is_sparse: bool,
    in_same_store: bool,
    box: int,
) -> None:
    shape, chunks, other_chunks = grid
    store = await tstore.open(anew())
    target = store if in_same_store else await tstore.open(anew())
    values = np.arange(np.prod(shape), dtype="float32").reshape(shape)
    async with store.transaction() as tx:
        names = [f"axis {i}" for i in range(len(shape))]
        array = await tx.create_array(
            "a", shape, "float32", chunks, codecs, 5, {"k": [1]}, names, sparse=is_sparse
        )
        written = array[:1] if is_sparse and shape else array
        await written.write(values[:1] if is_sparse and shape else values)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copies, "_BOX_BYTES", box)
            inside = await tx.copy_array(array, "inside", other_chunks)  # of uncommitted values
            expected = await array.read()
            assert np.array_equal(await inside.read(), expected)
    source = await (await store.snapshot()).array("a")
    options: dict[str, Any] = {}
    if kind == "other chunks":
        options["chunks"] = other_chunks
    elif kind == "other codecs":
        options["codecs"] = "lossless" if codecs is None else None
    elif kind == "view" and shape:
        source, expected = source[::-1], expected[::-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "_BOX_BYTES", box)
        async with target.transaction() as tx:
            assert np.array_equal(await (await tx.copy_array(source, "b/c", **options)).read(), expected)
    copy = await (await target.snapshot()).array("b/c")
    assert np.array_equal(await copy.read(), expected)
    assert (copy.attributes, copy.fill_value, copy.sparse) == ({"k": [1]}, 5, is_sparse)
    assert (copy.dtype, copy.dimension_names) == (source.dtype, source.dimension_names)
    assert copy.chunks == tuple(options.get("chunks", source.chunks))
    assert "codecs" in options or copy.codecs == source.codecs
    assert (await target.verify()).ok


async def test_encoded_chunks_are_copied_without_being_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    store, target = await tstore.open(anew()), await tstore.open(anew())
    values = np.random.default_rng(0).normal(size=(100, 64)).astype("float32")
    for codecs in ("lossless", "e4m3"):
        async with store.transaction() as tx:
            await (await tx.create_array(codecs, values.shape, values.dtype, (9, 64), codecs)).write(values)
        snapshot = await store.snapshot()
        with monkeypatch.context() as patch:
            patch.setattr(Chain, "decode", None)
            patch.setattr(Chain, "encode", None)
            async with target.transaction() as tx:
                await tx.copy_array(await snapshot.array(codecs), codecs)
        copied, original = [await (await s.snapshot()).array(codecs) for s in (target, store)]
        assert np.array_equal(await copied.read(), await original.read())
    stored = [[c.bytes_added async for c in s.history()] for s in (store, target)]
    assert stored[0] == stored[1]


async def test_a_copy_in_the_same_store_refers_to_the_same_chunks(tmp_path: Path) -> None:
    """It stays complete after the source has been deleted and collected."""
    store, values = await tstore.open(tmp_path), np.arange(100_000)
    async with store.transaction() as tx:
        await (await tx.create_array("a", values.shape, values.dtype, (1000,))).write(values)
    source = await (await store.snapshot()).array("a")
    async with store.transaction() as tx:
        await tx.copy_array(source, "b")
        await tx.delete("a")
    assert [c.bytes_added async for c in store.history()] == [0, values.nbytes]
    await store.collect(tstore.Keep(last=1))
    snapshot = await (await tstore.open(tmp_path, "r")).snapshot()
    assert snapshot.paths() == ["b"]
    assert np.array_equal(await (await snapshot.array("b")).read(), values)
    assert (await store.verify()).ok


async def test_each_chunk_is_written_once_within_the_memory_of_a_box(
    tmp_path: Path, thresholds: Thresholds
) -> None:
    """The rows of 32 MiB become columns, in boxes of 2 MiB."""
    thresholds(_BOX_BYTES=2 * MIB)
    store, target = await tstore.open(tmp_path / "a"), await tstore.open(tmp_path / "b")
    values = np.arange(4 * MIB).reshape(2048, 2048)
    async with store.transaction() as tx:
        await (await tx.create_array("a", values.shape, values.dtype, (16, 2048))).write(values)
    source = await (await store.snapshot()).array("a")
    tracemalloc.start()
    async with target.transaction() as tx:
        copy = await tx.copy_array(source, "b", (2048, 64))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert np.array_equal(await copy[5:7].read(), values[5:7])
    assert [c.bytes_added async for c in target.history()] == [values.nbytes]
    assert peak < 16 * MIB
    assert np.array_equal(await (await (await target.snapshot()).array("b")).read(), values)


async def test_a_sparse_copy_keeps_its_holes() -> None:
    store = await tstore.open(anew())
    async with store.transaction() as tx:
        array = await tx.create_array("a", (1000,), "int64", (10,), sparse=True)
        await array[500:520].write(7)
    source = await (await store.snapshot()).array("a")
    for number, chunks in enumerate([None, (15,), (40,)]):
        target = await tstore.open(anew())
        async with target.transaction() as tx:
            copy = await tx.copy_array(source, "b", chunks)
            assert (await copy.explain()).bytes_wanted == 8000
        copy = await (await target.snapshot()).array("b")
        assert len((await copy.explain()).chunks) == [2, 2, 1][number]
        assert np.array_equal(await copy.read(), await source.read())


EDGE = (1 << 20) - 1
VIEWS: list[tuple[Any, tuple[int, ...]]] = [
    (np.s_[:], (100, 70, 64)),
    (np.s_[::-1, 5::3], (64, 64, 64)),
    (np.s_[EDGE - 9 :, :, 60], (3, 1 << 12)),
    (np.s_[5], (50, 50)),
    (np.s_[::64, 80:200], (16, 16, 16)),
    (np.s_[None, 110:600:7, ..., None, :10], (1, 5, 1 << 12, 1, 5)),
]


@pytest.mark.parametrize("kind", ["snapshot", "transaction", "plain"])
def test_a_sparse_copy_of_trillions_of_chunks_looks_at_those_that_exist(tmp_path: Path, kind: str) -> None:
    store = blocking.open(tmp_path / "store")
    points = np.array(
        [[EDGE, 70, 60], [EDGE, 99, 69], [3, 128, 7], [5, 5, 5], [145, 128, 2], [700_032, 81, 1 << 19]]
    )
    with store.transaction() as tx:
        array = tx.create_array("a", (1 << 20,) * 3, "uint8", (64,) * 3, sparse=True, fill_value=9)
        array.vindex[tuple(points.T)].write(list(range(10, 16)))
    source: Any = store.snapshot().array("a")
    if kind == "plain":
        asyncio.run(export_zarr(tmp_path / "store", tmp_path / "a.zarr"))
        source = blocking.open({"driver": "zarr3", "kvstore": f"file://{tmp_path}/a.zarr/a/"})
    elif kind == "transaction":
        writing = store.transaction()
        source = writing.array("a")
        source[5, 5, 5].write(13)  # is a patch until it is read
    for index, chunks in VIEWS if kind == "snapshot" else VIEWS[::3]:
        view = whole_view(source.shape).narrow(index)
        places, values = [], []
        for value, point in enumerate(points.tolist(), 10):
            if all(at in positions for at, positions in zip(point, view.positions, strict=True)):
                place = [0] * view.ndim
                for at, positions, axes in zip(point, view.positions, view.follows, strict=True):
                    assert isinstance(positions, range)
                    for axis in axes:
                        place[axis] = positions.index(at)
                places.append(place)
                values.append(value)
        assert values
        target = blocking.open(anew())
        with bounded_time(20), target.transaction() as tx:
            copy = tx.copy_array(source[index], "b", chunks)
            assert copy.vindex[tuple(np.transpose(places))].read().tolist() == values
            beside = np.array(places)
            beside[:, -1] ^= 1
            assert copy.vindex[tuple(beside.T)].read().tolist() == [9] * len(values)
        cells = {tuple(p // n for p, n in zip(place, chunks, strict=True)) for place in places}
        snapshot: Any = inspect.unwrap(target.snapshot())  # type: ignore[arg-type]
        assert len(cells) <= snapshot.tree.nodes["b"].chunk_count <= 40 * len(points)


async def test_what_is_refused(tmp_path: Path) -> None:
    store, target = await tstore.open(tmp_path / "a"), await tstore.open(anew())
    async with store.transaction() as tx:
        await (await tx.create_array("a", (4000,), "int64", (1000,), "lossless")).write(range(4000))
        await (await tx.create_array("hole", (4,), "int64", (2,)))[:2].write(1)
    snapshot = await store.snapshot()
    array, hole = await snapshot.array("a"), await snapshot.array("hole")
    tx = target.transaction()
    await tx.create_array("taken", (1,), "int8")
    with pytest.raises(AlreadyExists):
        await tx.copy_array(array, "taken")
    with pytest.raises(InvalidArgument):
        await tx.copy_array(np.ones(3), "b")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        await tx.copy_array(array, "b", (2, 2))
    for number, chunks in enumerate([None, (4,)]):
        with pytest.raises(NotFound, match=r"chunk \(1,\)"):
            await tx.copy_array(hole, f"hole/{number}", chunks)
    [pack] = (tmp_path / "a" / "txn").glob("*/pack-*")
    data = bytearray(pack.read_bytes())
    data[100] ^= 1
    pack.write_bytes(data)
    for number, chunks in enumerate([None, (4,)]):
        with pytest.raises(Corrupt, match="a, chunk"):
            await tx.copy_array(array, f"damaged/{number}", chunks)
    assert await tx.paths() == ["taken"]  # nothing is left of a copy that failed
    other = target.transaction()
    resized = await other.create_array("r", (4,), "int8", sparse=True)
    view = resized[:]
    await resized.resize((5,))
    with pytest.raises(Misuse):
        await tx.copy_array(view, "resized")


def test_between_a_folder_and_a_server(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 99, (300, 40))
    with (
        http_server.serving(tmp_path / "s") as server,
        blocking.open(server.url, storage_options={"token": http_server.WRITE}) as remote,
        blocking.open(tmp_path / "local") as local,
    ):
        with local.transaction() as tx:
            tx.create_array("a", values.shape, values.dtype, (64, 40), "lossless").write(values)
        with remote.transaction() as tx:
            tx.copy_array(local.snapshot().array("a"), "same")
            tx.copy_array(local.snapshot().array("a"), "other", (300, 8))
        with local.transaction() as tx:
            tx.copy_array(remote.snapshot().array("other"), "back", (7, 7), None)
        assert np.array_equal(local.snapshot().array("back").read(), values)
        assert np.array_equal(remote.snapshot().array("same").read(), values)
        assert remote.verify().ok


async def test_a_chunk_is_decoded_once_for_all_small_ones_that_it_becomes(monkeypatch: pytest.MonkeyPatch) -> None:
    store, values, decode, decoded = await tstore.open(anew()), np.random.rand(128, 96), Chain.decode, []

    def counted(self: Chain, *arguments: Any) -> None:
        decoded.append(self)
        decode(self, *arguments)

    async with store.transaction() as tx:
        await (await tx.create_array("a", values.shape, "f8", (64, 48), codecs="lossless")).write(values)
    async with store.transaction() as tx:
        monkeypatch.setattr(Chain, "decode", counted)
        await tx.copy_array(await (await store.snapshot()).array("a"), "b", (8, 8))
        monkeypatch.undo()
    assert len(decoded) == 4
    assert np.array_equal(await (await (await store.snapshot()).array("b")).read(), values)


async def test_encoded_chunks_are_copied_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds
) -> None:
    source, target = await tstore.open(anew()), await tstore.open(anew())
    values, sizes, read = np.arange(1000), [], copies.read_chunks

    async def counted(storage: Any, jobs: Any) -> None:
        sizes.append(sum(job.out.nbytes for job in jobs))
        await read(storage, jobs)

    async with source.transaction() as tx:
        await (await tx.create_array("a", values.shape, "i8", (50,))).write(values)
    thresholds(_BOX_BYTES=1000)
    monkeypatch.setattr(copies, "read_chunks", counted)
    async with target.transaction() as tx:
        await tx.copy_array(await (await source.snapshot()).array("a"), "a")
    assert (len(sizes), max(sizes), sum(sizes)) == (10, 800, values.nbytes)
    assert np.array_equal(await (await (await target.snapshot()).array("a")).read(), values)


async def test_a_copy_does_not_need_the_pack_of_chunks_that_were_replaced() -> None:
    """A collection has deleted it."""
    store = await tstore.open(anew())
    async with store.transaction() as tx:
        await (await tx.create_array("a", (30, 40), "f8", (10, 40))).write(1)
    for rows in (slice(0, 10), slice(10, 30)):
        async with store.transaction() as tx:
            await (await tx.array("a"))[rows].write(np.full((rows.stop - rows.start, 40), 2.0))
    assert (await store.collect(tstore.Keep(last=1))).objects > 0
    async with store.transaction() as tx:
        copy = await tx.copy_array(await (await store.snapshot()).array("a"), "b")
        assert (await copy.read() == 2).all()
