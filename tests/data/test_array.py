"""Arrays read and write like NumPy's, for any dtype, shape and chunks."""

from __future__ import annotations

import asyncio
import math
import re
import uuid
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tstore
from tests.support.fuzzing import bounded_time
from tstore.errors import Corrupt, InvalidArgument, NotFound, UnsupportedFormat

NUMPY = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
NUMPY += ["float16", "float32", "float64", "complex64", "complex128"]
CUSTOM = ["bfloat16"] + [n for n in dir(ml_dtypes) if n.startswith("float8_")]
CUSTOM += ["float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "int4", "uint4", "int2", "uint2"]


def sample(shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    kind = np.dtype(dtype if dtype not in CUSTOM else getattr(ml_dtypes, dtype))
    raw = np.random.default_rng(1).integers(0, 256, math.prod(shape) * kind.itemsize, "u1")
    return (raw & 1 if kind.kind == "b" else raw).view(kind).reshape(shape)


def same(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


async def store() -> tstore.Store:
    return await tstore.open(f"memory://{uuid.uuid4()}")


async def stored(values: npt.ArrayLike, chunks: Any, dtype: Any = None, **options: Any) -> tstore.Array:
    """Commit an array with these values, and return it from a snapshot."""
    opened = await store()
    shape = np.shape(values)
    async with opened.transaction() as tx:
        array = await tx.create_array("a", shape, dtype or np.asarray(values).dtype, chunks, **options)
        await array.write(values)
    return await (await opened.snapshot()).array("a")


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Any, Any]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    chunks = tuple(draw(st.integers(1, 10)) for _ in shape)
    first = draw(hnp.basic_indices(shape, allow_newaxis=False))
    second = draw(hnp.basic_indices(np.empty(shape)[first].shape, allow_newaxis=False))
    return shape, chunks, first, second


CODECS = st.sampled_from([None, [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 0}}]])


@given(cases(), CODECS)
def test_indexing_and_reading_equal_numpy(case: Any, codecs: Any) -> None:
    async def check() -> None:
        shape, chunks, first, second = case
        values = np.arange(math.prod(shape), dtype="u1").reshape(shape)
        array = await stored(values, chunks, codecs=codecs)
        for view, expected in [(array[first], values[first]), (array[first][second], values[first][second])]:
            expected = np.asarray(expected)
            assert (view.shape, view.ndim, view.size) == (expected.shape, expected.ndim, expected.size)
            assert same(await view.read(), expected)
            out = np.zeros((*expected.shape, 2), "u1")[..., 1]  # not contiguous
            assert await view.read(out=out) is out
            assert (out == expected).all()

    asyncio.run(check())


@given(cases(), CODECS, st.data())
def test_indexing_and_writing_equal_numpy(case: Any, codecs: Any, data: st.DataObject) -> None:
    async def check() -> None:
        shape, chunks, first, second = case
        model = np.zeros(shape, "i4")
        opened = await store()
        async with opened.transaction() as tx:
            array = await tx.create_array("a", shape, "i4", chunks, sparse=True, codecs=codecs)
            for number, index in enumerate([first, second, first, ...], 1):
                try:
                    region = model[index]
                except IndexError:
                    continue
                given_values = np.arange(np.size(region)).reshape(np.shape(region)) * 10 + number
                if data.draw(st.booleans()):
                    given_values = np.asarray(number)
                model[index] = given_values
                await array[index].write(given_values)
                if data.draw(st.booleans()):
                    assert same(await array.read(), model)
                if index is second:
                    break
        assert same(await (await (await opened.snapshot()).array("a")).read(), model)
        async with opened.transaction() as tx:
            view = (await tx.array("a"))[first][second]
            await view.write(-1)
            target = model[first]
            if isinstance(target, np.ndarray):
                target[second] = -1
            else:
                model[first] = -1
        assert same(await (await (await opened.snapshot()).array("a")).read(), model)

    asyncio.run(check())


@pytest.mark.parametrize("name", NUMPY + CUSTOM)
async def test_every_dtype_keeps_every_bit(name: str) -> None:
    for shape in ((), (0,), (0, 3), (7,), (6, 9), (3, 4, 5)):
        values = sample(shape, name)
        for chunks in (tuple(max(1, n // 2) for n in shape), tuple(n + 1 for n in shape), None):
            array = await stored(values, chunks)
            assert array.dtype == values.dtype
            assert same(await array.read(), values)
            assert same(await array[...].read(), values)


@pytest.mark.parametrize("name", [n for n in NUMPY if np.dtype(n).itemsize > 1])
async def test_big_endian_input_is_stored_natively(name: str) -> None:
    values = sample((5, 6), name)
    swapped = values.astype(values.dtype.newbyteorder(">"))
    assert same(await (await stored(swapped, (2, 6), swapped.dtype)).read(), values)
    array = await stored(swapped, (2, 4), values.dtype)
    assert same(await array.read(), values)


def layouts(values: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    read_only = values.copy()
    read_only.flags.writeable = False
    return {
        "fortran": np.asfortranarray(values),
        "a part": np.pad(values, 2)[2:-2, 2:-2],
        "turned": values[::-1, ::-1].copy()[::-1, ::-1],
        "steps": np.repeat(values, 3, 1)[:, ::3],
        "transposed": values.T.copy().T,
        "read-only": read_only,
        "unaligned": np.frombuffer(b"x" + values.tobytes(), np.uint8)[1:].view(values.dtype).reshape(values.shape),
    }


@pytest.mark.parametrize("layout", layouts(np.zeros((2, 2))))
@pytest.mark.parametrize("chunks", [(12, 20), (4, 5), (5, 7), (1, 20), (12, 1), (40, 40)], ids=str)
async def test_input_of_any_layout(layout: str, chunks: tuple[int, int]) -> None:
    values = sample((12, 20), "float32")
    given_values = layouts(values)[layout]
    assert same(np.ascontiguousarray(given_values), values)
    array = await stored(given_values, chunks)
    assert same(await array.read(), values)
    assert same(await array[3:11, 2:17:3].read(), values[3:11, 2:17:3])


async def test_input_is_broadcast() -> None:
    opened = await store()
    async with opened.transaction() as tx:
        array = await tx.create_array("a", (4, 6), "float32", (3, 4))
        for values in (3, 2.5, [1, 2, 3, 4, 5, 6], np.arange(4.0, dtype="f4")[:, None], np.float32(7), True):
            await array.write(values)
            assert (await array.read() == np.broadcast_to(values, (4, 6))).all()
        for wrong in (np.zeros(4), np.zeros((1, 4, 6)), np.zeros((6, 4)), np.zeros(0)):
            with pytest.raises(InvalidArgument, match="shape"):
                await array.write(wrong)


async def test_the_caller_may_change_its_array_after_a_write() -> None:
    opened = await store()
    values = np.arange(24.0).reshape(4, 6)
    async with opened.transaction() as tx:
        array = await tx.create_array("a", (4, 6), "float64", (2, 4))
        for region in (np.s_[:, :], np.s_[1:3, 1:5]):
            mine = values[region].copy()
            await array[region].write(mine)
            mine[...] = -1
    assert (await (await (await opened.snapshot()).array("a")).read() == values).all()


CASTS = [
    ("float32", np.arange(4.0), True),
    ("float32", np.arange(4), True),
    ("float64", np.arange(4, dtype="f4"), True),
    ("bfloat16", np.arange(4, dtype="f4"), True),
    ("bfloat16", 1.5, True),
    ("bfloat16", 3, True),
    ("float8_e4m3fn", 1.5, True),
    ("complex64", np.arange(4.0), True),
    ("complex64", 2 - 1j, True),
    ("int32", np.arange(4), True),
    ("int64", np.arange(4, dtype="u4"), True),
    ("int16", True, True),
    ("uint8", 255, True),
    ("float32", 1j, False),
    ("float32", np.array([1j] * 4), False),
    ("int8", 100, True),
    ("int8", 300, False),
    ("uint8", 256, False),
    ("uint8", -1, False),
    ("int8", 1.0, False),
    ("int8", np.arange(4.0), False),
    ("uint8", np.arange(4), False),
    ("int16", np.arange(4), True),
    ("int16", np.array([70000] * 4), False),
    ("int16", np.int64(70000), False),
    ("int64", np.array([2**63] * 4, "u8"), False),
    ("uint8", [1, 0, 255, 7], True),
    ("int32", [2**31 - 1] * 4, True),
    ("int32", [2**40] * 4, False),
    ("int64", [2**63] * 4, False),
    ("uint64", [-1] * 4, False),
    ("int8", [1.0] * 4, False),
    ("bool", 1, False),
    ("bool", np.arange(4), False),
    ("float32", "text", False),
    ("float32", np.array(["a"] * 4), False),
    ("float32", None, False),
]


@pytest.mark.parametrize(("dtype", "values", "fits"), CASTS, ids=str)
@pytest.mark.parametrize("region", [np.s_[:], np.s_[1:3], np.s_[2]], ids=str)
async def test_casts_within_a_kind(dtype: str, values: Any, fits: bool, region: Any) -> None:
    opened = await store()
    async with opened.transaction() as tx:
        array = await tx.create_array("a", (4,), dtype, (2,))
        await array.write(np.zeros(4, array.dtype))
        part = values[region] if isinstance(values, np.ndarray | list) else values
        if not fits:
            with pytest.raises(InvalidArgument, match="a: NumPy's rule 'same_kind' does not allow casting"):
                await array[region].write(part)
            return
        await array[region].write(part)
    expected = np.zeros(4, array.dtype)
    expected[region] = part
    assert same(await (await (await opened.snapshot()).array("a")).read(), expected)


@pytest.mark.parametrize("values", [[1e9, 1.0], 1e9, [[1e300], [2.0]]], ids=str)
async def test_numbers_beyond_the_range_of_floats_become_infinity_with_a_warning(values: Any) -> None:
    async with (await store()).transaction() as tx:
        array = await tx.create_array("a", (2, 2), "float16", (1, 2))
        with pytest.warns(RuntimeWarning, match="a: some values are beyond the range of float16") as caught:
            await array.write(values)
        assert [warning.filename for warning in caught] == [__file__]
        expected = np.zeros((2, 2), "f2")
        with np.errstate(over="ignore"):
            expected[...] = values
        assert same(await array.read(), expected)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "int64"])
@pytest.mark.parametrize("shape", [(), (4,), (3, 2)], ids=str)
async def test_tensors_of_pytorch_are_written(name: str, shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape).to(getattr(torch, name))
    async with (await store()).transaction() as tx:
        array = await tx.create_array("a", shape, name, shape)
        await array.write(tensor.requires_grad_() if name == "float32" else tensor)
        read = (await array.read()).astype("f8")
        assert read.shape == shape
        assert read.reshape(-1).tolist() == list(range(math.prod(shape)))
        with pytest.raises(InvalidArgument, match=r"a: a tensor of torch.float32 on meta can't be converted"):
            await array.write(torch.zeros(shape, device="meta"))


async def test_a_lazily_conjugated_tensor_is_written() -> None:
    torch = pytest.importorskip("torch")
    async with (await store()).transaction() as tx:
        array = await tx.create_array("a", (2,), "complex64")
        await array.write(torch.tensor([1 + 2j, 3j]).conj())
        assert (await array.read()).tolist() == [1 - 2j, -3j]


@pytest.mark.parametrize(
    "codecs",
    [["zstd"], [{"name": "gzip"}], ["bytes", "blosc"], ["blosc"], [{"name": "blosc", "configuration": {}}]],
)
@pytest.mark.parametrize("dtype", ["int8", "int32"])
async def test_codecs_have_the_defaults_of_zarr_and_bytes_may_be_left_out(codecs: Any, dtype: str) -> None:
    values = np.arange(100, dtype=dtype).reshape(10, 10)
    array = await stored(values, (3, 10), codecs=codecs)
    assert same(await array.read(), values)
    assert array.codecs[0]["name"] == "bytes"
    if "blosc" in str(codecs):
        memory = zarr.storage.MemoryStore()
        other = zarr.create_array(memory, data=values, chunks=(3, 10), compressors=zarr.codecs.BloscCodec())
        assert array.codecs[1] == other.metadata.to_dict()["codecs"][1]


@pytest.mark.parametrize(
    ("codec", "match"),
    [
        ({"name": "blosc", "configuration": {"cname": "rar"}}, "expected 'cname' to be one of blosclz, lz4"),
        ({"name": "blosc", "configuration": {"shuffle": 1}}, "expected 'shuffle' to be one of noshuffle"),
        (
            {"name": "zstd", "configuration": {"level": "3"}},
            "expected 'level' to be an integer from -131072 to 22",
        ),
        ({"name": "gzip", "configuration": {"lvl": 1}}, "it has no setting 'lvl'"),
        ({"name": "gzip", "level": 1}, "its settings, such as 'level', belong in its 'configuration'"),
    ],
)
async def test_a_wrong_setting_of_a_codec_is_named(codec: Any, match: str) -> None:
    async with (await store()).transaction() as tx:
        with pytest.raises((InvalidArgument, UnsupportedFormat), match=match):
            await tx.create_array("a", (4,), "f4", (2,), codecs=["bytes", codec])


async def test_none_is_no_dtype() -> None:
    """NumPy takes it for float64."""
    async with (await store()).transaction() as tx:
        with pytest.raises(InvalidArgument, match="pass the shape and the dtype of the new array"):
            await tx.create_array("a", (4,), None)


@pytest.mark.parametrize("dtype", ["uint8", "int4", "bool", "M8[s]", "S3", "string"])
async def test_an_empty_list_has_the_dtype_of_the_array(dtype: str) -> None:
    async with (await store()).transaction() as tx:
        array = await tx.create_array("a", (4,), dtype, (2,), sparse=True)
        await array[4:].write([])
        await array.append([])
        assert (await array.read()).shape == (4,)


@pytest.mark.parametrize("step", [10**20, -(10**20), 2**63 - 1, -(2**63)])
async def test_a_step_beyond_every_axis_selects_one_value(step: int) -> None:
    values = np.arange(24, dtype="f4").reshape(4, 6)
    array = await stored(values, (2, 4))
    assert same(await array[::step, 1].read(), values[::step, 1])
    assert same(await array[1:][::step][:, ::step].read(), values[1:][::step][:, ::step])


async def test_out_must_fit() -> None:
    array = await stored(np.arange(6, dtype="i4").reshape(2, 3), (1, 2))
    read_only = np.zeros((2, 3), "i4")
    read_only.flags.writeable = False
    outs: list[Any] = [
        np.zeros((3, 2), "i4"),
        np.zeros((2, 3), "i2"),
        np.zeros((2, 3), "f4"),
        np.zeros(6, "i4"),
        read_only,
        np.lib.stride_tricks.as_strided(np.zeros(4, "i4"), (2, 3), (4, 4)),
        [[0, 0, 0], [0, 0, 0]],
        {1: "x"},
    ]
    for out in outs:
        with pytest.raises(InvalidArgument, match="out must be"):
            await array.read(out=out)
    for dtype in (">i4", "i8", "f8", "c16"):  # NumPy casts to these safely
        out = np.zeros((2, 6), dtype)[::-1, ::-2]
        assert await array.read(out=out) is out
        assert (out == [[0, 1, 2], [3, 4, 5]]).all()


class Halved(np.ndarray[Any, Any]):
    """An array whose index means something else, as it may in a subclass."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) / 2

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value / 2)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("index", [..., (slice(None, None, -1), [2, 0, 0]), np.s_[1:, None, :1]])
async def test_out_of_a_subclass_gets_the_values(index: Any) -> None:
    values = np.arange(6, dtype="i4").reshape(2, 3)
    array = (await stored(values, (1, 2)))[index]
    for kind in (np.matrix, Halved, np.memmap):
        if kind is np.matrix and array.ndim > 2:
            continue
        out = np.zeros(array.shape, "i4").view(kind)
        assert await array.read(out=out) is out
        assert np.asarray(out).tolist() == values[index].tolist()
    with pytest.raises(InvalidArgument, match="without a mask, not a MaskedArray"):
        await array.read(out=np.ma.zeros(array.shape, "i4"))


async def test_unwritten_chunks_are_an_error_unless_sparse() -> None:
    opened = await store()
    async with opened.transaction() as tx:
        dense = await tx.create_array("dense", (6, 6), "float32", (2, 3), fill_value=9)
        sparse = await tx.create_array("sparse", (6, 6), "float32", (2, 3), fill_value=math.nan, sparse=True)
        for array in (dense, sparse):
            await array[0, 0].write(1)
    snapshot = await opened.snapshot()
    dense, sparse = await snapshot.array("dense"), await snapshot.array("sparse")
    assert (await dense[0:2, 0:3].read()).tolist() == [[1, 9, 9], [9, 9, 9]]
    with pytest.raises(NotFound, match=r"chunk \(0, 1\) of dense was never written"):
        await dense.read()
    values = await sparse.read()
    assert values[0, 0] == 1
    assert np.isnan(values).sum() == 35
    assert np.isnan(await sparse[5, ::-2].read()).all()
    assert (await opened.verify()).ok


async def test_scattered_chunks_are_read_in_time_linear_in_their_number() -> None:
    opened, shape = await store(), (120, 140)
    model = np.zeros(shape, "i2")
    async with opened.transaction() as tx:
        array = await tx.create_array("a", shape, "i2", (1, 1), sparse=True)
        for number in range(0, 120, 7):
            model[number, number // 2 : 130 : 3] = number + 1
            await array[number, number // 2 : 130 : 3].write(number + 1)
    array = await (await opened.snapshot()).array("a")
    with bounded_time(5):
        assert same(await array.read(), model)
        assert same(await array[3:119, 2:137].read(), model[3:119, 2:137])
    async with opened.transaction() as tx:
        long = await tx.create_array("long", (1 << 14,), "u1", (1,), sparse=True)
        await long[5].write(1)
    with bounded_time(5):
        assert (await (await (await opened.snapshot()).array("long")).read()).nonzero()[0].tolist() == [5]


@pytest.mark.parametrize("index", [np.s_[:], np.s_[::4], np.s_[5::-7]], ids=str)
async def test_many_chunks_that_were_never_written_cost_little(index: Any) -> None:
    opened, count = await store(), 1 << 17
    model = np.full(count, 7, "u2")
    model[400_00:400_09] = 1
    async with opened.transaction() as tx:
        array = await tx.create_array("a", (count,), "u2", (4,), sparse=True, fill_value=7)
        await array[400_00:400_09].write(1)
    array = await (await opened.snapshot()).array("a")
    with bounded_time(2):
        assert same(await array[index].read(), model[index])
    with bounded_time(2):
        assert len((await array[index].explain()).chunks) == len(
            set(np.arange(count)[index] // 4) & {10_000, 10_001, 10_002}
        )


async def test_the_properties_of_an_array() -> None:
    array = await stored(
        np.zeros((4, 6), "f4"), (2, 3), attributes={"unit": "m"}, dimension_names=("x", None), fill_value=-1
    )
    assert (array.path, array.shape, array.dtype, array.chunks) == ("a", (4, 6), np.dtype("f4"), (2, 3))
    assert (array.attributes, array.dimension_names, array.fill_value) == ({"unit": "m"}, ("x", None), -1)
    assert (array.ndim, array.size, array.nbytes) == (2, 24, 96)
    assert array[1].nbytes == 24
    assert array.codecs == [{"name": "bytes", "configuration": {"endian": "little"}}]
    array.attributes["unit"] = "changed"
    assert array.attributes == {"unit": "m"}
    assert "a" in repr(array)


async def test_only_a_whole_array_can_be_resized() -> None:
    opened = await store()
    async with opened.transaction() as tx:
        array = await tx.create_array("a", (4, 6), "int8", (2, 3))
        await array.write(1)
        with pytest.raises(InvalidArgument, match="whole"):
            await array[0].resize((5,))
        for shape in ((4,), (-1, 4), "ab", (4, 6, 1)):
            with pytest.raises(InvalidArgument):
                await array.resize(shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "codecs", [None, "e4m3", [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 0}}]], ids=str
)
async def test_long_chunks_are_read_in_part(codecs: Any) -> None:
    values = (np.arange(700 * 1000) % 240).reshape(700, 1000).astype("f4")  # 2.8 MB in one chunk
    codecs = (
        [{"name": "bytes", "configuration": {"endian": "little"}}, codecs[1]]
        if isinstance(codecs, list)
        else codecs
    )
    array = await stored(values, (700, 1000), codecs=codecs)
    whole = await array.read()
    if codecs != "e4m3":
        assert same(whole, values)
    for index in (
        np.s_[0, 0],
        np.s_[-1, -1],
        np.s_[262:263],
        np.s_[10:600:97, ::3],
        np.s_[::-1, 5],
        np.s_[300, 100:900],
    ):
        assert same(await array[index].read(), np.asarray(whole[index]))


async def test_a_wide_chunk_does_not_hang() -> None:
    """Its encoded and decoded bytes exceed the byte budget, and one thread needs both."""
    zstd = [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 0}}]
    opened = await store()
    values = np.frombuffer(np.random.default_rng(0).bytes(140 << 20), "u1").reshape(2, -1)
    async with opened.transaction() as tx:
        array = await tx.create_array("a", values.shape, "u1", (2, values.shape[1] + 1), codecs=zstd)
        await asyncio.wait_for(array.write(values), 60)
    read = await asyncio.wait_for((await (await opened.snapshot()).array("a"))[1, ::1000].read(), 60)
    assert (read == values[1, ::1000]).all()


async def test_a_flipped_bit_in_any_chunk_of_a_misaligned_box_is_named(tmp_path: Path) -> None:
    values = np.arange(12 * 12 * 12, dtype=np.uint32).reshape(12, 12, 12)
    store = await tstore.open(tmp_path)
    async with store.transaction() as tx:
        await (await tx.create_array("a", values.shape, "u4", (4, 4, 4))).write(values)
    snapshot = await store.snapshot()
    array = await snapshot.array("a")
    [pack] = tmp_path.rglob("pack-*")
    intact = pack.read_bytes()
    for box in ((slice(1, 9), slice(2, 7), slice(3, 11)), (slice(3, 5), slice(12), slice(1, 2))):
        assert (await array[box].read() == values[box]).all()
        for number in (await array[box].explain()).chunks:
            at = tuple(map(int, np.unravel_index(number, (3, 3, 3))))
            first = intact.index(values[tuple(slice(4 * i, 4 * i + 1) for i in at)].tobytes())
            pack.write_bytes(intact[:first] + bytes([intact[first] ^ 1]) + intact[first + 1 :])
            with pytest.raises(Corrupt, match=re.escape(f"a, chunk {at}: checksum mismatch")):
                await array[box].read()
            assert snapshot.read_in_this_thread(array[box]) is None
        pack.write_bytes(intact)


async def test_silent_data_loss_is_refused() -> None:
    masked = np.ma.masked_array(np.arange(4.0), mask=[0, 1, 0, 0])
    store = await tstore.open("memory://refused")
    async with store.transaction() as tx:
        array = await tx.create_array("a", (4,), "float64", (2,))
        await array.write(0)
        with pytest.raises(tstore.errors.InvalidArgument, match="mask"):
            await array.write(masked)
        with pytest.raises(TypeError, match="iterable"):
            list(array)  # type: ignore[call-overload]
        for name in ("float4_e2m1fn", "float6_e3m2fn", "float6_e2m3fn"):
            small = await tx.create_array(name, (4,), name)
            for number in (np.nan, np.inf):
                with pytest.raises(tstore.errors.InvalidArgument, match=f"NaN or infinity, which .* {name} lacks"):
                    await small.write(np.array([1, 2, number, 1], "f4"))
            await small.write(np.array([1, 2, 3, 1], "f4"))
        with pytest.raises(tstore.errors.InvalidArgument, match="nan"):
            await tx.create_array("b", (3,), "float32", (2,), codecs="e4m3", fill_value=np.nan)
    with pytest.raises(tstore.errors.InvalidArgument, match="m: a masked"):
        await tstore.save("memory://refused", {"m": masked}, 0)
