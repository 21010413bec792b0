"""Our safetensors reader and writer agree with the package's, and no header is trusted."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tstore.sync as blocking
from tests.support.processes import result, running, start
from tests.support.weights import example, raw, real_weights, write_file
from tstore.convert.safetensors import Writer, open_tensors, read_header
from tstore.convert.safetensors_header import DTYPES, sort_tensors
from tstore.errors import (
    AlreadyExists,
    Corrupt,
    Denied,
    InvalidArgument,
    Misuse,
    NotFound,
    StorageFull,
    TStoreError,
    UnsupportedFormat,
)

SUB_BYTE = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
WHOLE = [dtype for name, dtype in DTYPES.items() if name not in SUB_BYTE]


def write(path: Path, tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
    with Writer(path, {n: (a.dtype, a.shape) for n, a in tensors.items()}, metadata) as file:
        for name, array in tensors.items():
            file.write(name, array)


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def left_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# ---- the package's files and ours


def test_real_file_survives_byte_for_byte(tmp_path: Path) -> None:
    source = real_weights()
    tensors, metadata = open_tensors(source)
    assert len(tensors) > 100
    assert metadata == {"format": "pt"}
    write(tmp_path / "copy.safetensors", tensors, metadata)
    assert (tmp_path / "copy.safetensors").read_bytes() == source.read_bytes()


def test_real_file_reads_as_the_package_reads_it() -> None:
    source = real_weights()
    tensors, _ = open_tensors(source)
    expected = safetensors.numpy.load_file(source)
    assert tensors.keys() == expected.keys()
    for name, array in tensors.items():
        assert array.dtype == expected[name].dtype
        assert array.shape == expected[name].shape
        assert raw(array) == raw(expected[name])
        assert not array.flags.writeable


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in SUB_BYTE])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (3, 5)])
def test_every_dtype_there_and_back(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    array = example(DTYPES[name], shape)
    path = tmp_path / "a.safetensors"
    write(path, {"x": array})
    [(theirs, written)] = safetensors.deserialize(path.read_bytes())
    assert (theirs, written["dtype"], tuple(written["shape"]), bytes(written["data"])) == (
        "x",
        name,
        shape,
        raw(array),
    )
    tensors, metadata = open_tensors(path)
    assert (tensors["x"].dtype, tensors["x"].shape, raw(tensors["x"])) == (array.dtype, shape, raw(array))
    assert metadata == {}


def test_every_dtype_of_the_package_is_known_or_refused(tmp_path: Path) -> None:
    with pytest.raises(safetensors.SafetensorError) as error:
        safetensors.deserialize(write_file(tmp_path / "a", {"x": entry("?")}, b"1234").read_bytes())
    names = set(str(error.value).split("expected one of")[1].split("`")[1::2])
    assert names == set(DTYPES)


@pytest.mark.parametrize("name", SUB_BYTE)
@pytest.mark.parametrize("shape", [(0,), (4,), (3, 4), (4, 3), (8, 5, 1)])
def test_elements_of_4_and_6_bits(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    bits, dtype = SUB_BYTE[name], DTYPES[name]
    codes = np.random.default_rng(1).integers(0, 1 << bits, shape, np.uint8)
    path = tmp_path / "a"
    with Writer(path, {"x": (dtype, shape)}) as file:
        for row in codes[:, None]:  # rows that end within a byte
            file.write("x", row.view(dtype))
    number = sum(int(code) << bits * i for i, code in enumerate(codes.reshape(-1).tolist()))
    expected = number.to_bytes(codes.size * bits // 8, "little")
    [(theirs, written)] = safetensors.deserialize(path.read_bytes())
    assert (theirs, written["dtype"], tuple(written["shape"])) == ("x", name, shape)
    assert bytes(written["data"]) == expected
    tensor = open_tensors(path)[0]["x"]
    assert tensor.dtype == dtype
    assert np.array_equal(tensor.view(np.uint8), codes)
    assert not tensor.flags.writeable


def test_the_elements_of_4_bits_are_those_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors_torch = pytest.importorskip("safetensors.torch")
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this PyTorch has no dtype of 4 bits")
    pairs = torch.tensor([[0x21, 0x43], [0x65, 0xF7]], dtype=torch.uint8)
    others = {"b": torch.ones(3, dtype=torch.bool), "c": torch.ones(3, dtype=torch.uint8), "d": torch.ones(1)}
    safetensors_torch.save_file({"x": pairs.view(torch.float4_e2m1fn_x2), **others}, tmp_path / "theirs")
    tensors, _ = open_tensors(tmp_path / "theirs")
    assert tensors["x"].tolist() == [[0.5, 1, 1.5, 2], [3, 4, 6, -6]]
    order = sort_tensors({n: (a.dtype, a.shape) for n, a in tensors.items()})
    write(tmp_path / "ours", {name: tensors[name] for name in order})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_tensors_of_4_bits_take_whole_bytes(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"'x' is float4_e2m1fn of shape \[3\], which takes 12 bits.*pad it"):
        Writer(tmp_path / "a", {"x": (DTYPES["F4"], (3,))})
    with pytest.raises(Corrupt, match=r"1.5 bytes for F4"):
        read_header(write_file(tmp_path / "b", {"x": entry("F4", [3], [0, 2])}, b"12"))
    with pytest.raises(Misuse, match="incomplete"), Writer(tmp_path / "a", {"x": (DTYPES["F4"], (4,))}) as file:
        file.write("x", np.zeros(3, DTYPES["F4"]))
    with pytest.raises(InvalidArgument, match="does not fit"):
        with Writer(tmp_path / "a", {"x": (DTYPES["F4"], (4,))}) as file:
            file.write("x", np.zeros(5, DTYPES["F4"]))
    assert left_in(tmp_path) == ["b"]


def test_files_of_the_package_are_matched_byte_for_byte(tmp_path: Path) -> None:
    arrays = {
        'ü/"\x7f\n\x1f\u2028': example(np.dtype("u1"), (5,)),
        "b": example(np.dtype("f4"), (2, 3)),
        "a": example(np.dtype("f4"), ()),
        "empty": example(np.dtype("f8"), (0, 3)),
        "half": example(np.dtype("f2"), (7,)),
        "c": example(np.dtype("c8"), (2,)),
        "u": example(np.dtype("u8"), (2,)),
        "flag": example(np.dtype("?"), (3,)),
    }
    metadata = {"who": 'tést "1"\x07'}
    safetensors.numpy.save_file(arrays, tmp_path / "theirs", metadata)
    order = sort_tensors({n: (a.dtype, a.shape) for n, a in arrays.items()})
    write(tmp_path / "ours", {name: arrays[name] for name in order}, metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    tensors, metadata_read = open_tensors(tmp_path / "theirs")
    write(tmp_path / "again", tensors, metadata_read)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_no_tensors_at_all(tmp_path: Path) -> None:
    write(tmp_path / "none", {})
    assert (tmp_path / "none").read_bytes() == safetensors.numpy.save({})
    assert open_tensors(tmp_path / "none") == ({}, {})


# ---- reading


def test_arrays_are_views_of_the_file_and_outlive_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write(path, {"x": np.arange(4.0), "y": np.arange(3)})
    tensors, _ = open_tensors(path)
    bases = []
    for array in tensors.values():
        base: Any = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        bases.append(base)
    assert bases[0] is bases[1]
    path.unlink()
    assert tensors["x"].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        tensors["x"][0] = 1


def test_unaligned_tensors_come_aligned(tmp_path: Path) -> None:
    values = np.arange(3, dtype="<f8")
    header = {"flag": entry("BOOL", [1], [0, 1]), "x": entry("F64", [3], [1, 25])}
    tensors, _ = open_tensors(write_file(tmp_path / "a", header, b"\x01" + values.tobytes()))
    assert tensors["flag"].tolist() == [True]
    assert tensors["x"].tolist() == [0, 1, 2]
    assert tensors["x"].flags.aligned
    assert not tensors["x"].flags.writeable


def test_header_order_need_not_be_data_order(tmp_path: Path) -> None:
    header = {"b": entry(offsets=[4, 8]), "a": entry(offsets=[0, 4]), "e": entry(shape=[0], offsets=[4, 4])}
    path = write_file(tmp_path / "a", header, np.array([1, 2], "<f4").tobytes())
    tensors, _ = open_tensors(path)
    assert {name: a.tolist() for name, a in tensors.items()} == {"a": [1], "e": [], "b": [2]}
    assert list(tensors) == ["a", "e", "b"]
    base = path.stat().st_size - 8
    assert read_header(path).tensors["b"] == (np.dtype("f4"), (1,), base + 4, base + 8)


LIES: dict[str, tuple[object, bytes, list[str]]] = {
    "not UTF-8": (b'{"\xff": 1}', b"", ["UTF-8"]),
    "a lone surrogate": (rb'{"\ud800": {}}', b"", ["UTF-8"]),
    "a lone surrogate in metadata": (rb'{"__metadata__": {"a": "\ud800"}}', b"", ["UTF-8"]),
    "not JSON": (b'{"x": ', b"", ["JSON"]),
    "NaN": (b'{"x": NaN}', b"", ["JSON", "NaN"]),
    "empty": (b"", b"", ["JSON"]),
    "nothing but deep": (b'{"x":' + b"[" * 200_000, b"", ["JSON"]),
    "deep and closed": (b'{"x":' + b"[" * 200 + b"]" * 200 + b"}", b"", ["'x'", "object"]),
    "a long number": (b'{"x":' + b"9" * 5000 + b"}", b"", ["JSON"]),
    "an array": ([], b"", ["object"]),
    "text after the object": (b"{} {}", b"", ["JSON"]),
    "space before the object": (b"  {}", b"", ["object"]),
    "a tensor that is a number": ({"x": 1}, b"", ["'x'", "object", "1"]),
    "a tensor twice": (
        b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        b"",
        ["'x'", "twice"],
    ),
    "a field twice": (
        b'{"x":{"dtype":"U8","shape":[1],"shape":[0],"data_offsets":[0,0]}}',
        b"",
        ["'shape'", "twice"],
    ),
    "a field missing": ({"x": {"dtype": "U8", "shape": [0]}}, b"", ["'x'", "data_offsets"]),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", ["__metadata__", "strings"]),
    "metadata that is a list": ({"__metadata__": ["a"]}, b"", ["__metadata__", "strings"]),
    "an unknown dtype": ({"x": entry("F31")}, b"1234", ["'x'", "'F31'", "F32"]),
    "a dtype that is a number": ({"x": entry(32)}, b"1234", ["'x'", "32"]),
    "a dtype that is a list": ({"x": entry(["F32"])}, b"1234", ["'x'", "['F32']"]),
    "a negative length": ({"x": entry(shape=[-1, -1])}, b"1234", ["'x'", "[-1, -1]"]),
    "a fractional length": ({"x": entry(shape=[1.0])}, b"1234", ["'x'", "[1.0]"]),
    "a length that is true": ({"x": entry(shape=[True])}, b"1234", ["'x'", "[True]"]),
    "a shape that is a number": ({"x": entry(shape=1)}, b"1234", ["'x'", "1"]),
    "an overflowing shape": ({"x": entry(shape=[2**62, 4])}, b"1234", ["'x'", str(2**62)]),
    "an empty overflowing shape": (
        {"x": entry(shape=[0, 2**62, 4], offsets=[0, 0])},
        b"",
        ["'x'", str(2**62)],
    ),
    "offsets beyond the file": (
        {"x": entry(shape=[2], offsets=[0, 8])},
        b"1234",
        ["'x'", "[0, 8]", "4 bytes"],
    ),
    "falling offsets": ({"x": entry(offsets=[4, 0])}, b"1234", ["'x'", "[4, 0]"]),
    "negative offsets": ({"x": entry(offsets=[-4, 0])}, b"1234", ["'x'", "[-4, 0]"]),
    "three offsets": ({"x": entry(offsets=[0, 4, 4])}, b"1234", ["'x'", "[0, 4, 4]"]),
    "huge offsets": ({"x": entry(offsets=[2**64, 2**64 + 4])}, b"1234", ["'x'", str(2**64)]),
    "too few bytes": ({"x": entry(shape=[2], offsets=[0, 4])}, b"1234", ["'x'", "8 bytes", "found 4"]),
    "too many bytes": ({"x": entry(shape=[], offsets=[0, 8])}, b"12345678", ["'x'", "4 bytes", "found 8"]),
    "an overlap": ({"x": entry(), "y": entry(shape=[2], offsets=[0, 8])}, b"12345678", ["'y'", "overlaps"]),
    "an overlap with nothing": (
        {"x": entry(), "y": entry(shape=[0], offsets=[2, 2])},
        b"1234",
        ["'y'", "overlaps"],
    ),
    "a gap": ({"x": entry(), "y": entry(offsets=[8, 12])}, b"1234----5678", ["'y'", "gap"]),
    "a gap at the start": ({"x": entry(offsets=[4, 8])}, b"----1234", ["'x'", "gap"]),
    "trailing bytes": ({"x": entry()}, b"1234-", ["the file"]),
    "trailing bytes and no tensor": ({}, b"-", ["the file"]),
}


@pytest.mark.parametrize("case", LIES)
def test_lying_headers_are_corrupt(tmp_path: Path, case: str) -> None:
    header, data, words = LIES[case]
    path = write_file(tmp_path / "liar.safetensors", header, data)
    with pytest.raises(Corrupt) as error:
        open_tensors(path)
    assert type(error.value) is Corrupt
    for word in [str(path), "expected", "found", *words]:
        assert word in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["at least 8", "found 0"]),
        (b"1234567", ["at least 8", "found 7"]),
        ((3).to_bytes(8, "little") + b"{}", ["2 bytes that follow", "found 3"]),
        ((2**64 - 1).to_bytes(8, "little") + b"{}", ["100000000", str(2**64 - 1)]),
        ((100_000_001).to_bytes(8, "little") + b"{}", ["100000000", "100000001"]),
    ],
)
def test_lying_header_lengths_are_corrupt(tmp_path: Path, data: bytes, words: list[str]) -> None:
    path = tmp_path / "liar.safetensors"
    path.write_bytes(data)
    with pytest.raises(Corrupt) as error:
        read_header(path)
    assert all(word in str(error.value) for word in [str(path), "header" if len(data) > 8 else "file", *words])


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ({"x": entry() | {"strides": [1]}}, "strides"),
        ({"x": entry("U8", [1] * 65, [0, 1])}, "65 dimensions"),
    ],
)
def test_unsupported_dtypes_and_shapes_are_named(tmp_path: Path, header: object, word: str) -> None:
    path = write_file(tmp_path / "a", header, b"1234")
    with pytest.raises(UnsupportedFormat) as error:
        read_header(path)
    assert str(path) in str(error.value)
    assert word in str(error.value)


def test_an_index_is_not_read_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"w": "model-00001-of-00002.safetensors"}}, indent=2))
    with pytest.raises(InvalidArgument, match=r"is JSON, not a safetensors file.*\.index\.json") as error:
        read_header(path)
    assert str(path) in str(error.value)


def test_a_missing_file_or_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        read_header(tmp_path / "nowhere")
    with pytest.raises(InvalidArgument, match="another path"):
        open_tensors(tmp_path)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "file"


def try_open(path: Path) -> None:
    with contextlib.suppress(TStoreError):
        for array in open_tensors(path)[0].values():
            raw(array)


@given(st.binary(max_size=300), st.binary(max_size=20))
def test_random_bytes_as_header(scratch: Path, header: bytes, data: bytes) -> None:
    try_open(write_file(scratch, header, data))


@given(st.binary(max_size=300))
def test_random_bytes_as_file(scratch: Path, data: bytes) -> None:
    scratch.write_bytes(data)
    try_open(scratch)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 9) | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELD = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F4"]) | JSON,
        "shape": st.lists(st.integers(0, 4), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(0, 20), min_size=2, max_size=2) | JSON,
    }
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), FIELD | JSON, max_size=4), st.binary())
def test_random_json_as_header(scratch: Path, header: dict[str, Any], data: bytes) -> None:
    try_open(write_file(scratch, header, data))


@given(st.integers(0, 400), st.integers(0, 255))
def test_one_byte_changed(scratch: Path, at: int, value: int) -> None:
    scratch.unlink(missing_ok=True)
    write(scratch, {"x": np.arange(3), "y": np.ones((2, 2), "f4")}, {"a": "b"})
    data = bytearray(scratch.read_bytes())
    data[at % len(data)] = value
    scratch.write_bytes(data)
    try_open(scratch)


@given(
    st.dictionaries(
        st.text(max_size=6).filter(lambda n: n != "__metadata__"),
        st.tuples(st.sampled_from(WHOLE), st.lists(st.integers(0, 4), max_size=3).map(tuple)),
        max_size=5,
    ),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_any_tensors_there_and_back(scratch: Path, specs: dict[str, Any], metadata: dict[str, str]) -> None:
    scratch.unlink(missing_ok=True)
    arrays = {name: example(spec[0], spec[1], seed) for seed, (name, spec) in enumerate(specs.items())}
    write(scratch, arrays, metadata)
    theirs = dict(safetensors.deserialize(scratch.read_bytes()))
    tensors, metadata_read = open_tensors(scratch)
    assert metadata_read == metadata
    assert sorted(tensors) == sorted(arrays) == sorted(theirs)
    for name, array in arrays.items():
        assert (tensors[name].dtype, tensors[name].shape) == (array.dtype, array.shape)
        assert raw(tensors[name]) == bytes(theirs[name]["data"]) == raw(array)


# ---- writing


def test_tensors_come_in_any_order_and_by_rows(tmp_path: Path) -> None:
    x, y = example(np.dtype("f4"), (10, 3)), example(np.dtype(ml_dtypes.bfloat16), (5,))
    with Writer(tmp_path / "a", {"x": (x.dtype, x.shape), "y": (y.dtype, y.shape)}) as file:
        file.write("x", x[:4])
        file.write("y", y)
        file.write("x", x[4:4])
        file.write("x", np.asfortranarray(x[4:]))
    tensors, _ = open_tensors(tmp_path / "a")
    assert raw(tensors["x"]) == raw(x)
    assert raw(tensors["y"]) == raw(y)
    assert left_in(tmp_path) == ["a"]


def test_big_endian_arrays_are_written_little_endian(tmp_path: Path) -> None:
    with Writer(tmp_path / "a", {"x": (np.dtype("f4"), (3,))}) as file:
        file.write("x", np.arange(3, dtype=">f4"))
    assert open_tensors(tmp_path / "a")[0]["x"].tolist() == [0, 1, 2]


def test_an_existing_file_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"mine")
    with pytest.raises(AlreadyExists, match=str(path)):
        write(path, {"x": np.zeros(3)})
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(AlreadyExists):
        write(path, {"x": np.zeros(3)})
    assert left_in(tmp_path) == ["a"]


def test_a_file_created_concurrently_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    writer = Writer(path, {"x": (np.dtype("f8"), (3,))})

    def race() -> None:
        with writer as file:
            file.write("x", np.zeros(3))
            path.write_bytes(b"mine")

    with pytest.raises(AlreadyExists):
        race()
    assert path.read_bytes() == b"mine"
    assert left_in(tmp_path) == ["a"]


def test_nothing_is_left_after_an_exception(tmp_path: Path) -> None:
    def interrupted() -> None:
        with Writer(tmp_path / "a", {"x": (np.dtype("f8"), (3,))}) as file:
            file.write("x", np.zeros(3))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert left_in(tmp_path) == []


def test_incomplete_tensors_are_named(tmp_path: Path) -> None:
    def half() -> None:
        specs = {name: (np.dtype("f8"), (3,)) for name in "xyz"} | {"e": (np.dtype("f8"), (0,))}
        with Writer(tmp_path / "a", specs) as file:
            file.write("x", np.zeros(3))
            file.write("y", np.zeros(2))

    with pytest.raises(Misuse) as error:
        half()
    assert "y: 16 of 24 bytes" in str(error.value)
    assert "z: 0 of 24 bytes" in str(error.value)
    assert "x:" not in str(error.value)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        ("y", np.zeros((2, 3)), ["'y'", "not declared"]),
        ("x", np.zeros((2, 3), "f4"), ["float64", "float32"]),
        ("x", np.zeros((3, 3)), ["(2, 3)", "(3, 3)"]),
        ("x", np.zeros((2, 4)), ["(2, 3)", "(2, 4)"]),
        ("x", np.zeros(6), ["(2, 3)", "(6,)"]),
        ("s", np.zeros(1), ["()", "(1,)"]),
    ],
)
def test_misfitting_parts_are_refused(tmp_path: Path, name: str, part: Any, words: list[str]) -> None:
    with pytest.raises(InvalidArgument) as error:
        with Writer(tmp_path / "a", {"x": (np.dtype("f8"), (2, 3)), "s": (np.dtype("f8"), ())}) as file:
            file.write(name, part)
    assert all(word in str(error.value) for word in [str(tmp_path / "a"), *words])
    assert left_in(tmp_path) == []


def test_a_tensor_is_written_once(tmp_path: Path) -> None:
    def twice() -> None:
        with Writer(tmp_path / "a", {"s": (np.dtype("f8"), ())}) as file:
            file.write("s", np.zeros(()))
            file.write("s", np.zeros(()))

    with pytest.raises(InvalidArgument, match="8 of 8 bytes"):
        twice()


@pytest.mark.parametrize(
    ("tensors", "metadata", "word"),
    [
        ({"__metadata__": ("f4", (1,))}, {}, "rename"),
        ({"x": ("c16", (1,))}, {}, "complex128"),
        ({"x": (">f4", (1,))}, {}, ">f4"),
        ({"x": ("f4", (-1,))}, {}, "(-1,)"),
        ({"x": ("f4", (1.5,))}, {}, "(1.5,)"),
        ({"\ud800": ("f4", (1,))}, {}, "UTF-8"),
        ({}, {"a": 1}, "strings"),
    ],
)
def test_tensors_that_the_format_cannot_represent_are_refused(
    tmp_path: Path, tensors: Any, metadata: Any, word: str
) -> None:
    with pytest.raises(InvalidArgument) as error:
        Writer(tmp_path / "a", tensors, metadata)
    assert word in str(error.value)
    assert left_in(tmp_path) == []


def test_a_header_beyond_what_readers_accept(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="several files"):
        Writer(tmp_path / "a", {}, {"long": "x" * 100_000_000})


def test_sort_tensors_refuses_unrepresentable_tensors() -> None:
    with pytest.raises(InvalidArgument, match="int4"):
        sort_tensors({"x": (np.dtype(ml_dtypes.int4), (1,))})


def test_writing_outside_the_block(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a", {"x": (np.dtype("f8"), (1,))})
    with pytest.raises(Misuse, match="with"):
        writer.write("x", np.zeros(1))


@pytest.mark.parametrize(
    ("call", "number", "expected"),
    [
        ("pwritev", errno.ENOSPC, StorageFull),
        ("pwritev", errno.EDQUOT, StorageFull),
        ("fsync", errno.ENOSPC, StorageFull),
        ("fsync", errno.EIO, TStoreError),
        ("link", errno.EROFS, Denied),
        ("open", errno.EACCES, Denied),
        ("open", errno.ENOENT, NotFound),
    ],
)
def test_errors_of_the_file_system_are_translated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, expected: type[Exception]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(expected, match=str(tmp_path / "a")):
        write(tmp_path / "a", {"x": np.zeros(3)})
    monkeypatch.undo()
    assert left_in(tmp_path) == []


def test_without_hard_links_an_exclusive_rename_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    write(tmp_path / "a", {"x": np.zeros(3)})
    assert left_in(tmp_path) == ["a"]
    with pytest.raises(AlreadyExists):
        write(tmp_path / "a", {"x": np.ones(3)})
    np.testing.assert_array_equal(open_tensors(tmp_path / "a")[0]["x"], np.zeros(3))


def test_a_folder_that_can_not_be_made_durable_is_an_error_and_the_file_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, fsync = [], os.fsync

    def second_fails(file: int) -> None:
        calls.append(file)
        if len(calls) == 2:
            raise OSError(errno.EIO, "broken")
        fsync(file)

    monkeypatch.setattr(os, "fsync", second_fails)
    with pytest.raises(TStoreError, match="broken"):
        write(tmp_path / "a", {"x": np.zeros(3)})
    assert left_in(tmp_path) == ["a"]
    np.testing.assert_array_equal(open_tensors(tmp_path / "a")[0]["x"], np.zeros(3))


def test_a_killed_export_leaves_no_file(tmp_path: Path) -> None:
    """It is killed when all bytes are written, before and after the file gets its name."""
    blocking.save(tmp_path / "store", {"w": np.ones(10)}, 0)
    code = """
        import os, signal, sys
        import tstore.sync as tstore
        from tstore.convert.exporting import export_safetensors

        def killed(*arguments, **options):
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, sys.argv[2], killed)
        import asyncio
        asyncio.run(export_safetensors(sys.argv[1] + "/store", sys.argv[1] + "/out/w.safetensors"))
    """
    (tmp_path / "out").mkdir()
    for call in ("fsync", "link"):
        process = start(code, tmp_path, call)
        with running(process):
            result(process, -signal.SIGKILL)
        assert list((tmp_path / "out").iterdir()) == []
