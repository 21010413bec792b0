"""Parts of eXmY-encoded chunks: only tiles are decoded, and only the blocks that have these are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import exmy
import ml_dtypes  # noqa: F401 - registers bfloat16
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tstore.sync
from tstore.core.format.arrays.array_codecs import TileRange
from tstore.errors import Corrupt

SHAPE = (3000, 1024)
CODECS: list[Any] = [
    "e4m3",
    "e5m2",
    "e3m2",
    {"format": "e2m1", "block": 128},
    {"format": "e4m3", "axis": 0},
    {"format": "e3m3", "scale": "float", "block": 64},
    [{"name": "exmy", "configuration": {"format": "e4m3"}}, {"name": "zstd", "configuration": {"level": 1}}],
    {"format": "e3m8", "scale": 0.01},  # in planes, which have no tiles
]


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Any]]:
    """Arrays of each codec, of chunks of a few blocks or of less than one, beside their decoded values."""
    generator = np.random.default_rng(0)
    store, made = tstore.sync.open(tmp_path_factory.mktemp("tiles") / "s"), []
    for dtype in ("f4", "bfloat16"):
        values = (generator.standard_normal(SHAPE) * np.exp(generator.standard_normal((3000, 1)))).astype(dtype)
        with store.transaction() as transaction:
            for number, codecs in enumerate(CODECS):
                for rows in (2900, 130):
                    path = f"{dtype}/{number}/{rows}"
                    transaction.create_array(path, SHAPE, dtype, (rows, 1024), codecs).write(values)
    snapshot = store.snapshot()
    for path in snapshot.paths():
        array = snapshot.array(path)
        made.append((array, array.read()))
    return made


def spans(length: int) -> st.SearchStrategy[slice]:
    ends = st.integers(0, length)
    return st.builds(
        lambda a, b, step: (
            slice(min(a, b), max(a, b), step) if step > 0 else slice(max(a, b), min(a, b) or None, step)
        ),
        ends,
        ends | st.just(3),
        st.sampled_from([1, 1, 1, 2, 7, 400, -1, -3]),
    )


@given(st.data())
def test_a_part_has_the_values_of_the_whole(arrays: list[tuple[Any, Any]], data: st.DataObject) -> None:
    array, whole = data.draw(st.sampled_from(arrays))
    index = data.draw(st.tuples(spans(3000), spans(1024) | st.integers(0, 1023)))
    read = array[index].read()
    np.testing.assert_array_equal(read.view(np.uint8), np.ascontiguousarray(whole[index]).view(np.uint8))
    into = np.empty(read.shape, "f8")
    array[index].read(out=into)
    np.testing.assert_array_equal(into, whole[index].astype("f8"))


def positions(length: int) -> st.SearchStrategy[Any]:
    """Index arrays of a few points that are near each other or anywhere, or a mask."""
    few = st.lists(st.integers(0, length - 1), min_size=1, max_size=6)
    near = st.builds(
        lambda at, offsets: [min(at + o, length - 1) for o in offsets], st.integers(0, length - 1), few
    )
    return (few | near).map(np.array) | few.map(lambda chosen: np.isin(np.arange(length), chosen))


@given(st.data())
def test_points_have_the_values_of_the_whole(arrays: list[tuple[Any, Any]], data: st.DataObject) -> None:
    array, whole = data.draw(st.sampled_from(arrays))
    rows, columns = data.draw(positions(3000)), data.draw(positions(1024))
    read = array.oindex[rows, columns].read()
    np.testing.assert_array_equal(read, whole[np.ix_(rows, columns)])
    for index in (rows, (rows, data.draw(spans(1024))), (data.draw(spans(3000)), columns)):
        np.testing.assert_array_equal(array[index].read(), whole[index])
    points = np.flatnonzero(rows) if rows.dtype == bool else rows
    into = np.empty(len(points), "f8")
    array.vindex[points, points % 1024].read(out=into)
    np.testing.assert_array_equal(into, whole[points, points % 1024].astype("f8"))


def test_a_few_points_decode_only_their_tiles(
    arrays: list[tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_path = {array.path: array for array, _ in arrays}
    first = by_path["f4/0/2900"]  # 3 MiB of codes in its first chunk
    points = first.vindex[[1, 2, 2895], [5, 6, 7]]
    sizes = [request.size for request in points.explain().requests]
    assert sizes == [1 << 20, 8 + 2900 * 1024 - (2 << 20)]  # without the block between
    decode, decoded = TileRange.elements, []

    def counted(self: TileRange, header: Any, codes: Any) -> Any:
        values = decode(self, header, codes)
        decoded.append(len(values))
        return values

    monkeypatch.setattr(TileRange, "elements", counted)
    points.read()
    assert len(decoded) == 2
    assert sum(decoded) <= 2 << 16


def test_points_and_shared_reads_decode_a_chunk_in_planes_once(
    arrays: list[tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_path = {array.path: (array, whole) for array, whole in arrays}
    array, whole = by_path["f4/7/2900"]
    rows = np.arange(20) * 100
    decode, decoded = exmy.ChunkCodec.decode, []

    def counted(*args: Any) -> Any:
        decoded.append(args[2])
        return decode(*args)

    def refused(*args: Any) -> Any:
        raise AssertionError(f"a slice was decoded: {args}")

    monkeypatch.setattr(exmy.ChunkCodec, "decode", lambda self, *a, out=None: counted(self, *a, out))
    monkeypatch.setattr(exmy.ChunkSlice, "decode", refused)
    np.testing.assert_array_equal(array.vindex[rows, rows % 1024].read(), whole[rows, rows % 1024])
    np.testing.assert_array_equal(array[5:8].read(), whole[5:8])
    assert decoded == [(2900, 1024)] * 2


def test_only_the_blocks_of_the_header_and_of_the_tiles_are_read(arrays: list[tuple[Any, Any]]) -> None:
    by_path = {array.path: array for array, _ in arrays}
    first = by_path["f4/0/2900"]  # 3 MiB of codes in its first chunk
    assert first[:2900].explain().bytes_read == 8 + 2900 * 1024
    assert first[:5].explain().bytes_read == 1 << 20
    sizes = [request.size for request in first[2880:2890].explain().requests]
    assert sizes == [1 << 20, 8 + 2900 * 1024 - (2 << 20)]  # without the block between


def test_damage_is_noticed_in_the_blocks_that_are_read_and_no_others(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((4096, 1024)).astype("f4")
    store = tstore.sync.open(tmp_path / "s")
    with store.transaction() as transaction:
        transaction.create_array("a", values.shape, "f4", values.shape, "e4m3").write(values)
    array = store.snapshot().array("a")
    whole = array.read()
    [pack] = (tmp_path / "s").glob("txn/*/pack*")
    with pack.open("r+b") as file:
        file.seek((1 << 20) + 12345)
        byte = file.read(1)[0]
        file.seek((1 << 20) + 12345)
        file.write(bytes([byte ^ 1]))
    np.testing.assert_array_equal(array[3000:3010].read(), whole[3000:3010])
    np.testing.assert_array_equal(array[:10].read(), whole[:10])
    with pytest.raises(Corrupt, match=r"a, chunk \(0, 0\): checksum mismatch.*block at byte 1048576"):
        array[1030:1040].read()
