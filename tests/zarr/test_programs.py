"""Programs written for zarr-python, xarray and Dask run on a snapshot or a transaction, unchanged."""

from __future__ import annotations

import asyncio
import json
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
import zarr.api.asynchronous
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import cpu, default_buffer_prototype
from zarr.core.sync import sync

import tstore
import tstore.sync
from tests.support.counted_reads import count_reads
from tests.support.lazy import lazy
from tests.support.thresholds import Thresholds
from tstore.core.data.writer import PackSet
from tstore.core.log.pages import PageReader
from tstore.errors import AlreadyExists, Conflict, Corrupt, InvalidArgument, Misuse, NotFound, UnsupportedFormat
from tstore.zarr import ZarrStore
from tstore.zarr.keys import ChunkKeys

dask_array = lazy("dask.array")
VALUES = np.arange(6000, dtype="f4").reshape(60, 100)
MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> tstore.sync.Store:
    return tstore.sync.open(tmp_path / "s")


def group(source: Any, mode: Any = "r") -> Any:
    return zarr.open_group(ZarrStore(source), mode=mode)


def keys(zarr_store: ZarrStore) -> list[str]:
    async def collected() -> list[str]:
        return [key async for key in zarr_store.list()]

    return sync(collected())


def get(zarr_store: ZarrStore, key: str, part: Any = None) -> bytes | None:
    found = sync(zarr_store.get(key, default_buffer_prototype(), part))
    return None if found is None else found.to_bytes()


def put(zarr_store: ZarrStore, key: str, data: bytes) -> None:
    sync(zarr_store.set(key, cpu.Buffer.from_bytes(data)))


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": (16, 30)},
        {"chunks": (16, 30), "chunk_key_encoding": {"name": "default", "separator": "."}},
        {"chunks": (16, 30), "chunk_key_encoding": {"name": "v2", "separator": "/"}},
        {"chunks": (8, 10), "shards": (16, 30)},
        {"chunks": (60, 100), "compressors": None},
    ],
    ids=["default", "dots", "v2 keys", "shards", "one chunk"],
)
def test_what_zarr_writes_tstore_reads_and_the_reverse(store: tstore.sync.Store, options: Any) -> None:
    with store.transaction() as transaction:
        root = group(transaction, "a")
        array = root.create_array("g/a", shape=VALUES.shape, dtype="f4", attributes={"unit": "m"}, **options)
        array[:] = VALUES
        assert transaction.array("g/a")[7].read().tolist() == VALUES[7].tolist()
    snapshot = store.snapshot()
    assert snapshot.paths() == ["g/a"]
    assert snapshot.attributes("g/a") == {"unit": "m"}
    np.testing.assert_array_equal(snapshot.array("g/a").read(), VALUES)
    with store.transaction() as transaction:
        transaction.array("g/a")[3:50, 5:].write(VALUES[3:50, 5:] + 1)
        written = group(transaction, "r+")["g/a"]
        np.testing.assert_array_equal(written[3:50, 5:], VALUES[3:50, 5:] + 1)
    read = group(store.snapshot())["g/a"]
    assert dict(read.attrs) == {"unit": "m"}
    np.testing.assert_array_equal(read[3:50, 5:], VALUES[3:50, 5:] + 1)
    np.testing.assert_array_equal(read[:3], VALUES[:3])


def test_a_transaction_that_fails_leaves_nothing(store: tstore.sync.Store) -> None:
    def fails_later() -> None:
        with store.transaction() as transaction:
            group(transaction, "a").create_array("a", data=VALUES)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails_later()
    assert store.snapshot().paths() == []


def test_a_checkpoint_is_a_group_of_zarr(tmp_path: Path) -> None:
    tstore.sync.save(tmp_path / "c", {"layer": {"w": VALUES}, "steps": [np.arange(3), 7]}, step=5)
    snapshot = tstore.sync.open(tmp_path / "c", "r").snapshot()
    root = group(snapshot)
    assert sorted(name for name, _ in root.members()) == ["layer", "steps"]
    assert "tstore" not in root.attrs
    np.testing.assert_array_equal(root["layer/w"][10:20], VALUES[10:20])
    assert json.loads(get(ZarrStore(snapshot), "layer/w/zarr.json") or b"").keys() >= {"shape", "codecs"}
    assert "tstore" not in json.loads(get(ZarrStore(snapshot), "layer/w/zarr.json") or b"")


def test_the_root_attributes_of_a_checkpoint_change_and_its_structure_stays(tmp_path: Path) -> None:
    tstore.sync.save(tmp_path / "c", {"w": VALUES, "list": [np.arange(3), 7]}, step=5)
    with tstore.sync.open(tmp_path / "c").transaction(tag="noted") as transaction:
        group(transaction, "r+").attrs["note"] = "looked at"
    assert tstore.sync.open(tmp_path / "c").snapshot().attributes()["note"] == "looked at"
    restored = tstore.sync.restore(tmp_path / "c", at="noted")
    assert isinstance(restored["list"], list)


def test_attributes_and_shapes_change_and_chunks_stay(store: tstore.sync.Store) -> None:
    with store.transaction() as transaction:
        group(transaction, "a").create_array("a", shape=(60, 100), chunks=(7, 30), dtype="f4")[:] = VALUES
    with store.transaction() as transaction:
        array = group(transaction, "r+")["a"]
        array.attrs["unit"] = "m"
        array.resize((80, 50))
        array[60:] = 1
    array = store.snapshot().array("a")
    np.testing.assert_array_equal(array[:60].read(), VALUES[:, :50])
    np.testing.assert_array_equal(array[60:].read(), np.ones((20, 50)))
    assert store.snapshot().attributes("a") == {"unit": "m"}


def test_a_dense_array_stays_dense_when_its_attributes_change(store: tstore.sync.Store) -> None:
    with store.transaction() as transaction:
        transaction.create_array("a", (4,), "u1", chunks=(2,))[:2].write(1)
    with store.transaction() as transaction:
        group(transaction, "r+")["a"].attrs["unit"] = "m"
    with pytest.raises(NotFound, match="never written"):
        store.snapshot().array("a").read()


def test_attributes_change_after_a_part_of_a_chunk_was_replaced_by_all_of_it(store: tstore.sync.Store) -> None:
    with store.transaction() as transaction:
        transaction.create_array("a", (4,), "u1", chunks=(2,)).write(1)
    with store.transaction() as transaction:
        array = transaction.array("a")
        array[0].write(2)
        array[:2].write(3)
        group(transaction, "r+")["a"].attrs["unit"] = "m"
    assert store.snapshot().array("a").read().tolist() == [3, 3, 1, 1]


def test_metadata_set_to_what_it_was_conflicts_with_a_change(store: tstore.sync.Store) -> None:
    with store.transaction() as transaction:
        transaction.create_array("a", (4,), "u1", attributes={"unit": "m"}).write(1)
    former = store.transaction()
    view = ZarrStore(former)
    put(view, "a/zarr.json", get(view, "a/zarr.json") or b"")
    with store.transaction() as transaction:
        group(transaction, "r+")["a"].attrs["unit"] = "s"
    with pytest.raises(Conflict) as caught:
        former.commit()
    assert caught.value.paths == ["a"]


@pytest.mark.parametrize("dtype", ["uint8", "bool"])
def test_metadata_that_zarr_writes_in_other_words_keeps_the_chunks(store: tstore.sync.Store, dtype: str) -> None:
    with store.transaction() as transaction:
        group(transaction, "a").create_array("a", shape=(4,), chunks=(2,), dtype=dtype, fill_value=0)
        document = json.loads(get(ZarrStore(transaction), "a/zarr.json") or b"")
        document["codecs"] = [{"name": "bytes", "configuration": {"endian": "little"}}]
        put(ZarrStore(transaction), "a/zarr.json", json.dumps(document).encode())
    with store.transaction() as transaction:
        transaction.array("a").write(np.array([1, 0, 1, 1], dtype))
    with store.transaction() as transaction:
        group(transaction, "r+")["a"].attrs["unit"] = "m"  # bytes have no order, which zarr leaves out
        transaction.copy_array(transaction.array("a"), "copy")
    array = store.snapshot().array("a")
    assert array.codecs[0] == {"name": "bytes"}
    assert array.read().tolist() == store.snapshot().array("copy").read().tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"data_type": "float64"},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "big"}}]},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [10, 10]}}},
        {"node_type": "group", "attributes": {}},
    ],
    ids=["dtype", "codecs", "chunks", "group"],
)
def test_metadata_that_the_chunks_do_not_fit_is_refused(store: tstore.sync.Store, change: Any) -> None:
    with store.transaction() as transaction:
        group(transaction, "a").create_array("a", data=VALUES, chunks=(16, 30))
    with store.transaction() as transaction:
        zarr_store = ZarrStore(transaction)
        changed = json.dumps(json.loads(get(zarr_store, "a/zarr.json") or b"") | change).encode()
        with pytest.raises(AlreadyExists, match=r"a is an array with chunks.* delete the array first"):
            put(zarr_store, "a/zarr.json", changed)
    np.testing.assert_array_equal(store.snapshot().array("a").read(), VALUES)
    with store.transaction() as transaction:
        zarr_store = ZarrStore(transaction)
        sync(zarr_store.delete_dir("a"))
        put(zarr_store, "a/zarr.json", changed)
    if "node_type" not in change:
        assert not store.snapshot().array("a").read().any()


def test_metadata_of_another_dtype_replaces_that_of_an_array_without_chunks(store: tstore.sync.Store) -> None:
    with store.transaction() as transaction:
        zarr_store = ZarrStore(transaction)
        group(transaction, "a").create_array("a", shape=(4,), dtype="f4")
        changed = json.loads(get(zarr_store, "a/zarr.json") or b"") | {"data_type": "float64"}
        put(zarr_store, "a/zarr.json", json.dumps(changed).encode())
        group(transaction, "a")["a"][:] = 7
    assert store.snapshot().array("a").dtype == "float64"


def test_chunks_that_are_set_and_removed_at_once_do_not_lose_each_other(store: tstore.sync.Store) -> None:
    with store.transaction() as transaction:
        transaction.create_array("a", (60,), "i4", chunks=(2,)).write(np.arange(60, dtype="i4") + 1)
    values = np.where(np.arange(60) // 2 % 3 == 1, 7, 0).astype("i4")
    with store.transaction() as transaction:
        array = group(transaction, "r+")["a"]
        array[:] = values  # zarr removes and sets chunks concurrently
        assert array[:].tolist() == values.tolist()
    assert store.snapshot().array("a").read().tolist() == values.tolist()


@pytest.mark.parametrize("attributes", [{}, {"title": "old"}])
def test_mode_w_replaces_all_that_a_store_had(store: tstore.sync.Store, attributes: Any) -> None:
    with store.transaction() as transaction:
        root = zarr.open_group(ZarrStore(transaction), attributes=attributes)
        root.create_array("x/a", data=VALUES)
        root.create_array("z", data=VALUES)
    with store.transaction() as transaction:
        zarr.open_group(ZarrStore(transaction), mode="w").create_array("z/b", data=np.arange(5))
    assert store.snapshot().paths() == ["z/b"]
    assert store.snapshot().attributes() == {}
    with store.transaction() as transaction:
        sync(ZarrStore(transaction).clear())
        assert sync(ZarrStore(transaction).is_empty(""))
    assert store.snapshot().paths() == []


def test_mode_w_conflicts_with_a_write_to_what_it_deletes(store: tstore.sync.Store) -> None:
    with store.transaction() as transaction:
        transaction.create_array("a", (4,), "i4").write(0)
    writing, replacing = store.transaction(), store.transaction()
    writing.array("a").write(1)
    group(replacing, "w").create_array("b", data=np.arange(5))
    writing.commit()
    with pytest.raises(Conflict):
        replacing.commit()


def test_a_checkpoint_that_zarr_replaces_has_no_structure_left(tmp_path: Path) -> None:
    tstore.sync.save(tmp_path / "c", {"w": VALUES, "list": [np.arange(3), 7]}, step=5)
    with tstore.sync.open(tmp_path / "c").transaction(tag="replaced") as transaction:
        group(transaction, "w").create_array("b", data=np.arange(5))
    assert list(tstore.sync.restore(tmp_path / "c", at="replaced")) == ["b"]


@pytest.mark.parametrize("deleted", ["g/h/x", "g/h/zarr.json", "g/absent"])
def test_a_group_stays_when_its_last_member_is_deleted(store: tstore.sync.Store, deleted: str) -> None:
    """Also one that exists only as part of paths. So it is in zarr's own stores."""
    with store.transaction() as tx:
        tx.create_array("g/h/x", VALUES.shape, "f4")
        tx.create_group("other")
    zarr_store = zarr.storage.MemoryStore()
    zarr.create_array(zarr_store, name="g/h/x", shape=VALUES.shape, dtype="f4")
    zarr.create_group(zarr_store, path="other")
    with store.transaction() as tx:
        for root in (group(tx, "a"), zarr.open_group(zarr_store, mode="a")):
            name = deleted.removesuffix("/zarr.json")
            if name in root:
                del root[name]
    members = [
        sorted(path for path, _ in root.members(max_depth=None))
        for root in (group(store.snapshot()), zarr.open_group(zarr_store, mode="r"))
    ]
    assert members[0] == members[1]
    assert "g" in members[0]
    assert "absent" not in str(members[0])


def test_groups_and_arrays_are_deleted_and_created_again(store: tstore.sync.Store) -> None:
    with store.transaction() as transaction:
        root = group(transaction, "a")
        for name in ("x/a", "x/y/b", "z"):
            root.create_array(name, data=VALUES)
    with store.transaction() as transaction:
        root = group(transaction, "r+")
        del root["x"]
        root.create_array("x", data=np.arange(5))
        root.create_array("z", data=np.arange(4), overwrite=True)
    snapshot = store.snapshot()
    assert snapshot.paths() == ["x", "z"]
    assert snapshot.array("z").read().tolist() == [0, 1, 2, 3]


def test_writers_of_one_chunk_conflict_and_those_of_others_do_not(store: tstore.sync.Store) -> None:
    with store.transaction() as transaction:
        group(transaction, "a").create_array("a", shape=(40,), chunks=(10,), dtype="i4")[:] = 1
    first, second, third = (store.transaction() for _ in range(3))
    for transaction, start in ((first, 0), (second, 10), (third, 0)):
        group(transaction, "r+")["a"][start : start + 10] = start + 2
    first.commit()
    second.commit()
    with pytest.raises(Conflict, match="a, chunk"):
        third.commit()
    assert store.snapshot().array("a")[::10].read().tolist() == [2, 12, 1, 1]


def test_a_serializable_transaction_notices_a_chunk_that_zarr_read(store: tstore.sync.Store) -> None:
    with store.transaction() as transaction:
        group(transaction, "a").create_array("a", shape=(40,), chunks=(10,), dtype="i4")[:] = 1
        group(transaction, "a").create_array("sum", data=np.array([40]))
    reading = store.transaction(isolation="serializable")
    root = group(reading, "r+")
    root["sum"][:] = root["a"][:20].sum()
    with store.transaction() as other:
        other.array("a")[5].write(9)
    with pytest.raises(Conflict, match="a"):
        reading.commit()


def test_what_is_neither_metadata_nor_a_chunk_is_not_committed(store: tstore.sync.Store) -> None:
    transaction = store.transaction()
    zarr_store = ZarrStore(transaction)
    group(transaction, "a").create_array("a", shape=(4,), chunks=(2,), dtype="u1", compressors=None)
    put(zarr_store, "a/c/2", b"\1\2")  # outside of the grid
    put(zarr_store, "notes.txt", b"hello")
    put(zarr_store, "a\n\x1b" + "x" * 10_000, b"hello")
    assert get(zarr_store, "notes.txt") == b"hello"
    with pytest.raises(
        InvalidArgument, match=r"can't be committed.*\n  a\\n\\x1bx+…\n  a/c/2\n.*notes.txt"
    ) as error:
        transaction.commit()
    assert len(str(error.value)) < 500
    assert store.snapshot().version == 0


def test_a_chunk_may_be_set_before_the_metadata_of_its_array(store: tstore.sync.Store) -> None:
    with store.transaction() as transaction:
        other = tstore.sync.open(f"memory://{uuid.uuid4()}").transaction()
        group(other, "a").create_array("a", shape=(4,), chunks=(2,), dtype="u1", compressors=None)
        put(ZarrStore(transaction), "a/c/1", b"\1\2")
        put(ZarrStore(transaction), "a/zarr.json", get(ZarrStore(other), "a/zarr.json") or b"")
    assert store.snapshot().array("a").read().tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("create", "error", "message"),
    [
        (lambda s: zarr.create_array(s, shape=(3,), dtype="f4"), InvalidArgument, "no array at the root"),
        (lambda s: zarr.create_group(s, zarr_format=2), UnsupportedFormat, "pass zarr_format=3"),
        (lambda s: zarr.create_array(s, name="a/../b", shape=(3,), dtype="f4"), ValueError, "a/../b"),
        (lambda s: zarr.create_array(s, name="a\nb", shape=(3,), dtype="f4"), InvalidArgument, "not the path"),
        (
            lambda s: zarr.create_array(s, name="x" * 10_000, shape=(3,), dtype="f4"),
            InvalidArgument,
            "10,000 char",
        ),
        (lambda s: put(s, "/a/zarr.json", b'{"node_type": "group"}'), InvalidArgument, "no outer slashes"),
    ],
    ids=["root", "v2", "dots", "control character", "long", "absolute"],
)
def test_what_tstore_can_not_store_is_refused_at_once(
    store: tstore.sync.Store, create: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        create(ZarrStore(store.transaction()))


@pytest.mark.parametrize(
    "encoding", [None, "v3", {"name": "new"}, {"name": "v2", "configuration": ["."]}], ids=str
)
def test_unknown_chunk_keys_are_refused(store: tstore.sync.Store, encoding: Any) -> None:
    with store.transaction() as tx:
        other = tstore.sync.open(f"memory://{uuid.uuid4()}").transaction()
        group(other, "a").create_array("a", shape=(3,), dtype="u1")
        fields = {**json.loads(get(ZarrStore(other), "a/zarr.json") or b""), "chunk_key_encoding": encoding}
        with pytest.raises(UnsupportedFormat, match="chunk keys"):
            put(ZarrStore(tx), "a/zarr.json", json.dumps(fields).encode())


def test_each_chunk_has_one_key(store: tstore.sync.Store) -> None:
    with store.transaction() as transaction:
        transaction.create_array("a", (40, 3), "u1", chunks=(1, 3)).write(7)
    for source in (store.snapshot(), store.transaction()):
        zarr_store = ZarrStore(source)
        assert get(zarr_store, "a/c/10/0") == bytes([7] * 3)
        for key in (
            "a/c/010/0",
            "a/c/+10/0",
            "a/c/1_0/0",
            "a/c/ 10/0",
            "a/c/١٠/0",
            "a/c/10/0/",
            "a/c/10/-0",
            "a/c/10",
        ):
            assert get(zarr_store, key) is None
            assert not sync(zarr_store.exists(key))


def test_a_key_of_thousands_of_digits_names_no_chunk(store: tstore.sync.Store) -> None:
    with store.transaction() as tx:
        tx.create_array("a", (3,), "int8").write(1)
    snapshot = ZarrStore(store.snapshot())
    assert get(snapshot, "a/c/0") == b"\1\1\1"
    assert get(snapshot, f"a/c/{'9' * 5000}") is None


def test_a_snapshot_is_read_only(store: tstore.sync.Store) -> None:
    with store.transaction() as transaction:
        group(transaction, "a").create_array("a", data=VALUES)
    zarr_store = ZarrStore(store.snapshot())
    assert (zarr_store.read_only, zarr_store.supports_writes) == (True, False)
    with pytest.raises(ValueError, match="read-only"):
        zarr.open_group(zarr_store, mode="r+")["a"][:] = 1
    with pytest.raises(Misuse, match="can't be written; pass a transaction"):
        zarr_store.with_read_only(False)
    with pytest.raises(InvalidArgument, match="made of a snapshot or a transaction, not of"):
        ZarrStore(store)


def test_a_missing_chunk_of_a_dense_array_is_an_error_and_not_the_fill_value(store: tstore.sync.Store) -> None:
    with store.transaction() as transaction:
        transaction.create_array("a", (40,), "i4", chunks=(10,))[:10].write(np.arange(10))
    array = group(store.snapshot())["a"]
    assert array[:10].tolist() == list(range(10))
    with pytest.raises(NotFound, match=r"chunk \(1,\) of a was never written"):
        array[5:15]


def test_a_part_of_a_chunk_is_read_and_verified_without_the_rest(store: tstore.sync.Store) -> None:
    values = np.random.default_rng(0).integers(0, 255, 3 * MIB, np.uint8)
    with store.transaction() as transaction:
        array = transaction.create_array("a", values.shape, "u1", chunks=values.shape)
        array.write(values)
    snapshot = store.snapshot()
    data = values.tobytes()
    for part, expected in (
        (RangeByteRequest(MIB - 5, MIB + 5), data[MIB - 5 : MIB + 5]),
        (RangeByteRequest(7, 7), b""),
        (OffsetByteRequest(3 * MIB - 9), data[-9:]),
        (SuffixByteRequest(20), data[-20:]),
        (SuffixByteRequest(4 * MIB), data),
    ):
        assert get(ZarrStore(snapshot), "a/c/0", part) == expected
    [pack] = Path(store.url).glob("txn/*/pack*")
    with pack.open("r+b") as file:
        file.seek(-1, 2)
        file.write(bytes([data[-1] ^ 1]))
    assert get(ZarrStore(snapshot), "a/c/0", RangeByteRequest(0, 2 * MIB)) == data[: 2 * MIB]
    with pytest.raises(Corrupt, match="a, chunk number 0: checksum mismatch"):
        get(ZarrStore(snapshot), "a/c/0", SuffixByteRequest(1))


def test_the_members_of_a_group_are_listed_without_a_read_of_each(
    store: tstore.sync.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.transaction() as transaction:
        for number in range(300):
            transaction.create_array(f"g/a{number:03d}", (2,), "i4").write(np.arange(2))
    snapshot = store.snapshot()
    snapshot.paths()
    monkeypatch.setattr("tstore.zarr.hierarchy.read_part", None)  # a read of a chunk fails
    assert len(list(group(snapshot)["g"].members())) == 300


def test_groups_that_only_paths_name_are_groups(store: tstore.sync.Store) -> None:
    with store.transaction() as transaction:
        transaction.create_array("a/b/c", (2,), "i4").write(np.arange(2))
    assert keys(ZarrStore(store.snapshot())) == [
        "a/b/c/c/0",
        "a/b/c/zarr.json",
        "a/b/zarr.json",
        "a/zarr.json",
        "zarr.json",
    ]
    assert [name for name, _ in group(store.snapshot()).members(max_depth=None)] == ["a", "a/b", "a/b/c"]
    assert keys(ZarrStore(tstore.sync.open(f"memory://{uuid.uuid4()}").snapshot())) == []


def test_arrays_of_dtypes_that_zarr_lacks_hide_no_others(store: tstore.sync.Store) -> None:
    xarray = pytest.importorskip("xarray")
    with store.transaction() as tx:
        for path, dtype in (("run/t", "f4"), ("run/b", "bfloat16"), ("run/i", "int4"), ("only/e", "float8_e5m2")):
            tx.create_array(path, shape=(3,), dtype=dtype, dimension_names=("x",)).write(1)
    reads: list[Callable[[ZarrStore], Any]] = [
        lambda s: [sorted(zarr.open_group(s, mode="r").keys()), ["only", "run"]],
        lambda s: [list(zarr.open_group(s, mode="r")["run"].keys()), ["t"]],
        lambda s: [sorted(n for n, _ in zarr.open_group(s, mode="r").members(None)), ["only", "run", "run/t"]],
        lambda s: [list(xarray.open_zarr(s, group="run", consolidated=False)), ["t"]],
    ]
    for read in reads:
        plain = ZarrStore(store.snapshot())
        with pytest.warns(UserWarning, match=r"not listed; read them .*: (only/e, )?run/b, run/i$"):
            listed, expected = read(plain)
        assert listed == expected
    assert len(plain.get_sync("run/b/c/0").to_bytes()) == 6
    assert json.loads(plain.get_sync("run/b/zarr.json").to_bytes())["data_type"] == "bfloat16"
    with pytest.warns(UserWarning, match="arrays are: only/e$"):
        assert not asyncio.run(plain.is_empty("only"))


def test_xarray_writes_and_reads(store: tstore.sync.Store) -> None:
    xarray = pytest.importorskip("xarray")
    data = xarray.Dataset({"t": (("y", "x"), VALUES)}, coords={"y": np.arange(60)}, attrs={"title": "test"})
    with store.transaction() as transaction:
        data.to_zarr(ZarrStore(transaction), group="run", mode="w")
    assert store.snapshot().array("run/t").dimension_names == ("y", "x")
    with xarray.open_zarr(ZarrStore(store.snapshot()), group="run") as back:
        assert back.compute().identical(data)


@pytest.mark.parametrize("kind", ["array", "group"])
def test_numbers_that_json_lacks_become_text_in_attributes(store: tstore.sync.Store, kind: str) -> None:
    """zarr-python writes them as NaN and Infinity, for example xarray's `missing_value`."""
    with store.transaction() as transaction:
        root = group(transaction, "a")
        node = root.create_array("a", shape=(2,), dtype="f4") if kind == "array" else root.create_group("a")
        node.attrs.update({"missing_value": float("nan"), "range": [float("-inf"), {"to": float("inf")}]})
    expected = {"missing_value": "NaN", "range": ["-Infinity", {"to": "Infinity"}]}
    assert store.snapshot().attributes("a") == expected
    assert dict(group(store.snapshot())["a"].attrs) == expected


@pytest.mark.parametrize("kind", ["array", "group"])
def test_attributes_that_are_no_unicode_are_refused_when_they_are_set(store: tstore.sync.Store, kind: str) -> None:
    transaction = store.transaction()
    root = group(transaction, "a")
    node = root.create_array("a", shape=(2,), dtype="f4") if kind == "array" else root.create_group("a")
    with pytest.raises((InvalidArgument, UnsupportedFormat), match=r"not valid Unicode|stored as JSON"):
        node.attrs["unit"] = "\ud800"
    transaction.commit()
    assert store.snapshot().attributes("a") == {}


def test_dask_reads_in_processes(store: tstore.sync.Store) -> None:
    with store.transaction() as transaction:
        group(transaction, "a").create_array("a", shape=VALUES.shape, chunks=(10, 100), dtype="f4")[:] = VALUES
    array = dask_array.from_zarr(group(store.snapshot())["a"])
    assert float(array.sum().compute(scheduler="processes", num_workers=2)) == float(VALUES.sum())


def test_a_store_is_pickled_by_its_version(store: tstore.sync.Store) -> None:
    with store.transaction() as transaction:
        group(transaction, "a").create_array("a", data=np.arange(3))
        again = pickle.loads(pickle.dumps(ZarrStore(transaction)))
        assert again == ZarrStore(transaction)
        pickled = pickle.dumps(ZarrStore(transaction))
    snapshot = store.snapshot()
    with store.transaction() as transaction:
        transaction.array("a").write(np.arange(3) + 1)
    again = pickle.loads(pickle.dumps(ZarrStore(snapshot)))
    assert zarr.open_group(again, mode="r")["a"][:].tolist() == [0, 1, 2]
    elsewhere = pickle.loads(pickled.replace(transaction.id.encode(), b"x" * len(transaction.id)))
    with pytest.raises(Misuse, match="can only be used in the process that began it"):
        zarr.open_group(elsewhere)


async def test_blocking_functions_of_zarr_work_in_async_code(tmp_path: Path) -> None:
    store = await tstore.open(tmp_path / "s")
    async with store.transaction() as transaction:
        zarr_store = ZarrStore(transaction)
        zarr.open_group(zarr_store).create_array("a", data=np.arange(4))
        root = await zarr.api.asynchronous.open_group(store=zarr_store)
        array: Any = await root.getitem("a")
        await array.setitem(slice(1, 2), 9)
        assert (await (await transaction.array("a")).read()).tolist() == [0, 9, 2, 3]
    assert group(await store.snapshot())["a"][:].tolist() == [0, 9, 2, 3]


def test_appended_values_and_chunks_of_zarr_are_one_change(store: tstore.sync.Store) -> None:
    with store.transaction() as transaction:
        transaction.create_array("a", (4,), "u1", chunks=(2,)).write(np.arange(4, dtype="u1"))
    other = store.transaction()
    other.array("a").append(np.array([10, 11], "u1"))
    root = group(other, "r+")
    assert root["a"][:].tolist() == [0, 1, 2, 3, 10, 11]
    root["a"][4:6] = np.array([12, 13], "u1")
    with store.transaction() as transaction:
        transaction.array("a").append(np.array([20, 21], "u1"))
    with pytest.raises(Conflict):
        other.commit()
    assert store.snapshot().array("a").read().tolist() == [0, 1, 2, 3, 20, 21]


def test_a_group_is_listed_without_its_chunks(store: tstore.sync.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.transaction() as tx:
        tx.create_array("g/a", (100,), "i4", (1,)).write(7)
        tx.create_array("b", (100,), "i4", (1,)).write(7)

    async def names(folder: str) -> list[str]:
        return [name async for name in ZarrStore(store.snapshot()).list_dir(folder)]

    monkeypatch.setattr(ChunkKeys, "below", lambda *_: pytest.fail("chunks are listed"))
    assert asyncio.run(names("")) == ["b", "g", "zarr.json"]
    assert asyncio.run(names("g")) == ["a", "zarr.json"]


async def test_metadata_in_pages_is_listed_with_few_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds
) -> None:
    thresholds(PAGE_BYTES=500, SHORT_MANIFEST=500, INLINE_MANIFEST_BYTES=0)
    tree = {f"g{g:02}": {f"a{a}": np.full(4, a) for a in range(4)} for g in range(90)}
    await tstore.save(tmp_path, tree, 0)
    requests: list[int] = []  # pages in each
    read = PageReader._read

    def counted(self: PageReader, key: str, places: list[Any]) -> Any:
        with pytest.raises(RuntimeError):  # in a thread without a loop, since reading blocks
            asyncio.get_running_loop()
        requests.append(len(places))
        return read(self, key, places)

    monkeypatch.setattr(PageReader, "_read", counted)

    async def names(folder: str) -> list[str]:
        snapshot = await (await tstore.open(tmp_path)).snapshot()
        requests.clear()
        return [name async for name in ZarrStore(snapshot).list_dir(folder)]

    assert await names("") == [*tree, "zarr.json"]
    every = sum(requests)
    assert every > 40
    assert len(requests) <= 3
    assert await names("g30") == ["a0", "a1", "a2", "a3", "zarr.json"]
    assert sum(requests) <= 6


async def test_whether_a_chunk_exists_and_its_size_take_no_read_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await tstore.open(tmp_path)
    async with store.transaction() as tx:
        await (await tx.create_array("a", (1 << 16,), "i8", (1 << 15,))).write(1)
    tx = store.transaction()
    for source in (await store.snapshot(), tx):
        view = ZarrStore(source)
        assert await view.exists("a/zarr.json")
        read = count_reads(monkeypatch)
        assert [await view.exists(f"a/c/{i}") for i in range(3)] == [True, True, False]
        assert await view.getsize("a/c/1") == 8 << 15
        assert read == []
        monkeypatch.undo()
    await tx.abort()


async def test_a_part_of_a_chunk_is_read_without_the_rest_in_a_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, values = await tstore.open(tmp_path), np.arange(1 << 19)
    async with store.transaction() as tx:
        await (await tx.create_array("a", values.shape, "i8", values.shape)).write(values)
    async with store.transaction() as tx:
        view = ZarrStore(tx)
        assert await view.exists("a/c/0")
        read = count_reads(monkeypatch)
        data = await view.get("a/c/0", default_buffer_prototype(), RangeByteRequest(3 << 20, (3 << 20) + 16))
        assert data is not None
        assert data.to_bytes() == values[3 << 17 :][:2].tobytes()
        assert 0 < sum(read) <= 1 << 20


@pytest.mark.parametrize("change", ["resize", "another dtype"])
async def test_a_change_of_an_array_while_a_chunk_is_written(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of the chunk is that of the former grid, or its bytes are of the former dtype."""
    store = await tstore.open(tmp_path)
    write = PackSet.write_bytes
    async with store.transaction() as tx:
        array = await tx.create_array("a", (4, 4), "u1", (2, 2), sparse=True)
        await array.write(1)

        async def write_and_change(self: PackSet, chunks: Any) -> Any:
            written = await write(self, chunks)
            if change == "resize":
                await array.resize((4, 6))
            else:
                await tx.delete("a")
                await tx.create_array("a", (4, 4), "i1", (2, 2), sparse=True)
            return written

        monkeypatch.setattr(PackSet, "write_bytes", write_and_change)
        with pytest.raises(Misuse, match="a was resized while a chunk was written"):
            await ZarrStore(tx).set("a/c/1/0", default_buffer_prototype().buffer.from_bytes(bytes([200] * 4)))
        expected = [[1, 1, 1, 1, 0, 0]] * 4 if change == "resize" else [[0] * 4] * 4
        assert (await (await tx.array("a")).read()).tolist() == expected


def test_a_pickle_of_the_store_of_a_transaction_stays_read_only(store: tstore.sync.Store) -> None:
    with store.transaction() as tx:
        for read_only in (False, True):
            assert pickle.loads(pickle.dumps(ZarrStore(tx, read_only=read_only))).read_only is read_only
        assert ZarrStore(tx, read_only=True) != ZarrStore(tx) == ZarrStore(tx, read_only=False)


XARRAY_ATTRIBUTES = {"title": "test"}


def written_by_xarray(
    store: tstore.sync.Store, place: str | None, datasets: list[tuple[Any, dict[str, Any]]]
) -> Any:
    """Write datasets with `to_zarr` in transactions that are open at the same time; return the result."""
    xarray = pytest.importorskip("xarray")
    coords = {"y": np.arange(8), "x": np.arange(6.0)}
    base = xarray.Dataset({"t": (("y", "x"), np.ones((8, 6)))}, coords=coords, attrs=XARRAY_ATTRIBUTES)
    with store.transaction() as tx:
        base.to_zarr(ZarrStore(tx), group=place, mode="w", encoding={"t": {"chunks": (2, 6)}}, consolidated=False)
    transactions = [store.transaction() for _ in datasets]
    for tx, (variables, options) in zip(transactions, datasets, strict=True):
        used = {} if "region" in options else coords
        data = xarray.Dataset(variables, coords=used, attrs=XARRAY_ATTRIBUTES)
        data.to_zarr(ZarrStore(tx), group=place, consolidated=False, **options)
    for tx in transactions:
        tx.commit()
    return xarray.open_zarr(ZarrStore(store.snapshot()), group=place, consolidated=False)


@pytest.mark.parametrize("place", [None, "run"])
def test_parallel_writers_of_other_variables_of_xarray_all_commit(
    store: tstore.sync.Store, place: str | None
) -> None:
    writers = [({f"v{i}": (("y", "x"), np.full((8, 6), float(i)))}, {"mode": "a"}) for i in range(4)]
    with written_by_xarray(store, place, writers) as back:
        assert [int(back[f"v{i}"].sum()) for i in range(4)] == [0, 48, 96, 144]
        assert back["t"].values.all()
        assert back.attrs == XARRAY_ATTRIBUTES


@pytest.mark.parametrize("place", [None, "run"])
@pytest.mark.parametrize("mode", ["a", "r+"])
@pytest.mark.parametrize("fill", [0, np.nan], ids=str)
def test_parallel_writers_of_other_regions_of_xarray_all_commit(
    store: tstore.sync.Store, place: str | None, mode: str, fill: float
) -> None:
    """Also if some write fill values: NaN is that of xarray for numbers."""
    values = [7, fill, 9, fill]
    writers = [
        ({"t": (("y", "x"), np.full((2, 6), v))}, {"mode": mode, "region": {"y": slice(2 * i, 2 * i + 2)}})
        for i, v in enumerate(values)
    ]
    with written_by_xarray(store, place, writers) as back:
        np.testing.assert_array_equal(back["t"].values, np.repeat(values, 2)[:, None] * np.ones(6))


def test_dask_stores_into_an_array_of_a_transaction(store: tstore.sync.Store) -> None:
    values = dask_array.from_array(VALUES, chunks=(13, 17))
    with store.transaction() as tx:
        array = tx.create_array("a", VALUES.shape, "f4", chunks=(16, 30))
        dask_array.store(values, array)
        region = tx.create_array("b", (80, 100), "f4", chunks=(16, 30), sparse=True)
        dask_array.store(values, region, regions=(slice(20, 80), slice(None)), lock=False)
    np.testing.assert_array_equal(store.snapshot().array("a").read(), VALUES)
    np.testing.assert_array_equal(store.snapshot().array("b")[20:].read(), VALUES)
    with pytest.raises(Misuse, match="open a transaction"):
        dask_array.store(values, store.snapshot().array("a"))


async def test_dask_can_not_store_into_an_async_array(tmp_path: Path) -> None:
    async with (await tstore.open(tmp_path)).transaction() as tx:
        array = await tx.create_array("a", VALUES.shape, "f4", sparse=True)
        with pytest.raises(Misuse, match=r"can't be awaited.* tstore.sync"):
            dask_array.store(dask_array.from_array(VALUES), array)


@pytest.mark.parametrize(
    "write",
    [
        lambda view: zarr.save(view, VALUES),
        lambda view: zarr.save_array(view, VALUES),
        lambda view: dask_array.from_array(VALUES).to_zarr(view),
        lambda view: zarr.create_array(view, data=VALUES),
    ],
    ids=["zarr.save", "zarr.save_array", "dask.to_zarr", "zarr.create_array"],
)
def test_an_array_at_the_root_is_refused_with_what_to_write(store: tstore.sync.Store, write: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"no array at the root.*component='x'"):
        write(ZarrStore(store.transaction()))


def test_what_the_error_of_an_array_at_the_root_advises_works(store: tstore.sync.Store) -> None:
    with store.transaction() as tx:
        view = ZarrStore(tx)
        zarr.save(view, x=VALUES)
        zarr.create_array(view, name="y", data=VALUES)
        dask_array.from_array(VALUES).to_zarr(view, component="z")
    for name in "xyz":
        np.testing.assert_array_equal(store.snapshot().array(name).read(), VALUES)


def test_a_chunk_of_another_length_than_the_array_has_is_refused(store: tstore.sync.Store) -> None:
    with store.transaction() as tx:
        root = group(tx, "a")
        former = root.create_array("a", shape=(4,), chunks=(2,), dtype="f8", compressors=None)
        root.create_array("a", shape=(4,), chunks=(2,), dtype="f4", compressors=None, overwrite=True)[:] = 1
        with pytest.raises(Misuse, match=r"a, chunk \(0,\): expected 8 encoded bytes, not 16; .*open it again"):
            former[:] = 7
    assert store.snapshot().array("a").read().tolist() == [1] * 4
