"""Arrays of strings and bytes of variable length."""

from __future__ import annotations

import asyncio
import math
import pickle
import uuid
import zlib
from typing import Any

import numcodecs
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tstore
from tests.support.indices import draw_view
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.variable import MAX_ENCODED
from tstore.errors import Corrupt, InvalidArgument, UnsupportedFormat

STRING = np.dtypes.StringDType()
SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)
VARIABLE = st.sampled_from(["string", "variable_length_bytes"])


def shards(inner: list[int], codec: str) -> list[dict[str, Any]]:
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    settings = {"chunk_shape": inner, "codecs": [{"name": codec}], "index_codecs": index, "index_location": "end"}
    return [{"name": "sharding_indexed", "configuration": settings}]


async def new_store() -> tstore.Store:
    return await tstore.open(f"memory://{uuid.uuid4()}")


def as_dtype(numbers: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Return a value for each number: of up to three characters, some of them not ASCII, or bytes with zeros."""
    values = np.empty(numbers.shape, object)
    for at, n in np.ndenumerate(numbers):
        values[at] = (
            "é😀\0x"[n % 4] * (n % 3) + "ab" * (n % 2) if dtype == "string" else bytes([n % 256, 0]) * (n % 3)
        )
    return values.astype(STRING) if dtype == "string" else values


def taken(values: npt.NDArray[Any], numbers: Any) -> npt.NDArray[Any]:
    """Return the elements with these numbers, as an array even if there is one only."""
    return values.reshape(-1)[numbers.reshape(-1)].reshape(numbers.shape)


def equal(mine: npt.NDArray[Any], expected: npt.NDArray[Any]) -> bool:
    return (mine.dtype, mine.shape) == (expected.dtype, expected.shape) and mine.tolist() == expected.tolist()


@given(SHAPES, VARIABLE, st.booleans(), st.data())
def test_views_are_read_and_written_as_in_numpy(
    shape: Any, dtype: str, compressed: bool, data: st.DataObject
) -> None:
    """Writes of two transactions, through views of views, and reads of others."""

    async def check() -> None:
        chunks = tuple(data.draw(st.integers(1, 7)) for _ in shape)
        numbers = np.arange(math.prod(shape)).reshape(shape)
        store, model = await new_store(), as_dtype(np.zeros(shape, int), dtype)
        for turn in range(2):
            async with store.transaction() as tx:
                if turn:
                    array = await tx.array("a")
                else:
                    codecs = "lossless" if compressed else None
                    array = await tx.create_array("a", shape, dtype, chunks, codecs, sparse=True)
                view, selected = draw_view(data, array, numbers)
                values = as_dtype(np.arange(selected.size).reshape(selected.shape) + 7 + turn, dtype)
                await view.write(values)
                for at, value in zip(selected.reshape(-1).tolist(), values.reshape(-1), strict=True):
                    model.reshape(-1)[at : at + 1] = value
                view, selected = draw_view(data, array, numbers)
                assert equal(await view.read(), taken(model, selected))
        array = await (await store.snapshot()).array("a")
        view, selected = draw_view(data, array, numbers)
        out = np.empty(selected.shape[::-1], object).T
        assert await view.read(out=out) is out
        assert out.tolist() == taken(model, selected).tolist()

    asyncio.run(check())


@pytest.mark.parametrize("codecs", [None, "lossless", "shards"])
@pytest.mark.parametrize("dtype", ["string", "variable_length_bytes"])
async def test_an_array_is_resized_appended_to_and_copied(dtype: str, codecs: Any) -> None:
    chain = shards([2], "vlen-utf8" if dtype == "string" else "vlen-bytes") if codecs == "shards" else codecs
    values = as_dtype(np.arange(40), dtype)
    store = await new_store()
    async with store.transaction() as tx:
        array = await tx.create_array("a", (10,), dtype, (4,), chain, values[17], sparse=True)
        await array.write(values[:10])
    async with store.transaction() as tx:
        await (await tx.array("a")).append(values[10:23])
    async with store.transaction() as tx:
        await (await tx.array("a")).resize((21,))
        await (await tx.array("a")).resize((24,))
        await tx.copy_array(await tx.array("a"), "b", chunks=(6,), codecs=None)
    snapshot = pickle.loads(pickle.dumps(await store.snapshot()))
    expected = values[:24].copy()
    expected[21:] = values[17]
    for path in ("a", "b"):
        assert equal(await (await snapshot.array(path)).read(), expected), path
    assert (await store.verify()).ok


async def test_values_that_are_selected_several_times() -> None:
    store = await new_store()
    async with store.transaction() as tx:
        array = await tx.create_array("a", (2,), "string", (2,))
        await array.write(["a", "b"])
        assert (await array[1, None][np.zeros(4, int)].read()).tolist() == ["b"] * 4


@pytest.mark.parametrize("name", ["string", str, STRING, "variable_length_bytes", bytes, np.dtype(object)])
async def test_dtypes_and_fill_values(name: Any) -> None:
    store = await new_store()
    async with store.transaction() as tx:
        array = await tx.create_array("a", (2,), name)
        fill: Any = "é" if array.dtype == STRING else b"\0\xff"
        await tx.create_array("b", (2,), array.dtype, fill_value=fill, sparse=True)
        assert array.fill_value == type(fill)()
    assert (await (await (await store.snapshot()).array("b")).read()).tolist() == [fill, fill]


@pytest.mark.parametrize(
    ("dtype", "values", "reason"),
    [
        ("string", 1, "got 1"),
        ("string", ["a", None], r"got None at \[1\]"),
        ("string", [["a", "b"], ["c", 1.5]], r"got 1.5 at \[1, 1\]"),
        ("string", [b"a", b"b"], "got b'a'"),
        ("string", np.zeros(2), "float64"),
        ("string", ["\ud800", ""], "surrogates"),
        ("string", np.array(["a", None], np.dtypes.StringDType(na_object=None)), "got None"),
        ("variable_length_bytes", ["a", "b"], "got 'a'"),
        ("variable_length_bytes", [b"a", bytearray(b"b")], "bytearray"),
        ("variable_length_bytes", np.zeros(2, "V4"), "dtype"),
    ],
)
async def test_other_values_are_refused(dtype: str, values: Any, reason: str) -> None:
    async with (await new_store()).transaction() as tx:
        array = await tx.create_array("a", (2, 2), dtype, sparse=True)
        with pytest.raises(InvalidArgument, match=reason):
            await array.write(values)
        with pytest.raises(InvalidArgument, match=reason):
            await array.write(values, casting="unsafe")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"dtype": "string", "codecs": ["bytes"]}, "vlen-utf8"),
        ({"dtype": "string", "codecs": ["vlen-bytes"]}, "vlen-utf8"),
        ({"dtype": "string", "codecs": "e4m3"}, "vlen-utf8"),
        ({"dtype": bytes, "codecs": ["vlen-utf8", "zstd"]}, "vlen-bytes"),
        ({"dtype": "float32", "codecs": ["vlen-utf8"]}, "variable length"),
        ({"dtype": "string", "fill_value": 1}, "fill_value=1"),
        ({"dtype": bytes, "fill_value": ""}, "fill_value=''"),
        ({"dtype": "string", "fill_value": "\ud800"}, "surrogates"),
        ({"dtype": np.dtypes.StringDType(na_object=None)}, "na_object"),
        ({"dtype": "string", "chunks": (1 << 30,)}, "smaller|too large"),
    ],
)
async def test_arrays_that_can_not_be_stored(arguments: dict[str, Any], reason: str) -> None:
    async with (await new_store()).transaction() as tx:
        with pytest.raises((InvalidArgument, UnsupportedFormat), match=reason):
            await tx.create_array("a", (1 << 31,), **arguments)


@pytest.mark.parametrize("dtype", [STRING, object])
async def test_a_checkpoint_has_values_of_fixed_length(dtype: Any, tmp_path: Any) -> None:
    with pytest.raises(InvalidArgument, match="fixed length"):
        await tstore.save(str(tmp_path), {"x": np.array(["a"], dtype)}, 0)


def little(number: int) -> bytes:
    return number.to_bytes(4, "little")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        little(2),
        little(3) + little(0) * 3,
        little((1 << 32) - 1) + little(0) * 2,
        little(2) + little(0) + little(5) + b"abc",
        little(2) + little((1 << 32) - 1) + little(0) + b"abc",
        little(2) + little(0) + little(2) + b"\xff\xfe",
    ],
)
def test_chunks_that_do_not_decode(data: bytes) -> None:
    meta = ArrayMeta.new((2,), "string", (2,))
    with pytest.raises(Corrupt):
        meta.chain.decode(memoryview(data), np.empty(2, STRING))


@pytest.mark.parametrize("size", [MAX_ENCODED + 1, 1 << 40])
def test_a_bomb_is_refused_before_it_is_decoded(size: int) -> None:
    """Frames of zstd and blosc declare their size; gzip declares none, and is decoded up to the limit."""
    frame = b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + b"\x03\x00\x00" * 4000
    meta = ArrayMeta.new((2,), "string", (2,), ["vlen-utf8", "zstd"])  # type: ignore[list-item]
    with pytest.raises(Corrupt, match="declares"):
        meta.chain.decode(memoryview(frame), np.empty(2, STRING))


def test_a_gzip_bomb_is_refused() -> None:
    member = zlib.compressobj(1, wbits=31)
    bomb = b"".join([member.compress(bytes(1 << 20)) for _ in range(300)]) + member.flush()
    meta = ArrayMeta.new((2,), "string", (2,), ["vlen-utf8", "gzip"])  # type: ignore[list-item]
    with pytest.raises(Corrupt, match="at most"):
        meta.chain.decode(memoryview(bomb), np.empty(2, STRING))


async def test_a_chunk_that_is_too_long_is_refused() -> None:
    async with (await new_store()).transaction() as tx:
        array = await tx.create_array("a", (300,), "string", (300,))
        with pytest.raises(InvalidArgument, match="smaller chunks"):
            await array.write("x" * (1 << 20))


def test_the_bytes_are_those_of_numcodecs() -> None:
    for dtype, codec in (("string", numcodecs.VLenUTF8()), ("variable_length_bytes", numcodecs.VLenBytes())):
        values = as_dtype(np.arange(12).reshape(4, 3), dtype)
        meta = ArrayMeta.new((4, 3), dtype, (4, 3))
        encoded = bytes(meta.chain.encode(values, np.empty(0, np.uint8)))
        assert encoded == bytes(codec.encode(values.astype(object).reshape(-1)))
