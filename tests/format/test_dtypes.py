"""The data types and fill values of arrays, compared with zarr-python's."""

from __future__ import annotations

import json
import uuid
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from zarr.core.dtype import parse_dtype

import tstore
from tstore.core.format.arrays.array_metadata import ArrayMeta, dtype_named
from tstore.errors import Corrupt, InvalidArgument, UnsupportedFormat

NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", ">f4", ">i8"]
TIMES = ["M8[ns]", "M8[25s]", "m8[10us]", ">M8[s]", "M8[D]", "M8", "m8"]
TEXTS = ["U1", "U5", ">U7", "S1", "S7", "V1", "V9"]
STRUCTS: list[Any] = [
    [("a", "f4"), ("b", ">i2"), ("c", "S3")],
    [("a", [("x", "f4"), ("y", "u1")]), ("b", "c16")],
    [("a", "M8[s]"), ("b", "U3"), ("c", "V4"), ("d", "?")],
]
DTYPES = [*NUMBERS, *TIMES, *TEXTS, *STRUCTS]


def samples(dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """Return values with random bits."""
    rng = np.random.default_rng(count)
    if dtype.names is not None:
        assert dtype.fields is not None
        values = np.zeros(count, dtype)
        for name in dtype.names:
            values[name] = samples(dtype.fields[name][0], count)
        return values
    if dtype.kind == "U":
        lengths = rng.integers(0, dtype.itemsize // 4 + 1, count)
        return np.array(["".join(map(chr, rng.integers(32, 0x2FFF, n))) for n in lengths], dtype)
    data = rng.integers(0, 256, count * dtype.itemsize, np.uint8)
    return (data & 1 if dtype.kind == "b" else data).view(dtype)


def same_bytes(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    return a.shape == b.shape and a.astype(b.dtype).tobytes() == b.tobytes()


@pytest.mark.parametrize("name", DTYPES, ids=str)
def test_metadata_is_that_of_zarr(name: Any) -> None:
    meta = ArrayMeta.new((3,), name, (2,))
    document = json.loads(meta.document)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr-python warns of names that have no specification yet
        theirs: Any = parse_dtype(meta.dtype, zarr_format=3)
        assert document["data_type"] == json.loads(json.dumps(theirs.to_json(zarr_format=3)))
        for value in samples(meta.dtype, 5):
            if meta.dtype.kind in "fc" and not np.isfinite(value):
                continue  # a NaN has no bits in JSON
            ours = ArrayMeta.new((3,), name, (2,), fill_value=value)
            stored = json.loads(ours.document)["fill_value"]
            expected = json.loads(json.dumps(theirs.to_json_scalar(value, zarr_format=3)))
            assert stored == expected, value
            again = np.asarray(ArrayMeta.parse(ours.document).fill_value, meta.dtype)
            assert again.tobytes() == np.asarray(value, meta.dtype).tobytes()
            assert ArrayMeta.parse(ours.document).dtype == dtype_named(name)


@pytest.mark.parametrize("codecs", [None, "lossless"])
@pytest.mark.parametrize("name", DTYPES, ids=str)
async def test_values_of_every_dtype(name: Any, codecs: Any) -> None:
    for shape, chunks in (((), ()), ((7,), (3,)), ((20, 31), (16, 16))):
        values = samples(np.dtype(name), int(np.prod(shape))).reshape(shape)
        store = await tstore.open(f"memory://{uuid.uuid4()}")
        fill = samples(dtype_named(name), 1)[0]
        if values.dtype.kind in "fc":
            fill = 7
        async with store.transaction() as tx:
            whole = await tx.create_array("whole", shape, values.dtype, chunks, codecs)
            await whole.write(values)
            sparse = await tx.create_array(
                "sparse", shape, values.dtype, chunks, codecs, fill_value=fill, sparse=True
            )
            if shape:
                await sparse[1:2].write(values[1:2])
        snapshot = await store.snapshot()
        whole = await snapshot.array("whole")
        assert same_bytes(values, await whole.read())
        await store.verify()
        if shape:
            assert same_bytes(values[5:1:-2], await whole[5:1:-2].read())
            expected = np.full(shape, fill, dtype_named(name))
            expected[1:2] = values[1:2]
            assert same_bytes(expected, await (await snapshot.array("sparse")).read())


async def test_a_tree_of_texts_times_and_records(tmp_path: Any) -> None:
    tree = {f"leaf{i}": samples(np.dtype(name), 6) for i, name in enumerate([*TIMES, *TEXTS, *STRUCTS])}
    await tstore.save(str(tmp_path / "s"), tree, 0)
    for target in (None, tree):
        again = await tstore.restore(str(tmp_path / "s"), target=target)
        assert all(same_bytes(values, again[name]) for name, values in tree.items())


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("U3", "abc", "abc"),
        ("U3", np.array("abc", "U9"), "abc"),
        ("U3", "abcd", None),
        ("U3", 1.5, None),
        ("U3", b"abc", None),
        ("S3", b"ab", b"ab"),
        ("S3", b"abcd", None),
        ("V3", np.void(b"abc"), np.void(b"abc")),
        ("V3", np.void(b"abcd"), None),
        ("V3", np.void(b"ab"), None),
        ("V8", np.int64(1), None),
        ("M8[s]", np.datetime64("2020-01-01"), np.datetime64("2020-01-01")),
        ("M8[s]", 5, None),
        ([("a", "f4"), ("b", "U2")], (1.5, "xy"), (1.5, "xy")),
        ([("a", "f4"), ("b", "U2")], np.array((1, "x"), [("a", ">f4"), ("b", "U1")]), (1, "x")),
        ([("a", "f4"), ("b", "U2")], np.array((1, "x"), [("a", "f4"), ("b", "U3")]), None),
        ([("a", "f4"), ("b", "U2")], "x", None),
    ],
    ids=str,
)
async def test_no_write_cuts_values_off(name: Any, values: Any, expected: Any) -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        array = await tx.create_array("a", (5,), name, (2,))
        if expected is None:
            with pytest.raises(InvalidArgument, match="cast the values"):
                await array.write(values)
        await array.write(np.zeros((), name) if expected is None else values)
    read = await (await (await store.snapshot()).array("a")).read()
    if expected is not None:
        assert read.tolist() == np.full(5, np.array(expected, name)).tolist()


@pytest.mark.parametrize(
    ("name", "fill"),
    [
        ("U3", "abcd"),
        ("U3", b"abc"),
        ("S3", b"abcd"),
        ("S3", "abc"),
        ("V3", b"ab"),
        ("M8[s]", "yesterday"),
        ("M8[s]", 1.5),
        ([("a", "i4")], ("x",)),
        ([("a", "i4")], (1, 2)),
        ([("a", "i4")], [1, 2]),
    ],
    ids=str,
)
def test_fill_values_that_do_not_fit_are_refused(name: Any, fill: Any) -> None:
    with pytest.raises(InvalidArgument, match="fill_value"):
        ArrayMeta.new((3,), name, (2,), fill_value=fill)


def parsed(data_type: Any, fill: Any) -> ArrayMeta:
    document = json.loads(ArrayMeta.new((3,), "u1", (2,)).document)
    return ArrayMeta.parse(json.dumps(document | {"data_type": data_type, "fill_value": fill}).encode())


def config(name: str, **configuration: Any) -> dict[str, Any]:
    return {"name": name, "configuration": configuration}


def struct(*fields: Any) -> dict[str, Any]:
    return config("structured", fields=list(fields))


DEEP = struct(["a", "int8"])
for _ in range(30):
    DEEP = struct(["a", DEEP])


@pytest.mark.parametrize(
    ("data_type", "named"),
    [
        ("int1", "int1"),
        ("float6_e2m3", "float6_e2m3"),
        ("str160", "str160"),
        ("void64", "void64"),
        ("datetime64[s]", "datetime64"),
        (config("string", a=1), "'string' with configuration"),
        ("q" * 10_000, "qqq"),
        ({"name": "new", "configuration": {"a": 1}}, "'new' with configuration {'a': 1}"),
        (config("raw_bytes"), "raw_bytes"),
        (config("raw_bytes", length_bytes=0), "raw_bytes"),
        (config("raw_bytes", length_bytes=True), "raw_bytes"),
        (config("raw_bytes", length_bytes=1 << 40), "raw_bytes"),
        (config("raw_bytes", length_bytes=4, other=1), "raw_bytes"),
        (config("fixed_length_utf32", length_bytes=6), "utf32"),
        (config("numpy.datetime64", unit="x", scale_factor=1), "datetime64"),
        (config("numpy.datetime64", unit="s", scale_factor=0), "datetime64"),
        (config("numpy.datetime64", unit="s", scale_factor=1 << 31), "datetime64"),
        (config("numpy.datetime64", unit="s]", scale_factor=1), "datetime64"),
        (struct(), "structured"),
        (struct(["a", "string"]), "fixed length"),
        (struct(["a", config("raw_bytes", length_bytes=1 << 20)], ["b", "int8"]), "too long"),
        (DEEP, "structured"),
    ],
    ids=lambda v: str(v)[:60],
)
def test_unknown_data_types_are_named(data_type: Any, named: str) -> None:
    with pytest.raises(UnsupportedFormat, match=named.replace("{", r"\{")):
        parsed(data_type, 0)


@pytest.mark.parametrize(
    ("data_type", "fill"),
    [
        (5, 0),
        ({"configuration": {}}, 0),
        (struct(["a", "int8"], ["a", "int8"]), "AAA="),
        (struct(["", "int8"]), "AA=="),
        (struct(["a"]), "AA=="),
        (struct(["a", "int8"]), "AAA="),
        (config("raw_bytes", length_bytes=2), "AA=="),
        (config("raw_bytes", length_bytes=1), "!"),
        (config("null_terminated_bytes", length_bytes=1), "AAA="),
        (config("fixed_length_utf32", length_bytes=4), "ab"),
        (config("fixed_length_utf32", length_bytes=4), 1),
        (config("numpy.datetime64", unit="s", scale_factor=1), 1 << 63),
        (config("numpy.datetime64", unit="s", scale_factor=1), "now"),
        ("float32", "0x00"),
        ("float32", "0xzzzzzzzz"),
    ],
    ids=str,
)
def test_wrong_data_types_and_fill_values_are_corrupt(data_type: Any, fill: Any) -> None:
    with pytest.raises(Corrupt):
        parsed(data_type, fill)


def test_floats_in_hexadecimal() -> None:
    assert parsed("float32", "0x7fc00001").fill_value.tobytes() == b"\x01\x00\xc0\x7f"
    assert parsed("bfloat16", "0x3fc0").fill_value == ml_dtypes.bfloat16(1.5)
    assert parsed("complex64", ["0x3fc00000", 2]).fill_value == 1.5 + 2j
