"""A partial write to a chunk with a lossy codec keeps the other values bit for bit, or is refused."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tstore
import tstore.sync as blocking
from tstore.errors import InvalidArgument

Values = npt.NDArray[Any]


async def stored(store: tstore.Store) -> Values:
    return await (await (await store.snapshot()).array("a")).read()


async def made(values: Values, chunks: tuple[int, ...], codecs: Any, **more: Any) -> tstore.Store:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        a = await tx.create_array("a", values.shape, values.dtype, chunks, codecs=codecs, **more)
        await a.write(values)
    return store


def small(shape: tuple[int, ...], dtype: str = "float32") -> Values:
    return (np.random.default_rng(0).standard_normal(shape) * 1e-3).astype(dtype)


def same_bits(a: Values, b: Values) -> npt.NDArray[np.bool_]:
    same: npt.NDArray[np.bool_] = a.view(f"u{a.itemsize}") == b.view(f"u{b.itemsize}")
    return same


CHAINS: list[Any] = [
    "e4m3",
    {"format": "e2m1", "block": 32},
    {"format": "e3m2", "axis": 1},
    {"format": "e3m2", "scale": "max"},
    [{"name": "exmy", "configuration": {"format": "e4m3"}}, {"name": "zstd"}],
    {"format": "e4m3", "block": 16, "scale": "float"},
    {"format": "e4m3", "block": 16, "scale": "e4m3"},
    {"format": "e4m3", "axis": 0, "scale": "6bit"},
]


@pytest.mark.parametrize("codecs", CHAINS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
async def test_other_values_stay_exact(codecs: Any, dtype: str) -> None:
    meta_dtype = np.dtype(dtype) if dtype != "bfloat16" else (await _bfloat16())
    store = await made(small((128, 64)).astype(meta_dtype), (64, 64), codecs)
    before = await stored(store)
    for index in (np.s_[3:5, 7:], np.s_[::3, 1], np.s_[100, 63]):
        async with store.transaction() as tx:
            a = await tx.array("a")
            await a[index].write(np.asarray(1e-3).astype(meta_dtype))
            seen = await a.read()
        after = await stored(store)
        assert same_bits(seen, after).all()
        named = np.zeros(before.shape, bool)
        named[index] = True
        assert same_bits(before, after)[~named].all()
        assert np.abs(after[named].astype("f8") - 1e-3).max() < 4e-4
        before = after
    assert (await store.verify()).ok


async def _bfloat16() -> np.dtype[Any]:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("codecs", CHAINS[:1] + CHAINS[3:5])
async def test_a_value_that_would_erase_others_is_refused(codecs: Any) -> None:
    """A value of 10,000 among 127 values of 0.001 would round those to zero."""
    store = await made(small((256,)), (128,), codecs)
    before = await stored(store)
    tx = store.transaction()
    a = await tx.array("a")
    await a[130].write(1e4)
    with pytest.raises(InvalidArgument, match=r"a, chunk \(1,\): .* 12\d other values"):
        await a.read()
    with pytest.raises(InvalidArgument, match="write the whole chunk"):
        await tx.commit()
    assert same_bits(await stored(store), before).all()
    async with store.transaction() as tx:  # as the error advises
        await (await tx.array("a"))[128:].write(np.full(128, 1e4))
    after = await stored(store)
    assert same_bits(after, before)[:128].all()
    assert (after[128:] > 9e3).all()


async def test_values_of_another_transaction_are_not_erased_either() -> None:
    """Both write parts of a chunk of zeros; each alone would be accepted."""
    store = await made(np.zeros(128, "f4"), (128,), "e4m3")
    first, second = store.transaction(), store.transaction()
    await (await first.array("a"))[:64].write(small((64,)))
    await (await second.array("a"))[64:].write(np.full(64, 1e4))
    await first.commit()
    before = await stored(store)
    with pytest.raises(InvalidArgument, match=r"a, chunk \(0,\)"):
        await second.commit()
    assert same_bits(await stored(store), before).all()
    assert (await store.snapshot()).version == 2


async def test_values_kept_by_a_resize_stay_exact() -> None:
    values = small((100, 100))
    values[:, 90:] = 1e3  # so that cutting them off allows another offset
    store = await made(values, (64, 64), "e4m3")
    before = await stored(store)
    async with store.transaction() as tx:
        a = await tx.array("a")
        await a.resize((70, 80))
        await a.resize((100, 100))
    after = await (await (await store.snapshot()).array("a"))[:70, :80].read()
    assert same_bits(after, np.ascontiguousarray(before[:70, :80])).all()


@pytest.mark.parametrize(("fill", "exact"), [(0.0, True), (0.5, True), (0.3, False)])
async def test_unwritten_values_keep_the_fill_value(fill: float, exact: bool) -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    tx = store.transaction()
    a = await tx.create_array("a", (100,), "f4", (64,), codecs="e4m3", fill_value=fill, sparse=True)
    await a[70].write(1.0)
    if exact:
        await tx.commit()
        expected = np.full(100, fill, "f4")
        expected[70] = 1
        assert (await stored(store) == expected).all()
        return
    with pytest.raises(InvalidArgument, match=r"chunk \(1,\): .* 35 other values"):
        await tx.commit()


async def test_parts_that_cover_a_whole_chunk_need_no_old_values() -> None:
    store = await made(small((128,)), (128,), "e4m3")
    async with store.transaction() as tx:
        a = await tx.array("a")
        await a[:64].write(1e4)
        await a[64:].write(2e4)
    assert (np.abs(await stored(store) / np.repeat([1e4, 2e4], 64) - 1) < 0.07).all()


SCALES = ["search", "max", "float", "e4m3", "6bit"]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shards", [False, True])
async def test_parts_of_groups_with_scales_are_written(scale: str, shards: bool) -> None:
    """Writing the values that are there, smaller ones, or whole groups within the range of a unit, succeeds."""
    inner = [{"name": "exmy", "configuration": {"format": "e2m1", "block": 16, "scale": scale}}]
    sharded = [
        {
            "name": "sharding_indexed",
            "configuration": {"chunk_shape": [8, 32], "codecs": inner, "index_codecs": ["bytes", "crc32c"]},
        }
    ]
    values = small((40, 128)) * np.exp(np.random.default_rng(1).standard_normal((40, 1))).astype("f4")
    store = await made(values, (16, 64), sharded if shards else inner)
    before = await stored(store)
    part, groups = np.s_[3:9, 10:50], np.s_[20:30, 16:48]
    factor = 0.7 if scale in ("e4m3", "6bit") else 3  # the others have no unit
    for index, new in ((part, before[part]), (part, before[part] / 4), (groups, before[groups] * factor)):
        async with store.transaction() as tx:
            await (await tx.array("a"))[index].write(new)
        after = await stored(store)
        other = np.ones(before.shape, bool)
        other[index] = False
        assert same_bits(before, after)[other].all()
        assert np.abs(after[index] - new).max() <= np.abs(new).max() / 4
        before = after
    async with store.transaction() as tx:
        await (await tx.array("a")).append(before[:5])
    async with store.transaction() as tx:
        await (await tx.array("a")).resize((43, 100))
    assert same_bits(np.ascontiguousarray(before[:, :100]), (await stored(store))[:40]).all()
    assert (await store.verify()).ok


@pytest.mark.parametrize("scale", SCALES)
async def test_large_values_in_whole_groups_clip_in_no_case(scale: str) -> None:
    """Groups that share a unit with others may be refused; none is stored with a clipped value."""
    store = await made(small((8, 64)), (8, 64), {"format": "e2m1", "block": 16, "scale": scale})
    before = await stored(store)
    tx = store.transaction()
    await (await tx.array("a"))[2, 16:32].write(1.0)
    if scale in ("e4m3", "6bit"):
        with pytest.raises(InvalidArgument, match="write the whole chunk"):
            await tx.commit()
        return
    await tx.commit()
    before[2, 16:32] = 1.0
    assert np.abs(await stored(store) - before).max() < 0.1


@given(
    st.sampled_from(["e4m3", "e2m1", "e3m0", "e0m7", "e5m10"]),
    st.sampled_from([{}, *({"block": 32, "scale": scale} for scale in SCALES), {"axis": 0, "scale": "6bit"}]),
    st.lists(st.tuples(st.integers(0, 63), st.integers(1, 20), st.integers(-6, 6)), min_size=1, max_size=6),
)
def test_a_partial_write_changes_no_other_value(
    name: str, more: dict[str, Any], writes: list[tuple[int, int, int]]
) -> None:
    store = blocking.open(f"memory://{uuid.uuid4()}")
    with store.transaction() as tx:
        tx.create_array("a", (64,), "f4", (64,), codecs={"format": name, **more}).write(small((64,)) * 1e3)
    for start, length, scale in writes:
        before = store.snapshot().array("a").read()
        tx = store.transaction()
        tx.array("a")[start : start + length].write(np.float32(10.0**scale))
        try:
            tx.commit()
        except InvalidArgument:
            named = np.zeros(64, bool)
        else:
            named = np.isin(np.arange(64), range(start, start + length))
        after = store.snapshot().array("a").read()
        assert same_bits(before, after)[~named].all()
