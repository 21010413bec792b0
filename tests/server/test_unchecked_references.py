"""Records that are too expensive to check, or whose manifests have the key of another object."""

from __future__ import annotations

import asyncio
import functools
import struct
import tracemalloc
import uuid
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import tstore
from tests.support.forging import forged, place, sealed
from tests.support.http_server import ADMIN, WRITE, Client, Response, client_of, everybody
from tests.support.thresholds import Thresholds
from tests.support.work import CountedText, counted_work
from tstore.core.format.layout import commit_key
from tstore.core.format.objects.encoding import decode, decode_record, encode
from tstore.core.format.objects.object_ref import reference
from tstore.core.format.objects.records import Collection, Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree.changes import Changes, NodeChange
from tstore.core.format.tree.nodes import Nodes
from tstore.core.format.tree.retention import Ledger
from tstore.core.format.tree.tree import Tree
from tstore.core.log.expiry import ledger_since
from tstore.core.log.reader import LogReader
from tstore.core.runtime import pool
from tstore.core.storage.objects import Durability
from tstore.errors import Corrupt, InvalidArgument
from tstore.service.server import Server


async def test_no_record_names_the_manifest_of_another_transaction(tmp_path: Path) -> None:
    """The ledger does not list it as needed, so a gc would remove it with the transaction that wrote it."""
    url = str(tmp_path / "store")
    await tstore.save(url, {"w": np.arange(10)}, step=0)
    async with Server(url, access=everybody()) as server, client_of(server, WRITE) as client:
        data = encode(Manifest.from_nodes([]))
        assert (await client.create("/txn/other/manifest-1", data)).status == 201
        record = Record("forged", 1, 0.0, manifests=(reference("txn/other/manifest-1", data),))
        response = await client.create("/" + commit_key(2), forged(record))
        assert response.status == 422
        assert b"another transaction" in response.body


@pytest.mark.parametrize("name", ["readme.sh", "roots/00000000000000000064", "txn/other/manifest-1"])
async def test_a_copy_makes_no_object_that_a_forged_reference_names(name: str) -> None:
    source = await tstore.open(f"memory://{uuid.uuid4()}")
    await tstore.save(source, {"w": np.arange(10)}, step=0)
    storage = source.log.storage
    data = encode(Manifest.from_nodes([]))
    await storage.create(name, data, Durability.NONE)
    forgery = Record("forged", 1, 0.0, manifests=(reference(name, data),))
    await place(storage, 2, forged(forgery))
    await place(storage, 3, forged(Record("behind", 2, 0.0)))
    destination = f"memory://{uuid.uuid4()}"
    with pytest.raises(Corrupt, match="00000000000000000002"):
        await tstore.copy(source.url, destination)
    keys = await (await tstore.open(destination, "a")).log.storage.list("")
    assert name not in keys
    with pytest.raises(Corrupt, match="00000000000000000002"):
        await (await tstore.open(source.url, "r")).snapshot()


def test_parts_are_counted_before_any_is_made() -> None:
    fields = [msgspec.msgpack.encode(value) for value in msgspec.structs.astuple(Record("t", 0, 0.0))[:15]]
    parts = b"\xdd" + struct.pack(">I", 1 << 20) + b"\x90" * (1 << 20)
    data = sealed(b"R\1", b"\xdc\x00\x10" + b"".join(fields) + parts)
    for read in (decode_record, lambda data: decode(data, Record)):
        tracemalloc.start()
        try:
            with pytest.raises(Corrupt, match="1024"):
                read(data)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("name", ["tags", "deleted", "manifests", "reused", "dropped", "tagged"])
def test_only_the_collection_of_a_record_is_long(name: str) -> None:
    """A server decodes a record before it checks the scope of the token."""
    names = tuple(f"a{i:018}" for i in range(1 << 19))
    listed: Any = dict.fromkeys(names, 1) if name == "tagged" else names
    if name == "manifests":
        listed = (msgspec.structs.replace(Manifest.from_nodes([]), packs=names),)
    data = forged(Record("t", 0, 0.0, collection=Collection((), (), {}, (), ())), **{name: listed})
    assert len(data) > 8 << 20
    for read in (decode_record, lambda data: decode(data, Record)):
        tracemalloc.start()
        try:
            with pytest.raises(Corrupt, match="only that of a garbage collection may have more"):
                read(data)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


def test_many_tags_are_dropped_from_many() -> None:
    count = 3000
    tree = Tree(1, Nodes(), {CountedText(f"a{i:05}"): 1 for i in range(count)})
    with counted_work() as work:
        after = tree.after(
            2, Record("t", 1, 0.0, dropped=tuple(CountedText(f"b{i:05}") for i in range(count))), []
        )
    assert len(after.tags) == count
    assert work.steps < 10 * count


def test_many_paths_are_deleted_where_many_are_written() -> None:
    """Each concurrent transaction compares itself with such a commit, in its event loop."""
    nodes = {CountedText(f"x/{i}"): NodeChange(True, np.empty(0, np.uint64)) for i in range(200)}
    deleted = tuple(CountedText(f"y/{i}") for i in range(3000))
    with counted_work() as work:
        for mine, other in ((Changes(nodes), Changes({}, deleted)), (Changes({}, deleted), Changes(nodes))):
            assert mine.overlap(other).conflicts == []
    assert work.steps < 20 * (len(nodes) + len(deleted))
    assert Changes(nodes).overlap(Changes({}, ("x/7", "x/99"))).conflicts == ["x/7", "x/99"]
    assert sorted(Changes(nodes).overlap(Changes({}, ("x",))).conflicts) == sorted(nodes)


@pytest.mark.parametrize("void", [False, True])
async def test_only_an_admin_commits_the_record_of_a_repair(tmp_path: Path, void: bool) -> None:
    url = str(tmp_path / "store")
    await tstore.save(url, {"w": np.arange(10)}, step=0)
    async with Server(url, access=everybody()) as server, client_of(server, WRITE) as client:
        data = encode(Record("repair-1", 1, 1.0, void=void, metadata={} if void else {"voided": [1]}))
        response = await client.create("/" + commit_key(2), data)
        assert response.status == 403
        assert b"repair-" in response.body
        assert (await client.with_token(ADMIN).create("/" + commit_key(2), data)).status == 201
    if void:
        assert await tstore.steps(url) == [0]
        return
    with pytest.raises(Corrupt, match="a repair voided that version"):  # but it has a record
        await tstore.steps(url)


async def test_many_voided_versions_are_forgotten_at_once() -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    reader = store.log.reader
    reader.records.voided.update(range(1, 2000))
    with counted_work() as work:
        await reader.trees.drop_voided()
    assert not reader.records.voided
    assert work.steps < 50 * 2000


@pytest.mark.parametrize("path", ["a" + "/a" * 150_000, "a" + "/a" * 256, "a" * 65_537], ids=len)
async def test_readers_refuse_a_path_beyond_its_bounds(path: str) -> None:
    """A search for the paths below a deleted one walks up all other paths."""
    group = b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'
    store = await tstore.open(f"memory://{uuid.uuid4()}", "x")
    node = Manifest.from_nodes([(path, group, True, [])])
    records = [Record("forged", 0, 0.0, manifests=(node,)), Record("deleting", 1, 0.0, deleted=("b",))]
    for version, record in enumerate(records, 1):
        await place(store.log.storage, version, forged(record))
    with pool.without_threads(pause), counted_work() as work:
        with pytest.raises(Corrupt, match=r"has (65,537 char|300,001 char|257 levels)"):
            await (await tstore.open(store.url, "r")).snapshot()
        with pytest.raises(Corrupt, match="more than"):
            decode_record(forged(Record("forged", 0, 0.0, deleted=(path,))))
    assert work.steps < 5000


async def pause() -> None:
    pass


def test_tags_of_a_record_are_counted_before_any_is_made() -> None:
    data = forged(Record("t", 0, 0.0), tags=tuple(f"a{i}" for i in range(65_537)))
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match="65536"):
            decode_record(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


async def create_record(client: Client, version: int, **fields: Any) -> Response:
    """Create a record with these fields as a version."""
    record = Record(f"t{version}", version - 1, 1.0, **fields)
    return await client.create("/" + commit_key(version), encode(record))


async def test_a_server_takes_no_tags_beyond_the_bound(tmp_path: Path) -> None:
    """Otherwise records could add tags until no root or garbage collection can be encoded."""
    url = str(tmp_path / "store")
    await tstore.save(url, {"w": np.arange(10)}, step=0)
    async with Server(url, access=everybody()) as server, client_of(server, WRITE) as client:
        create = functools.partial(create_record, client)
        for version in range(2, 6):
            count = 65_536 - (version == 5)  # with the tag of the checkpoint as many as there may be
            tags = tuple(f"a{version}-{i}" for i in range(count))
            assert (await create(version, tags=tags)).status == 201
        response = await create(6, tags=("more",))
        assert response.status == 422
        assert b"262,145 tags" in response.body
        assert b"262,145 tags" in (await create(6, tagged={"more": 1})).body
        store = await tstore.open(server.url, storage_options={"token": WRITE})
        with pytest.raises(InvalidArgument, match="262,145 tags, more than 262,144; drop some"):
            await tstore.save(store, {"w": np.arange(10)}, step=1)
        async with store.transaction(drop_tag="a2-0", tag="more") as tx:
            await tx.create_group("g")
        assert (await create(7, dropped=("a2-1",))).status == 201
        assert (await create(8, tags=("a2-1",), replaces=True)).status == 201


async def test_long_tags_prevent_no_collection(tmp_path: Path) -> None:
    """The record of a collection has all tags, and may have 32 MiB."""
    url = str(tmp_path / "store")
    await tstore.save(url, {"w": np.arange(10)}, step=0)
    async with Server(url, access=everybody()) as server, client_of(server, WRITE) as client:
        create = functools.partial(create_record, client)
        tags = [f"{i:04}".rjust(1000, "x") for i in range(8388)]
        assert (await create(2, tags=tuple(tags[:4000]))).status == 201
        assert (await create(3, tagged=dict.fromkeys(tags[4000:], 1))).status == 201
        for fields in ({"tags": ("y" * 1000,)}, {"tagged": {"y" * 1000: 1}}):
            assert b"tags of 8,389,006 bytes, more than 8,388,608" in (await create(4, **fields)).body
        store = await tstore.open(server.url, storage_options={"token": WRITE})
        with pytest.raises(InvalidArgument, match="tags of 8,389,006 bytes, more than 8,388,608; drop some"):
            async with store.transaction(tag="y" * 1000):
                pass
        assert (await create(4, tagged=dict.fromkeys(tags[:4000], 1))).status == 201
    assert (await (await tstore.open(url)).collect(tstore.Keep(last=1))).version == 5


async def test_a_restarted_server_reads_the_living_versions_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds
) -> None:
    """Requests that tag may come all at once, or always while others commit; any writer may send them."""
    url = str(tmp_path / "store")
    async with await tstore.open(url) as store:
        for i in range(20):
            await store.transaction(tag=f"t{i}").commit()
    readings: list[int] = []

    async def counted(log: LogReader, collection: int, alive: Any, version: int) -> Ledger:
        readings.append(version)
        ledger = await ledger_since(log, collection, alive, version)
        assert (await client.create(f"/{commit_key(21)}", encode(Record("other", 20, 1.0)))).status == 201
        return ledger

    thresholds(_MAX_FOLLOWED=0)
    monkeypatch.setattr("tstore.service.server.log_state.ledger_since", counted)
    async with Server(url, access=everybody()) as server, client_of(server, WRITE) as client:
        assert (
            await client.create(f"/{commit_key(21)}", encode(Record("bad", 20, 1.0, collected=9)))
        ).status == 422
        records = [encode(Record(f"v{i}", 20, 1.0, tagged={f"x{i}": 1})) for i in range(8)]
        responses = await asyncio.gather(*(client.create(f"/{commit_key(21)}", record) for record in records))
        assert {response.status for response in responses} == {412}
        assert (
            await client.create(f"/{commit_key(22)}", encode(Record("v", 21, 1.0, tagged={"x": 1})))
        ).status == 201
    assert readings == [20]


@pytest.mark.parametrize("earlier", [False, True])
async def test_tags_count_as_memory_of_the_server(earlier: bool, tmp_path: Path, thresholds: Thresholds) -> None:
    thresholds(MAX_MEMORY=1 << 20)
    thresholds(MAX_MEMORY=1 << 20)
    url = str(tmp_path / "store")
    await tstore.save(url, {"w": np.arange(10)}, step=0)
    async with Server(url, access=everybody()) as server, client_of(server, WRITE) as client:
        for version, status in ((2, 201), (3, 422)):
            tags = tuple(f"{version}-{i}".ljust(900, "x") for i in range(800))
            record = Record(f"t{version}", version - 1, 1.0, replaces=True)
            fields: Any = {"tagged": dict.fromkeys(tags, 1)} if earlier else {"tags": tags}
            record = msgspec.structs.replace(record, **fields)
            response = await client.create("/" + commit_key(version), encode(record))
            assert response.status == status
        assert b"all nodes, tags and the references" in response.body


def test_many_tags_are_moved_from_one_version() -> None:
    tags = tuple(CountedText(f"a{i}") for i in range(3000))
    ledger = Ledger()
    with counted_work() as work:
        ledger.add(1, Record("t", 0, 0.0, tags=tags))
        ledger.add(2, Record("u", 1, 0.0, tags=tags[:2000], dropped=tags[2000:2900]))
    assert work.steps < 20 * len(tags)
    assert ledger.alive[1].tags == tags[2900:]
    assert ledger.alive[2].tags == tags[:2000]


def test_many_tags_are_given_to_many_versions() -> None:
    count = 2000
    ledger = Ledger()
    with counted_work() as work:
        for version in range(1, count + 1):
            ledger.add(version, Record(f"t{version}", version - 1, 0.0))
        for number, versions in ((count + 1, range(1, count + 1)), (count + 2, [1] * count)):
            tagged = {CountedText(f"a{i}"): version for i, version in enumerate(versions)}
            ledger.add(number, Record("u", count, 0.0, tagged=tagged))
    assert work.steps < 100 * count
    assert [len(entry.tags) for entry in ledger.alive.values()] == [count, *[0] * (count + 1)]
