"""A flipped bit, a truncated or a lost object is an error that names the place, never a wrong value."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import tstore
from tests.support import fileservers
from tstore.core.format.objects.records import Record, Root
from tstore.core.storage.base import Storage
from tstore.core.storage.connect import connect
from tstore.core.storage.objects import Durability
from tstore.errors import Corrupt, NotAStore, NotFound, TStoreError, UnsupportedFormat
from tstore.lab.simulation.scenario import override_constants
from tstore.service.server.kinds import Kind, kind_of

TREES = {
    0: {
        "w": np.arange(1200, dtype="f4").reshape(30, 40),
        "b": np.arange(3),
        "e": np.linspace(0, 1, 40, dtype="f4"),
    },
    1: {
        "w": np.arange(1200, dtype="f4").reshape(30, 40),
        "b": np.arange(3) + 7,
        "e": np.linspace(1, 2, 40, dtype="f4"),
    },
}


ROOT = 8
"""The version with a root; the store has one more."""

STRIDES = [5, pytest.param(1, marks=pytest.mark.deep)]
"""Each fifth byte, in turn with another bit flipped, or all of them."""


@pytest.fixture(autouse=True, scope="module")
def frequent_roots() -> Iterator[None]:
    with override_constants(ROOT_EVERY=ROOT):
        yield


async def objects(storage: Storage) -> dict[str, bytes]:
    return {key: await storage.get(key) for key in await storage.list("")}


@pytest.fixture(scope="module")
def good(frequent_roots: None) -> dict[str, bytes]:
    """The objects of a small store with a pack, inline chunks, a root and the hint."""

    async def make() -> dict[str, bytes]:
        url = f"memory://{uuid.uuid4()}"
        store = await tstore.open(url)
        for step, tree in TREES.items():
            await tstore.save(store, tree, step, codecs={"e": "e4m3"})
        for _ in range(ROOT + 1 - len(TREES)):
            async with store.transaction(durability="none"):
                pass
        return await objects(store.log.storage)

    contents = asyncio.run(make())
    assert {key.partition("/")[0] for key in contents} == {"tstore.json", "commits", "txn", "roots", "latest"}
    return contents


@pytest.fixture
def url(good: dict[str, bytes]) -> str:
    return f"memory://{uuid.uuid4()}"


async def put(url: str, contents: dict[str, bytes]) -> None:
    storage = connect(url)
    for key in await storage.list(""):
        if key not in contents:
            await storage.delete(key)
    for key, data in contents.items():
        await storage.replace(key, data)


EXPECTED: dict[int, dict[str, Any]] = {}


async def outcome(url: str) -> tuple[int, list[str]]:
    """Return the number of steps restored and the faults that verify finds; wrong values fail the test."""
    restored = 0
    faults = []
    for step, saved in TREES.items():
        try:
            tree = await tstore.restore(url, step)
        except TStoreError:
            continue
        except MemoryError as error:  # a corrupt length was trusted
            raise AssertionError(f"step {step}") from error
        assert set(tree) == set(saved)
        for name, values in tree.items():
            assert values.tobytes() == EXPECTED[step][name].tobytes(), (step, name)
        restored += 1
    try:
        faults = (await (await tstore.open(url, "r")).verify()).faults
    except TStoreError as error:
        faults = [str(error)]
    return restored, faults


@pytest.fixture(autouse=True, scope="module")
def expected(good: dict[str, bytes]) -> Iterator[None]:
    async def read() -> None:
        url = f"memory://{uuid.uuid4()}"
        await put(url, good)
        for step in TREES:
            EXPECTED[step] = await tstore.restore(url, step)
        assert await outcome(url) == (2, [])

    asyncio.run(read())
    yield
    EXPECTED.clear()


def kinds(good: dict[str, bytes]) -> dict[str, list[str]]:
    commits = sorted(k for k in good if k.startswith("commits/"))
    return {
        "pack": [k for k in good if "/pack-" in k],
        "records": [commits[0], commits[1]],
        "empty record": [commits[-1]],
        "root": [k for k in good if k.startswith("roots/")],
    }


def short(good: dict[str, bytes], versions: int) -> dict[str, bytes]:
    """The store as of one of its first versions, which keeps a thousand runs of `verify` short."""
    later = sorted(k for k in good if k.startswith("commits/"))[versions:]
    return {k: data for k, data in good.items() if k not in later and not k.startswith(("roots/", "latest"))}


async def read_all(arrays: list[tstore.Array]) -> None:
    for array in arrays:
        await array.read()


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("kind", ["pack", "records", "empty record", "root"])
async def test_every_flipped_byte_is_detected(url: str, good: dict[str, bytes], kind: str, stride: int) -> None:
    keys = kinds(good)[kind]
    assert keys
    versions = {"pack": 2, "records": 4}.get(kind)
    await put(url, good if versions is None else short(good, versions))
    storage = connect(url)
    store = await tstore.open(url, "r")
    snapshots = [await store.snapshot(f"step/{step}") for step in TREES]
    arrays = [await snapshot.array(path) for snapshot in snapshots for path in snapshot.paths()]
    for key in keys:
        data = good[key]
        for at in range(0, len(data), stride):
            bad = bytearray(data)
            bad[at] ^= 1 << (at % 8)
            await storage.replace(key, bytes(bad))
            if at % 29 == 0 or at < 40 or at > len(data) - 40:
                restored, faults = await outcome(url)
                assert faults, (key, at)
                assert any(key in fault for fault in faults), (key, at, faults)
                assert restored < 2 or kind in ("root", "empty record")
            elif kind == "pack":
                with pytest.raises(Corrupt, match=key):
                    await read_all(arrays)
            else:
                store = await tstore.open(url, "r")
                with pytest.raises(Corrupt, match=key):
                    await store.log.reader.objects.read(key, Root if kind == "root" else Record)
        await storage.replace(key, data)
    assert await outcome(url) == (2, [])


@pytest.mark.parametrize("key", ["latest", "tstore.json"])
async def test_flipped_bytes_of_the_hint_and_the_marker_never_give_wrong_values(
    url: str, good: dict[str, bytes], key: str
) -> None:
    await put(url, good)
    storage = connect(url)
    for at in range(len(good[key])):
        for bit in range(8):
            bad = bytearray(good[key])
            bad[at] ^= 1 << bit
            await storage.replace(key, bytes(bad))
            if key == "latest":
                assert (await (await tstore.open(url, "r")).snapshot()).version == ROOT + 1
            else:
                try:
                    opened = await tstore.open(url, "r")
                except (Corrupt, UnsupportedFormat):
                    continue
                assert opened.uuid == json.loads(good[key])["uuid"]
            if bit == 0:
                assert (await outcome(url))[0] == 2


@pytest.mark.parametrize("kind", ["pack", "records", "empty record", "root"])
async def test_every_truncation_is_detected(url: str, good: dict[str, bytes], kind: str) -> None:
    await put(url, good)
    storage = connect(url)
    for key in kinds(good)[kind]:
        data = good[key]
        for length in {0, 1, 7, 8, 23, 24, 25, len(data) // 2, *range(len(data) - 20, len(data))}:
            await storage.replace(key, data[:length])
            restored, faults = await outcome(url)
            # an empty root is as none, which only costs time: a repair puts it in place of one
            assert faults or (kind == "root" and not length), (key, length)
            assert restored < 2 or kind in ("root", "empty record")
        await storage.replace(key, data + b"\0")
        restored, faults = await outcome(url)
        assert restored == 2 or faults
        await storage.replace(key, data)


@pytest.mark.parametrize("kind", ["pack", "records"])
async def test_a_missing_object_is_named(url: str, good: dict[str, bytes], kind: str) -> None:
    for key in kinds(good)[kind]:
        await put(url, {k: v for k, v in good.items() if k != key})
        restored, faults = await outcome(url)
        assert restored < 2
        assert any(key in fault for fault in faults), faults


async def test_an_object_in_place_of_another_is_detected(url: str, good: dict[str, bytes]) -> None:
    packs = kinds(good)["pack"]
    await put(url, good)
    await tstore.save(
        url, {"w": TREES[0]["w"] + 1, "b": np.arange(3), "e": TREES[0]["e"]}, 2, codecs={"e": "e4m3"}
    )
    storage = connect(url)
    sizes = {k: await storage.size(k) for k in await storage.list("txn/") if "/pack-" in k}
    [first, second] = [k for k, size in sizes.items() if size == max(sizes.values(), key=lambda n: n or 0)]
    assert (first in packs) != (second in packs)
    mine, other = (first, second) if first in packs else (second, first)
    await storage.replace(mine, await storage.get(other))
    restored, faults = await outcome(url)
    assert restored == 0
    assert any("w, chunk" in fault for fault in faults)


async def test_a_missing_or_changed_manifest_is_named(url: str) -> None:
    """A manifest too long for its record is a separate object."""
    tree = {f"p{i}": np.arange(3) + i for i in range(600)}
    await tstore.save(url, tree, 0)
    storage = connect(url)
    [key] = [k for k in await storage.list("txn/") if "/manifest" in k]
    data = await storage.get(key)
    for bad in (None, data[:-1], data + b"\0", data[:100] + bytes([data[100] ^ 4]) + data[101:], b""):
        await storage.delete(key)
        if bad is not None:
            await storage.replace(key, bad)
        with pytest.raises((Corrupt, NotFound), match=key):
            await tstore.restore(url)
        report = await (await tstore.open(url)).verify()
        assert any(key in fault for fault in report.faults)


async def test_a_manifest_in_place_of_another_is_detected(url: str) -> None:
    """The manifest is intact, but not the one that the record refers to."""
    for step in range(2):
        await tstore.save(url, {f"p{i}": np.arange(3) + i + step for i in range(600)}, step)
    storage = connect(url)
    first, second = sorted(k for k in await storage.list("txn/") if "/manifest" in k)
    expected = {key: await storage.get(key) for key in (first, second)}
    await storage.replace(first, expected[second])
    await storage.replace(second, expected[first])
    for step in range(2):
        with pytest.raises(Corrupt, match="/manifest"):
            await tstore.restore(url, step)
    report = await (await tstore.open(url)).verify()
    assert all(any(key in fault for fault in report.faults) for key in expected)


async def test_verify_names_every_fault(url: str, good: dict[str, bytes]) -> None:
    pack = max(kinds(good)["pack"], key=lambda k: len(good[k]))
    bad = dict(good)
    bad[pack] = bad[pack][:10] + b"\xff" + bad[pack][11:]
    root, record = kinds(good)["root"][0], kinds(good)["empty record"][0]
    bad[root] = bad[root][:-1]
    bad[record] = bad[record][:30] + b"\xff" + bad[record][31:]
    await put(url, bad)
    report = await (await tstore.open(url, "r")).verify()
    assert not report.ok
    assert len(report.faults) == 3
    for name, text in [(pack, "w, chunk (0, 0)"), (root, "checksum"), (record, "checksum")]:
        assert any(name in fault and text in fault for fault in report.faults), (name, report.faults)
    assert (report.versions, report.arrays) == (ROOT + 1, 3)


async def test_the_error_of_a_read_names_path_chunk_and_pack(url: str) -> None:
    store = await tstore.open(url)
    async with store.transaction() as tx:
        w = await tx.create_array("deep/w", (4, 4096), "float64", (2, 2048))
        await w.write(np.random.default_rng(0).random((4, 4096)))
    [pack] = await store.log.storage.list("txn/")
    data = bytearray(await store.log.storage.get(pack))
    data[-1] ^= 1
    await store.log.storage.replace(pack, bytes(data))
    w = await (await store.snapshot()).array("deep/w")
    await w[:, :2048].read()
    with pytest.raises(Corrupt, match=rf"deep/w, chunk \(1, 1\).*{url}: {pack}"):
        await w[3, 4000].read()
    out = np.zeros((2, 4096))
    with pytest.raises(Corrupt, match=r"chunk \(1, 1\)"):
        await w[2:].read(out=out)


Change = Callable[[bytes], bytes]


def newer(data: bytes) -> bytes:
    body = data[:7] + b"\xff" + data[8:-16]
    return body + xxhash.xxh3_128_digest(body)


async def test_a_newer_format_is_unsupported_not_corrupt(url: str, good: dict[str, bytes]) -> None:
    record = sorted(k for k in good if k.startswith("commits/"))[-1]
    await put(url, {**good, record: newer(good[record])})
    with pytest.raises(UnsupportedFormat, match=record):
        await tstore.restore(url)
    [fault] = (await (await tstore.open(url)).verify()).faults
    assert record in fault
    assert "install a newer" in fault
    marker = json.loads(good["tstore.json"])
    for fields in ({**marker, "format": 2}, {"format": 3, "something": "else"}):
        await put(url, {**good, "tstore.json": json.dumps(fields).encode()})
        with pytest.raises(UnsupportedFormat, match="install a newer"):
            await tstore.open(url)
    assert await connect(url).get("tstore.json") == json.dumps(fields).encode()


@pytest.mark.parametrize(
    "marker", [b"", b"{}", b"[]", b"tstore", b'{"format": "1"}', b'{"format":1,"uuid":"u"}', b"\xff"]
)
async def test_a_marker_that_does_not_parse_is_corrupt(url: str, good: dict[str, bytes], marker: bytes) -> None:
    await put(url, {**good, "tstore.json": marker})
    for mode in ("r", "a", "x"):
        with pytest.raises(Corrupt, match=r"tstore\.json"):
            await tstore.open(url, mode)  # type: ignore[arg-type]


async def test_a_marker_without_a_checksum_is_accepted(url: str, good: dict[str, bytes]) -> None:
    fields = json.loads(good["tstore.json"])
    del fields["checksum"]
    await put(url, {**good, "tstore.json": json.dumps(fields).encode()})
    assert await outcome(url) == (2, [])
    store = await tstore.open(url)
    assert store.uuid == fields["uuid"]
    fields["uuid"] = "x" + fields["uuid"][1:]
    await put(url, {**good, "tstore.json": json.dumps(fields).encode()})
    with pytest.raises(Corrupt, match=r"tstore\.json"):
        await tstore.copy(store, f"{url}-copy", at=1)


async def test_a_store_without_its_marker_is_not_recreated(url: str, good: dict[str, bytes]) -> None:
    await put(url, {k: v for k, v in good.items() if k != "tstore.json"})
    for mode in ("r", "a", "x"):
        with pytest.raises(NotAStore):
            await tstore.open(url, mode)  # type: ignore[arg-type]


async def test_damage_to_one_array_leaves_the_others_readable(tmp_path: Path) -> None:
    tree = {f"w{i}": np.random.default_rng(i).random(20_000) for i in range(4)}
    await tstore.save(tmp_path / "s", tree, 0)
    packs = sorted((tmp_path / "s" / "txn").rglob("pack-*"))
    with packs[0].open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 0x10]))
    results = await asyncio.gather(
        *[tstore.restore(tmp_path / "s", only=name) for name in tree], return_exceptions=True
    )
    [bad] = [i for i, f in enumerate(results) if isinstance(f, Corrupt)]
    assert f"w{bad}, chunk" in str(results[bad])
    for i, values in enumerate(tree.values()):
        assert i == bad or (results[i][f"w{i}"] == values).all()  # type: ignore[index]


async def test_a_committed_record_cannot_be_created_again(url: str) -> None:
    """The number of a version is used only once."""
    await tstore.save(url, {"x": np.zeros(1)}, 0)
    storage = connect(url)
    with pytest.raises(tstore.errors.AlreadyExists):
        await storage.create("commits/" + "1".zfill(20), b"another", Durability.FSYNC)


@pytest.mark.parametrize("codecs", [None, "e4m3"])
@pytest.mark.parametrize("stride", STRIDES)
async def test_every_byte_of_small_chunks_is_checked_by_every_read(
    url: str, codecs: str | None, stride: int
) -> None:
    values = np.random.default_rng(0).normal(size=(32, 64)).astype("f4")
    store = await tstore.open(url)
    async with store.transaction() as tx:
        w = await tx.create_array("w", values.shape, "f4", (4, 8), codecs=codecs)
        await w[:16].write(values[:16])
        await w[16:].write(values[16:])
        await (await tx.create_array("pad", (3000,), "f8", (3000,))).write(1)  # too long to be inline
    w = await (await store.snapshot()).array("w")
    expected = await w.read()
    reads = {
        "all": w,
        "reversed": w[::-1, ::-1],
        "a part": w[1:31, 3:61],
        "steps": w[::3, ::5],
        "a column": w[:, 63],
    }
    storage = store.log.storage
    for pack in [k for k in await storage.list("txn/") if "/pack-" in k]:
        data = await storage.get(pack)
        for at in range(0, len(data), 37 * stride):
            bad = bytearray(data)
            bad[at] ^= 1 << (at % 8)
            await storage.replace(pack, bytes(bad))
            report = await store.verify()
            assert len(report.faults) == 1, at
            if ": pad, chunk" in report.faults[0]:
                continue
            chunk = report.faults[0].partition("chunk (")[2].partition(")")[0]
            row, column = (int(n) for n in chunk.split(","))
            for name, view in reads.items():
                if name == "a column" and column != 7:
                    assert (await view.read() == expected[:, 63]).all()
                    continue
                with pytest.raises(Corrupt) as caught:
                    await view.read()
                assert f"w, chunk ({row}, {column})" in str(caught.value) or "after it" in str(caught.value), name
        await storage.replace(pack, data)


# ---- files of other programs


async def test_verify_lists_files_of_other_programs(tmp_path: Path) -> None:
    """For example the `zarr.json` that `zarr.open` leaves in a folder; tstore's own names are never listed."""
    store = await tstore.open(tmp_path)
    part = tstore.Shards((4, 3000), "f8", [((slice(0, 2), slice(0, 3000)), np.ones((2, 3000)))])
    wide = {str(i): np.full(2, i) for i in range(400)}  # enough for a separate manifest object
    for _ in range(70):  # enough for a root
        async with store.transaction():
            pass
    await tstore.save(store, wide, 0)
    with pytest.raises(tstore.errors.DeadlineExceeded):
        await tstore.save(store, {"w": part}, 1, host=0, hosts=2, attempt="a", timeout=0.01)
    transaction = (await store.pending())[0].transaction
    for key in ("alive-00000-of-00002", "merging-1-00000-of-00200", "merge-1-00000-of-00200"):
        await store.log.storage.replace(f"txn/{transaction}/{key}", b"")
    (tmp_path / "commits/.0123.tmp").touch()  # left by a killed create
    (tmp_path / ".DS_Store").touch()
    report = await store.verify()
    assert (report.ok, report.foreign) == (True, [])
    keys = await store.log.storage.list("")
    assert {key.split("/")[0] for key in keys} == {"tstore.json", "latest", "commits", "roots", "txn"}
    assert all(kind_of(key) is not None for key in keys)
    foreign = [
        "zarr.json",
        "w/c/0/0",
        "commits/1",
        "commits/notes.txt",
        "txn/loose",
        f"txn/{transaction}/x",
        "late\udcff",
    ]
    for name in foreign:
        assert name.startswith(f"txn/{transaction}") or kind_of(name) in (None, Kind.FOLDER)
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    report = await store.verify()
    assert report.ok
    assert report.foreign == sorted([*foreign[:-1], "late\\udcff"])
    async with fileservers.aiohttp_files(tmp_path) as url, await tstore.open(url, "r") as reader:
        report = await reader.verify()  # the server lists nothing
        assert (report.ok, report.foreign) == (True, [])
