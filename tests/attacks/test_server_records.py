"""Records and roots with valid checksums that a client with a token may send, and that would break a store.

Each is refused and leaves nothing behind. Honest clients are not disturbed: they read, commit, verify, collect and
copy as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import math
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

import tstore
from tests.support.forging import placed_in, sealed
from tests.support.http_server import ADMIN, WRITE, Client, client_of, everybody
from tests.support.thresholds import Thresholds
from tstore import Keep
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.checksums import digest
from tstore.core.format.layout import commit_key, root_key
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.objects.encoding import decode
from tstore.core.format.objects.object_ref import ObjectRef, reference
from tstore.core.format.objects.records import Collection, LivingVersion, Part, Record, Root
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree.tree import Tree, group_document
from tstore.errors import Corrupt, Denied, Inconsistent, InvalidArgument
from tstore.lab.simulation.scenario import override_constants
from tstore.service.server import Server, manifests
from tstore.service.server.log_state import LogState, manifest_memory

VALUES = np.arange(40_000.0)
NOW = datetime.timedelta(0)
NEWEST = 4  # the newest version of `filled`
NEXT = NEWEST + 1
META = ArrayMeta.new((4,), "f4", (4,))
CHUNK = np.ones(4, "f4").tobytes()
PACK = "txn/forged/pack-0"


class Place(NamedTuple):
    """A server of a store with three steps and an array, and a client of each scope."""

    folder: Path
    server: Server
    write: Client
    admin: Client
    store: tstore.Store
    collection: Collection
    """The decisions of an honest garbage collection that expires the oldest version."""


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    folder = tmp_path / "store"
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server(folder, access=everybody()))
        store = await stack.enter_async_context(await opened(server))
        await filled(store)
        records = [await store.log.reader.record(version) for version in range(1, NEXT)]
        alive = tuple(
            LivingVersion(v, r.transaction, r.time, r.tags, r.replaces, {}, r.reused)
            for v, r in enumerate(records, 1)
        )
        gone = Collection(alive[1:], (1,), {"step/1": 1}, (), ())
        client = await stack.enter_async_context(client_of(server, WRITE))
        yield Place(folder, server, client, client.with_token(ADMIN), store, gone)


async def opened(server: Server, token: str = WRITE) -> tstore.Store:
    return await tstore.open(server.url, storage_options={"token": token})


async def filled(store: tstore.Store) -> None:
    for step in (1, 2, 3):
        await tstore.save(store, {"w": VALUES + step, "b": np.arange(3)}, step)
    async with store.transaction(tag="own") as tx:
        await (await tx.create_array("x", (4,), "f4", (4,))).write(np.ones(4))


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


KINDS = {Record: b"R", Manifest: b"M", Root: b"T"}


def framed(body: Any, **fields: Any) -> bytes:
    """Return the frame of a body with any content, with other values of some fields.

    `encode` would refuse what readers refuse.
    """
    retags = getattr(body, "dropped", ()) or getattr(body, "tagged", ())
    version = 3 if retags else 2 if getattr(body, "collection", None) else 1
    named = {name: fields.get(name, getattr(body, name)) for name in body.__struct_fields__}
    return frame(KINDS[type(body)], version, body if not fields else list(named.values()))


def frame(kind: bytes, version: int, values: Any) -> bytes:
    return sealed(kind + bytes([version]), msgspec.msgpack.encode(values))


def manifest(
    path: str = "forged",
    *,
    document: bytes = META.document,
    replaces_node: int = True,
    chunk: int = 0,
    **run: Any,
) -> Manifest:
    """Return the manifest of one array with one inline chunk."""
    data = run.pop("pack", CHUNK)
    table = ChunkTable.from_rows(
        [ChunkRow(chunk, data, run.pop("offset", 0), run.pop("length", len(CHUNK)), digest(CHUNK))]
    )
    return Manifest.from_nodes([(path, document, replaces_node, [table])])


def commit(*manifests: Manifest | ObjectRef, **fields: Any) -> Record:
    return msgspec.structs.replace(Record("forged", NEWEST, 1.0, manifests=manifests), **fields)


def of(*made: Manifest, **fields: Any) -> bytes:
    return framed(commit(*made, **fields))


def group(path: str) -> Manifest:
    return Manifest.from_nodes([(path, group_document({}), True, ())])


def part(transaction: str = "one", tags: tuple[str, ...] = (), bytes_added: int = 0) -> Part:
    return Part(transaction, 1.0, "", tags, bytes_added, {})


FAR = reference("txn/forged/manifest-0", framed(manifest()))
NO_CODEC = META.document.replace(b'"bytes"', b'"of-nobody"')
TWICE = ChunkTable.from_rows(
    [ChunkRow(n, CHUNK * 2, i * len(CHUNK), len(CHUNK), digest(CHUNK)) for i, n in enumerate((1, 0))]
)
WIDE = ArrayMeta.new((8,), "f4", (4,)).document
SHORT = ArrayMeta.new((3,), "f4", (4,)).document
OTHER = ArrayMeta.new((8,), "i4", (4,)).document

RECORDS: dict[str, Callable[[], bytes]] = {
    "a manifest that is not there": lambda: framed(commit(FAR)),
    "a manifest that is a pack": lambda: framed(commit(ObjectRef(PACK, 9, bytes(16)))),
    "a manifest that is a record": lambda: framed(commit(ObjectRef(commit_key(1), 9, bytes(16)))),
    "a manifest that is the marker": lambda: framed(commit(ObjectRef("tstore.json", 9, bytes(16)))),
    "a manifest longer than is read": lambda: framed(commit(ObjectRef(FAR.key, 1 << 61, bytes(16)))),
    "more manifests than go together": lambda: of(*[manifest(f"f{i}") for i in range(65)]),
    "the same path twice": lambda: of(Manifest.from_nodes([("a", group_document({}), True, ())] * 2)),
    "a document that is no JSON": lambda: of(manifest(document=b"\xff")),
    "a document that is a list": lambda: of(manifest(document=b"[]")),
    "a document of a kind of its own": lambda: of(manifest(document=b'{"zarr_format":3,"node_type":"odd"}')),
    "a document nested deeply": lambda: of(manifest(document=b'{"node_type":' + b"[" * 100_000)),
    "an array without a shape": lambda: of(manifest(document=b'{"zarr_format":3,"node_type":"array"}')),
    "an array of an unknown codec": lambda: of(manifest(document=NO_CODEC)),
    "an array of objects": lambda: of(manifest(document=META.document.replace(b"float32", b"object"))),
    "a group with odd attributes": lambda: of(
        Manifest.from_nodes([("g", b'{"zarr_format":3,"node_type":"group","attributes":[1]}', True, ())])
    ),
    "chunks of a group": lambda: of(manifest(document=group_document({}))),
    "an array that is the root": lambda: of(manifest("")),
    "a path that leads up": lambda: of(manifest("a/../b")),
    "a path with an empty name": lambda: of(manifest("a//b")),
    "a path with a NUL": lambda: of(manifest("a\0b")),
    "a path of zarr's": lambda: of(manifest("a/zarr.json")),
    "a path of 1,000 levels": lambda: of(manifest("a/" * 1000 + "b")),
    "an array below an array": lambda: of(manifest("x/y")),
    "a group below an array": lambda: of(group("x/y")),
    "an array above an array": lambda: of(manifest("a"), manifest("a/b")),
    "a chunk outside of its grid": lambda: of(manifest(chunk=1)),
    "a chunk beyond 2^62": lambda: of(manifest(chunk=(1 << 63) + 1)),
    "chunks out of order": lambda: of(
        msgspec.structs.replace(
            Manifest.from_nodes([("f", WIDE, True, [TWICE])]), number=np.array([1, 0], "<u8").tobytes()
        )
    ),
    "a chunk twice": lambda: of(
        msgspec.structs.replace(
            Manifest.from_nodes([("f", WIDE, True, [TWICE])]), number=np.array([1, 1], "<u8").tobytes()
        )
    ),
    "a chunk of another length": lambda: of(manifest(length=8)),
    "a chunk behind the end of what holds it": lambda: of(manifest(offset=8)),
    "a pack that is not there": lambda: of(manifest(pack="txn/forged/pack-1")),
    "a pack that is too short": lambda: of(manifest(pack=PACK, offset=1 << 40)),
    "a pack that no chunk lies in": lambda: of(msgspec.structs.replace(manifest(), packs=("", PACK))),
    "a pack of another that it does not name": lambda: of(manifest(pack=PACK), transaction="other"),
    "a pack of another that it does not use": lambda: of(manifest(), reused=(PACK.replace("forged", "x"),)),
    "the marker as a pack of another": lambda: of(manifest(), reused=("tstore.json",)),
    "a change of what is not there": lambda: of(manifest(replaces_node=False)),
    "an append to what is not there": lambda: of(manifest(replaces_node=2)),
    "an append that shortens the array": lambda: of(manifest("x", document=SHORT, replaces_node=2)),
    "an append that changes the dtype": lambda: of(manifest("x", document=OTHER, replaces_node=2)),
    "an append to a group": lambda: of(Manifest.from_nodes([("", group_document({"a": 1}), 2, ())])),
    "a change of an array of another shape": lambda: of(manifest("x", document=WIDE, replaces_node=False)),
    "a change of what it deletes": lambda: of(manifest("x", replaces_node=False), deleted=("x",)),
    "a change of what it replaces": lambda: of(manifest("x", replaces_node=False), replaces=True),
    "a copy of a version to come": lambda: of(manifest(), source=NEXT),
    "a copy that deletes": lambda: of(manifest(), source=1, deleted=("x",)),
    "a copy that replaces the head": lambda: of(manifest(), source=1, replaces=True),
    "a copy that is a step": lambda: of(manifest(), source=1, tags=("step/9",)),
    "a copy that is void": lambda: of(source=1, void=True, transaction="forged.void"),
    "a copy that writes to the head": lambda: of(manifest("x", replaces_node=False), source=1),
    "a copy with an array below an array": lambda: of(manifest("a"), manifest("a/b"), source=1),
    "a path to delete that leads up": lambda: of(deleted=("../x",)),
    "an empty path to delete": lambda: of(deleted=("",)),
    "an empty tag": lambda: of(tags=("",)),
    "a tag that is a number": lambda: of(tags=("7",)),
    "a tag of a step with zeros": lambda: of(tags=("step/007",)),
    "a tag of 5,000 digits": lambda: of(tags=("step/" + "9" * 5000,)),
    "a tag with a line": lambda: of(tags=("a\nb",)),
    "a tag twice": lambda: of(tags=("a", "a")),
    "a tag that it drops too": lambda: of(tags=("a",), dropped=("a",)),
    "a tag that was set since its base": lambda: of(tags=("own",), base=1),
    "a tag to drop that was set since its base": lambda: of(dropped=("own",), base=1),
    "tags that are numbers": lambda: framed(commit(), tags=[1, 2]),
    "a tag of an earlier version that was set since its base": lambda: of(tagged={"own": 1}, base=1),
    "a tag of itself and of an earlier version": lambda: of(tags=("a",), tagged={"a": 1}),
    "an empty tag of an earlier version": lambda: of(tagged={"": 1}),
    "a tag of version 0": lambda: of(tagged={"a": 0}),
    "a tag of an earlier version that is itself": lambda: of(tagged={"a": NEXT}),
    "a tag of a version above its base": lambda: of(tagged={"a": 2}, base=1),
    "tags of versions that are text": lambda: framed(commit(), tagged={"a": "1"}),
    "metrics that are a list": lambda: of(metadata={"metrics": [1]}),
    "4,097 metrics": lambda: of(metadata={"metrics": dict.fromkeys(map(str, range(4097)), 1)}),
    "a metric that is text": lambda: of(metadata={"metrics": {"loss": "low"}}),
    "metadata that are NaN": lambda: of(metadata={"x": math.nan}),
    "metadata nested deeply": lambda: framed(commit(), metadata={"x": msgspec.Raw(b"\x91" * 5000 + b"\xc0")}),
    "metadata that are a list": lambda: framed(commit(), metadata=[1]),
    "a message of 1 MiB": lambda: of(message="x" * (1 << 20)),
    "less than no bytes": lambda: of(bytes_added=-1),
    "a time beyond the calendar": lambda: of(time=1e300),
    "a time before it": lambda: of(time=-1.0),
    "a time that is text": lambda: framed(commit(), time="now"),
    "a base ahead": lambda: of(base=NEXT),
    "a base far ahead": lambda: of(base=1 << 61),
    "a collection that is itself": lambda: of(collected=NEXT),
    "a collection that is none": lambda: of(collected=2),
    "no transaction": lambda: of(transaction=""),
    "a transaction that leads up": lambda: of(transaction="../x"),
    "a transaction with a slash": lambda: of(transaction="a/b"),
    "a transaction with a line": lambda: of(transaction="a\nb"),
    "a void that changes something": lambda: of(manifest(), void=True),
    "a void with a tag": lambda: of(tags=("a",), void=True),
    "a void with a tag of an earlier version": lambda: of(tagged={"a": 1}, transaction="a.void", void=True),
    "a void of a transaction": lambda: of(void=True),
    "parts without an id": lambda: of(parts=(part(""),)),
    "parts of one id": lambda: of(parts=(part(), part())),
    "parts with other tags": lambda: of(parts=(part(tags=("a",)),)),
    "parts with tags of earlier versions": lambda: of(tagged={"a": 1}, parts=(part(),)),
    "parts of other sizes": lambda: of(parts=(part(bytes_added=5),)),
    "parts and a pack": lambda: of(manifest(pack=PACK), transaction="x.together", parts=(part("forged"),)),
    "parts that are numbers": lambda: framed(commit(), parts=[1]),
    "a body that is no list": lambda: frame(b"R", 1, {"transaction": "x"}),
    "a body of too many fields": lambda: frame(b"R", 1, [0] * 100),
    "a manifest for a record": lambda: framed(manifest()),
}
"""Records that a write token can't commit as the next version."""

ABSENT = {"a manifest that is not there", "a pack that is not there"}
"""Those of them that an admin token may commit, as part of a copy."""


Change = Callable[[Collection, Record], Collection | bytes]


def changed(**fields: Any) -> Change:
    return lambda gone, record: msgspec.structs.replace(gone, **fields)


def entry(**fields: Any) -> Change:
    """Change the entry of the first living version."""
    return lambda gone, record: msgspec.structs.replace(
        gone, alive=(msgspec.structs.replace(gone.alive[0], **fields), *gone.alive[1:])
    )


COLLECTIONS: dict[str, Change] = {
    "nothing lives": changed(alive=()),
    "all expire": lambda gone, record: Collection((), (1, 2, 3, 4), gone.tags, (), ()),
    "the newest expires": lambda gone, record: Collection(gone.alive[:-1], (1, 4), {}, (), ()),
    "one that does not live expires": changed(expired=(1, 99)),
    "one expires twice": changed(expired=(1, 1)),
    "one that expires lives": lambda gone, record: msgspec.structs.replace(gone, expired=(1, 2)),
    "one lives twice": lambda gone, record: msgspec.structs.replace(gone, alive=(*gone.alive, gone.alive[0])),
    "the living out of order": lambda gone, record: msgspec.structs.replace(gone, alive=gone.alive[::-1]),
    "one of another transaction": entry(transaction="other"),
    "one of another time": entry(time=5.0),
    "one with another tag": entry(tags=("step/9",)),
    "one without its tag": entry(tags=()),
    "one with metrics": entry(metrics={"loss": 0.0}),
    "one that is no longer standalone": entry(standalone=False),
    "one that depends on the marker": entry(dependencies=("tstore.json",)),
    "one that depends on what nobody gave": entry(dependencies=("txn/other/pack-0",)),
    "no tags expire": changed(tags={}),
    "a tag of one that lives expires": changed(tags={"step/1": 1, "step/2": 2}),
    "a tag expires with another": changed(tags={"step/1": 2}),
    "a transaction that lives": lambda gone, record: msgspec.structs.replace(
        gone, transactions=(gone.alive[0].transaction,)
    ),
    "an empty transaction": changed(transactions=("",)),
    "a transaction that leads up": changed(transactions=("..",)),
    "a transaction in two folders": changed(transactions=("a/b",)),
    "the marker": changed(objects=("tstore.json",)),
    "a record": changed(objects=(commit_key(1),)),
    "the hint": changed(objects=("latest",)),
    "an empty name": changed(objects=("",)),
    "a name with an empty part": changed(objects=("txn//pack-0",)),
    "a name that leads up": changed(objects=("txn/../tstore.json",)),
    "an object of one that lives": lambda gone, record: msgspec.structs.replace(
        gone, objects=(f"txn/{gone.alive[0].transaction}/pack-0",)
    ),
    "it writes too": lambda gone, record: framed(msgspec.structs.replace(record, manifests=(manifest(),))),
    "it tags too": lambda gone, record: framed(msgspec.structs.replace(record, tags=("a",))),
    "it is void too": lambda gone, record: framed(msgspec.structs.replace(record, void=True)),
    "another before it": lambda gone, record: framed(msgspec.structs.replace(record, collected=3)),
    "versions that are text": lambda gone, record: framed(record, collection=[[], ["x"], {}, [], []]),
}
"""Records of garbage collections that not even an admin token can commit."""


async def test_a_record_that_contradicts_the_log_is_refused(place: Place) -> None:
    """Honest clients continue as if nothing had been sent."""
    for name in ("txn/forged/pack-0", "txn/other/pack-0"):
        assert (await place.write.create(f"/{name}", CHUNK)).status == 201
    before = files(place.folder)
    wrong = []
    for scope, client in (("write", place.write), ("admin", place.admin)):
        for name, make in RECORDS.items():
            response = await client.create(f"/{commit_key(NEXT)}", make())
            expected = 422 if name not in ABSENT else 403 if scope == "write" else 201
            if response.status != expected:
                wrong.append((scope, name, response.status, response.body))
            if response.status == 201:
                (place.folder / commit_key(NEXT)).unlink()
    assert wrong == []
    assert files(place.folder) == before
    await goes_on(place)


async def test_a_collection_that_contradicts_the_log_is_refused(place: Place) -> None:
    before = files(place.folder)
    record = Record("gc-1", NEWEST, 2.0, collection=place.collection)
    for client, status in ((place.write, 403), (place.admin, 422)):
        wrong = []
        for name, change in COLLECTIONS.items():
            made = change(place.collection, record)
            data = made if isinstance(made, bytes) else framed(msgspec.structs.replace(record, collection=made))
            response = await client.create(f"/{commit_key(NEXT)}", data)
            if response.status not in (status, 422):
                wrong.append((name, response.status, response.body))
        assert wrong == []
    response = await place.write.create(f"/{commit_key(NEXT)}", framed(record))
    assert response.status == 403
    assert (
        "also in a copy, needs a token with the scope admin, but this request has the scope write"
        in json.loads(response.body)["error"]
    )
    assert files(place.folder) == before
    await goes_on(place)


async def test_the_honest_record_behind_the_forged_ones_is_accepted(place: Place) -> None:
    """Otherwise the forged ones could be refused for another reason than the intended one."""
    record = Record("gc-1", NEWEST, 2.0, collection=place.collection)
    assert (await place.admin.create(f"/{commit_key(NEXT)}", framed(record))).status == 201
    made = [manifest(), manifest("g/h", pack=PACK), group("i")]
    assert (await place.write.create(f"/{PACK}", CHUNK)).status == 201
    for number, each in enumerate(made, NEXT + 1):
        transaction = "forged" if any(each.packs) else f"forged{number}"
        data = framed(commit(each, transaction=transaction, collected=NEXT, base=NEXT, tags=(f"t{number}",)))
        response = await place.write.create(f"/{commit_key(number)}", data)
        assert response.status == 201, response
    store = await opened(place.server)
    assert (await store.verify()).ok
    array = await (await store.snapshot()).array("forged")
    assert np.array_equal(await array.read(), np.ones(4, "f4"))


async def goes_on(place: Place) -> None:
    """Check that honest clients can read, commit, tag, verify, collect and copy."""
    async with await opened(place.server, ADMIN) as store:
        assert await tstore.steps(store) == [1, 2, 3]
        for step in (1, 2, 3):
            assert np.array_equal((await tstore.restore(store, step))["w"], VALUES + step)
        assert (await store.verify()).ok
        await tstore.save(store, {"w": VALUES + 4}, 4)
        async with store.transaction(move_tag="own") as tx:
            await (await tx.create_array("y", (4,), "f4", (4,))).write(np.ones(4))
        report = await store.collect(Keep(last=2), abandoned=NOW)
        assert report.versions == [1, 2, 4]
        url = f"{place.folder}-copied"
        await tstore.copy(store, url)
        for each in (store, await tstore.open(url, "r")):
            assert (await each.verify()).ok
            assert await tstore.steps(each) == [3, 4]
            assert np.array_equal((await tstore.restore(each))["w"], VALUES + 4)


# ---- roots


OFTEN = 16


@pytest.fixture
def frequent_roots() -> Iterator[None]:
    """Make every 16th commit write a root, so that a history with several roots is short."""
    with override_constants(ROOT_EVERY=OFTEN):
        yield


async def many(store: tstore.Store, versions: int) -> None:
    for _ in range(await store.log.reader.newest(), versions):
        async with store.transaction(durability="none"):
            pass


async def test_a_root_of_a_future_version_is_refused(frequent_roots: None, place: Place) -> None:
    """Readers would trust it once its version exists, and the next gc would delete what it lacks."""
    key = f"/{root_key(OFTEN)}"
    other = {**dict.fromkeys(("step/1", "step/2"), 1)}
    for root in (Root(OFTEN, bytes(16), other, manifest()), Root(OFTEN, bytes(16), {}, manifest())):
        for client in (place.write, place.admin):
            response = await client.create(key, framed(root))
            assert response.status == 422
            assert f"there is no version {OFTEN} yet" in json.loads(response.body)["error"]
    await many(place.store, OFTEN)
    async with await opened(place.server) as store:
        assert await tstore.steps(store) == [1, 2, 3]
        assert (await store.verify()).ok


@pytest.mark.parametrize("again", [False, True], ids=["the server that took the records", "another"])
async def test_only_the_correct_root_is_accepted(frequent_roots: None, place: Place, again: bool) -> None:
    await many(place.store, OFTEN + 1)
    true = (place.folder / root_key(OFTEN)).read_bytes()
    (place.folder / root_key(OFTEN)).unlink()
    root = decode(true, Root)
    forged = [
        msgspec.structs.replace(root, tags={}),
        msgspec.structs.replace(root, tags={**root.tags, "new": 2}),
        msgspec.structs.replace(root, tags=dict(reversed(root.tags.items()))),
        msgspec.structs.replace(root, manifest=manifest()),
        msgspec.structs.replace(
            root, manifest=msgspec.structs.replace(root.manifest, documents=(*root.manifest.documents, b"{}"))
        ),
    ]
    async with contextlib.AsyncExitStack() as stack:
        server = place.server
        if again:
            server = await stack.enter_async_context(Server(place.folder, access=everybody()))
        client = await stack.enter_async_context(client_of(server, WRITE))
        for other in forged:
            assert framed(other) != true
            response = await client.create(f"/{root_key(OFTEN)}", framed(other))
            assert response.status == 422
            assert f"differs from the records up to version {OFTEN}" in json.loads(response.body)["error"]
        assert (await client.create(f"/{root_key(OFTEN)}", true)).status == 201


async def test_a_root_that_can_not_be_computed_is_refused(frequent_roots: None, tmp_path: Path) -> None:
    """A part of the data that it is computed from is gone, as is the root before it."""
    folder = tmp_path / "store"
    async with await tstore.open(folder) as store:
        await many(store, 3 * OFTEN)
        async with store.transaction() as tx:
            for i in range(200):
                await (await tx.create_array(f"many/{i}", (64,), "f4", (4,))).write(np.full(64, i))
        await many(store, 4 * OFTEN)
    roots = {v: folder / root_key(v) for v in range(OFTEN, 5 * OFTEN, OFTEN)}
    data = {v: path.read_bytes() for v, path in roots.items()}
    async with Server(folder, access=everybody()) as server, client_of(server, WRITE) as client:
        for version in (OFTEN, 2 * OFTEN):
            roots[version].unlink()
        assert (await client.create(f"/{root_key(2 * OFTEN)}", data[2 * OFTEN])).status == 422
        assert (await client.create(f"/{root_key(OFTEN)}", data[OFTEN])).status == 201
        assert (await client.create(f"/{root_key(2 * OFTEN)}", data[2 * OFTEN])).status == 201
        roots[4 * OFTEN].unlink()
        [large] = folder.glob("txn/*/manifest-*")
        bytes_of = large.read_bytes()
        large.unlink()
        assert (await client.create(f"/{root_key(4 * OFTEN)}", data[4 * OFTEN])).status == 422
        large.write_bytes(bytes_of)
        assert (await client.create(f"/{root_key(4 * OFTEN)}", data[4 * OFTEN])).status == 201


async def test_a_manifest_of_a_group_written_first_by_another_client(place: Place) -> None:
    """A record of the hosts' own manifests would refer to it, and nobody could read that."""
    hosts = [place.store.transaction(name="step/9", host=i, hosts=2, attempt="a") for i in range(2)]
    for j, tx in enumerate(hosts):
        for i in range(300):
            await (await tx.create_array(f"many/{j}/{i}", (64,), "f4", (4,))).write(np.full(64, i))
    key = f"txn/{hosts[0].id}/manifest-{NEWEST}"
    assert (await place.write.create(f"/{key}", framed(manifest()))).status == 201
    outcomes = await asyncio.gather(*[tx.commit(timeout=60) for tx in hosts], return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} <= {Inconsistent}
    assert await place.store.log.reader.newest() == NEWEST
    await goes_on(place)


# ---- the cost of a record


async def test_the_tree_that_a_server_keeps_is_bounded(place: Place, thresholds: Thresholds) -> None:
    """Overwritten chunks do not count."""
    thresholds(MAX_MEMORY=64 << 10)
    thresholds(MAX_MEMORY=64 << 10)
    async with await opened(place.server) as store:
        async with store.transaction() as tx:
            array = await tx.create_array("small", (2000,), "u1", (2000,))
        for i in range(40):  # of 2 KB each
            async with store.transaction() as tx:
                await (await tx.array("small")).write(np.full(2000, i, "u1"))
        with pytest.raises(
            InvalidArgument,
            match=r"the references to all chunks would take .*choose larger chunks, or write to its storage",
        ):
            await several(store, 40, 2000)
        assert array.shape == (2000,)
        assert (await store.verify()).ok
        await tstore.save(store, {"w": VALUES}, 4)
        assert await tstore.steps(store) == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["groups", "arrays", "chunks"])
def test_the_memory_of_a_tree_is_estimated(kind: str) -> None:
    """Within a factor of two, whatever the tree is made of."""
    count = 5000
    if kind == "groups":
        nodes: list[Any] = [(f"g{i}", group_document({}), True, ()) for i in range(count)]
    elif kind == "arrays":
        own = [META.document.replace(b'"attributes":{}', b'"attributes":{"n":%d}' % i) for i in range(count)]
        nodes = [
            (f"a{i}", document, True, [ChunkTable.from_rows([ChunkRow(0, PACK, 16 * i, 16, bytes(16))])])
            for i, document in enumerate(own)
        ]
    else:
        rows = [ChunkRow(i, PACK, i, 5 << 20, bytes(16 * 5)) for i in range(4 * count)]
        nodes = [("w", META.document, True, [ChunkTable.from_rows(rows)])]
    data = framed(Manifest.from_nodes(nodes))
    tracemalloc.start()
    try:
        tree, memory = _grown(data)
        assert len(list(tree.nodes.values())) == len(nodes)  # a node is made when it is looked up
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert memory / 2 < taken < memory * 2
    assert kind != "arrays" or 450 < memory / count - (330 + 6 + 36 + 16) < 550  # of its metadata


def _grown(data: bytes) -> tuple[Tree, int]:
    decoded = decode(data, Manifest)
    return Tree.empty().after(1, commit(), [decoded]), manifest_memory(decoded)


async def test_many_small_groups_are_refused(place: Place, thresholds: Thresholds) -> None:
    thresholds(MAX_MEMORY=200_000)
    thresholds(MAX_MEMORY=200_000)
    nodes = [(f"g{i}", group_document({}), True, ()) for i in range(1000)]
    key = "txn/forged/manifest-0"
    data = framed(Manifest.from_nodes(nodes))
    assert len(data) < 30_000
    assert (await place.write.create(f"/{key}", data)).status == 201
    response = await place.write.create(f"/{commit_key(NEXT)}", framed(commit(reference(key, data))))
    assert response.status == 422
    assert "all nodes" in json.loads(response.body)["error"]


async def test_the_documents_of_a_record_are_bounded(place: Place, thresholds: Thresholds) -> None:
    thresholds(_MAX_DOCUMENTS=299)
    async with await opened(place.server) as store:
        await large(store)  # its arrays share a document
        tx = store.transaction()
        for i in range(300):
            await tx.create_array(f"distinct/{i}", (i,), "f4")
        with pytest.raises(InvalidArgument, match="over 299 metadata documents; write to the storage directly"):
            await tx.commit()


async def test_the_data_read_to_validate_a_record_is_bounded(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "_MAX_READ", 1000)
    async with await opened(place.server) as store:
        with pytest.raises(
            InvalidArgument, match=r"its manifests have .*choose larger chunks, or write to its storage"
        ):
            await large(store)


async def several(store: tstore.Store, arrays: int, size: int) -> None:
    """Commit arrays one by one."""
    for i in range(arrays):
        async with store.transaction() as tx:
            await (await tx.create_array(f"more/{i}", (size,), "u1", (size,))).write(np.full(size, i, "u1"))


async def large(store: tstore.Store) -> None:
    """Commit enough chunks for a separate manifest object."""
    async with store.transaction() as tx:
        for i in range(300):
            await (await tx.create_array(f"many/{i}", (64,), "f4", (4,))).write(np.full(64, i))


@pytest.mark.parametrize("path", ["x", "many/7"])
async def test_a_record_above_an_unreadable_version_is_refused(
    tmp_path: Path, thresholds: Thresholds, path: str
) -> None:
    """It can't be validated against that version until the missing object is restored."""
    thresholds(_RECHECK=0.0)
    folder = tmp_path / "store"
    async with await tstore.open(folder) as local:
        await filled(local)
        await large(local)
    [missing] = folder.glob("txn/*/manifest-*")
    data = missing.read_bytes()
    record = framed(commit(base=NEXT, tags=("t",)))
    async with Server(folder, access=everybody()) as server, client_of(server, WRITE) as client:
        missing.unlink()
        response = await client.create(f"/{commit_key(NEXT + 1)}", record)
        assert response.status == 422
        assert "version 5 can't be read on the server" in json.loads(response.body)["error"]
        missing.write_bytes(data)
        assert (await client.create(f"/{commit_key(NEXT + 1)}", record)).status == 201
        async with await opened(server) as store:
            assert await (await (await store.snapshot()).array(path)).read() is not None
            assert (await store.verify()).ok


# ---- deletions


async def test_no_forged_collection_removes_the_log(tmp_path: Path) -> None:
    """Even one that was written directly into the folder."""
    folder = tmp_path / "store"
    async with await tstore.open(folder) as store:
        await filled(store)
        record = await store.log.reader.record(NEWEST)
        mine = LivingVersion(NEWEST, record.transaction, record.time, record.tags, False, {}, ())
    names = ("tstore.json", "latest", commit_key(1), commit_key(NEXT), "", "txn/", "txn/../tstore.json", "../x")
    gone = Collection((mine,), (1, 2, 3), {}, ("", "..", ".", "../commits"), names)
    data = placed_in(folder, NEXT, framed(Record("gc-1", NEWEST, 1.0, collection=gone)))
    (folder / commit_key(NEXT)).write_bytes(data)
    (folder / "latest").write_text(str(NEXT))
    before = {k for k in files(folder) if not k.startswith("txn/")}
    async with Server(folder, access=everybody()) as server, client_of(server, ADMIN) as client:
        for name in ("tstore.json", "latest", commit_key(1)):
            assert (await client("DELETE", f"/{name}")).status == 403
        async with await opened(server, ADMIN) as store:
            with pytest.raises((InvalidArgument, Corrupt)):  # the server refuses the resulting deletions
                await store.collect(None, abandoned=NOW)
    with contextlib.suppress(Corrupt):
        await (await tstore.open(folder)).collect(None, abandoned=NOW)
    assert before <= files(folder).keys()


async def test_reused_packs_are_first_compared_with_the_manifests(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking up 10^5 names among those that recent collections condemned takes a second."""
    asked, known = [], LogState.is_condemned
    monkeypatch.setattr(LogState, "is_condemned", lambda state, key: asked.append(key) or known(state, key))
    data = of(manifest(), reused=tuple(f"txn/a/pack-{i}" for i in range(10_000)))
    response = await place.write.create(f"/{commit_key(NEXT)}", data)
    assert (response.status, asked) == (422, ["txn/forged"])
    assert b"list of reused packs" in response.body


async def test_objects_that_a_version_needs_are_not_removed(place: Place) -> None:
    """Even if a faulty collection has condemned it."""
    record = await place.store.log.reader.record(3)
    gone = msgspec.structs.replace(place.collection, transactions=(record.transaction, "txn"))
    data = framed(Record("gc-1", NEWEST, 1.0, collection=gone))
    assert (await place.admin.create(f"/{commit_key(NEXT)}", data)).status == 422
    (place.folder / commit_key(NEXT)).write_bytes(data)
    [pack] = place.folder.glob(f"txn/{record.transaction}/pack-*")
    assert (await place.admin("DELETE", f"/{pack.relative_to(place.folder)}")).status in (403, 422)
    assert (await place.admin("DELETE", f"/{root_key(1)}")).status == 204  # no such root exists
    assert pack.exists()


# ---- honest clients


async def test_honest_commits_with_a_write_token_are_accepted(tmp_path: Path) -> None:
    async with Server(tmp_path / "store", access=everybody()) as server, await opened(server) as store:
        await filled(store)
        async with store.transaction(tag="a", move_tag="own", metadata={"n": 1}) as tx:
            x = await tx.array("x")
            await x.resize((9,))
            await x[4:].write(np.arange(5))
            await tx.create_group("groups/one", {"k": [1]})
            await tx.delete("b")
        async with store.transaction(drop_tag="a", isolation="serializable") as tx:
            assert (await (await tx.array("x")).read())[4] == 0
            for i in range(300):  # enough for a separate manifest object
                await (await tx.create_array(f"many/{i}", (64,), "f4", (4,))).write(np.full(64, i))
        hosts = [store.transaction(name="step/7", host=i, hosts=3, attempt="a") for i in range(3)]
        shared = [await tx.create_array("shared", (6,), "f4", (2,)) for tx in hosts]
        for i, array in enumerate(shared):
            await array[2 * i : 2 * i + 2].write(np.full(2, i))
        assert len(set(await asyncio.gather(*[tx.commit() for tx in hosts]))) == 1

        async def change(i: int) -> None:
            async with store.transaction() as tx:
                await (await tx.array("x"))[i : i + 1].write(np.array([100 + i]))

        await asyncio.gather(*[change(i) for i in range(9)])
        async with await opened(server) as other:  # races with the first
            await asyncio.gather(
                *[write(s, f"race/{j}/{i}") for i in range(8) for j, s in enumerate((store, other))]
            )
        old = await tstore.restore(store, 2)
        await tstore.save(store, old, 8, metrics={"loss": math.nan})
        assert (await store.verify()).ok
        assert np.array_equal((await tstore.restore(store, 8))["w"], VALUES + 2)
        await tstore.quantize(store, "e4m3", at="step/8", tag="small")
        assert (await store.verify()).ok
        void = Record("lost.void", await store.log.reader.newest(), 1.0, void=True, durable=False)
        async with client_of(server, WRITE) as client:
            for _ in range(2):
                number = await store.log.reader.newest() + 1
                assert (await client.create(f"/{commit_key(number)}", framed(void))).status == 201
        with pytest.raises(Denied):
            await store.collect(Keep(last=1))


async def write(store: tstore.Store, path: str) -> None:
    async with store.transaction() as tx:
        await (await tx.create_array(path, (4,), "f4", (4,))).write(np.ones(4))


async def test_a_collected_history_is_copied_by_an_admin(frequent_roots: None, place: Place) -> None:
    async with await opened(place.server, ADMIN) as store:
        await store.collect(Keep(last=1))
        await tstore.save(store, {"w": VALUES + 9}, 9)
        await many(store, 2 * OFTEN + 2)
        await store.collect(Keep(last=1))
        async with Server(f"{place.folder}-copy", access=everybody()) as other:
            with pytest.raises(Denied, match=r"names txn/.*scope admin, but this request has the scope write"):
                await tstore.copy(store, other.url, storage_options={"token": WRITE})
            await tstore.copy(store, other.url, storage_options={"token": ADMIN})
            async with await opened(other) as copied:
                assert (await copied.verify()).ok
                assert await tstore.steps(copied) == [9]
                assert np.array_equal((await tstore.restore(copied))["w"], VALUES + 9)
                await tstore.save(copied, {"w": VALUES + 10}, 10)
                assert (await copied.verify()).ok


async def test_a_server_follows_other_writers_of_its_folder(place: Place) -> None:
    async with await tstore.open(place.folder) as local:
        for step in (4, 6):
            await tstore.save(local, {"w": VALUES + step}, step)
            await tstore.save(place.store, {"w": VALUES + step + 1}, step + 1)
        await local.collect(Keep(last=2))
        await tstore.save(place.store, {"w": VALUES + 8}, 8)
        assert (await place.store.verify()).ok
        assert await tstore.steps(place.store) == [6, 7, 8]


async def test_a_server_continues_with_a_restored_backup(place: Place) -> None:
    for name in (commit_key(4), "latest"):
        (place.folder / name).unlink(missing_ok=True)
    async with await tstore.open(place.folder) as local:  # commits of the backup before it was restored
        await tstore.save(local, {"w": VALUES}, 5)
    async with await opened(place.server) as store:
        await tstore.save(store, {"w": VALUES + 6}, 6)
        assert (await store.verify()).ok
        assert await tstore.steps(store) == [1, 2, 3, 5, 6]


@pytest.mark.parametrize("rooted", [False, True])
async def test_a_server_notices_a_repair(frequent_roots: None, tmp_path: Path, rooted: bool) -> None:
    """A voided version is neither part of its validation of the next record, nor of the roots that it computes."""
    folder = tmp_path / "store"
    async with Server(folder, access=everybody()) as server, client_of(server, WRITE) as client:
        async with await opened(server) as store:
            await filled(store)
            if rooted:
                await several(store, OFTEN - NEWEST, 4)
        if rooted:  # the server knows the root from now on
            key = root_key(OFTEN)
            assert (await client.create(f"/{key}", (folder / key).read_bytes())).status == 412
            (folder / key).unlink()
        async with await tstore.open(folder) as local:
            repaired = await local.repair((), void_intact=(NEWEST,))
            told = repaired.version
            assert told is not None
        newest = told
        if rooted:
            (folder / root_key(OFTEN)).unlink(missing_ok=True)
            async with await tstore.open(folder) as local:
                tree = await local.log.reader.tree(OFTEN)
                check = (await local.log.reader.stored(OFTEN)).check
            right = tree.root(check).data
            assert (await client.create(f"/{root_key(OFTEN)}", right)).status == 201
        forged = framed(commit(manifest("x", replaces_node=False), base=newest))  # the array of the voided version
        response = await client.create(f"/{commit_key(newest + 1)}", forged)
        assert response.status == 422
        assert "which does not exist" in json.loads(response.body)["error"]
        async with await opened(server) as store:
            async with store.transaction(tag="own") as tx:
                await (await tx.create_array("x", (4,), "f4", (4,))).write(np.ones(4))
            assert (await store.verify()).ok


async def test_a_repaired_history_is_copied_by_an_admin(tmp_path: Path) -> None:
    """Its last record names the voided versions."""
    async with await tstore.open(tmp_path / "a") as local:
        await filled(local)
        await local.repair((), void_intact=(NEWEST,))
        async with Server(tmp_path / "b", access=everybody()) as server:
            await tstore.copy(local, server.url, storage_options={"token": ADMIN})
            async with await opened(server) as copied:
                assert (await copied.verify()).ok


async def test_a_collection_below_later_records_is_refused(place: Place) -> None:
    """It would condemn the data of versions above the gap."""
    later = place.folder / commit_key(NEXT + 4)
    later.write_bytes(b"")
    record = framed(Record("gc-1", NEWEST, 2.0, collection=place.collection))
    response = await place.admin.create(f"/{commit_key(NEXT)}", record)
    assert response.status == 422
    assert f"{commit_key(NEXT)} is missing, though later commits exist" in json.loads(response.body)["error"]
    later.unlink()
    assert (await place.admin.create(f"/{commit_key(NEXT)}", record)).status == 201


@pytest.mark.parametrize("scope", [WRITE, ADMIN])
async def test_inline_chunks_must_match_their_checksums(place: Place, scope: str) -> None:
    client = place.write.with_token(scope)
    other = np.full(4, 2, "f4").tobytes()
    twice = ChunkTable.from_rows(
        [ChunkRow(n, CHUNK * 2, n * len(CHUNK), len(CHUNK), digest(CHUNK)) for n in (0, 1)]
    )
    same = np.zeros(2, "<u8").tobytes()
    across = np.array([0, 1], "<u8").tobytes()
    wide = Manifest.from_nodes([("f", WIDE, True, [twice])])
    for wrong, said in [
        (manifest(pack=other), "does not match its checksum"),
        (msgspec.structs.replace(wide, inline=(CHUNK + other,)), "does not match its checksum"),
        (msgspec.structs.replace(wide, inline=(CHUNK + b"x",), offset=across), "overlaps"),
    ]:
        response = await client.create(f"/{commit_key(NEXT)}", of(wrong))
        assert response.status == 422
        assert said in json.loads(response.body)["error"]
    right = msgspec.structs.replace(wide, inline=(CHUNK,), offset=same)  # both are the same bytes
    assert (await client.create(f"/{commit_key(NEXT)}", of(right))).status == 201
    assert (await place.store.verify()).ok


@pytest.mark.parametrize("voided", [6, 8], ids=["a garbage collection", "an array"])
async def test_a_running_server_notices_a_repair_of_its_folder(
    frequent_roots: None, place: Place, voided: int
) -> None:
    store, admin = place.store, await opened(place.server, ADMIN)
    await tstore.save(store, {"w": VALUES, "late": VALUES + 9}, 5)
    await admin.collect(Keep(last=2))  # version 6
    await tstore.save(store, {"w": VALUES + 7}, 7)
    async with store.transaction(tag="later") as tx:
        await (await tx.create_array("y", (4,), "f4", (4,))).write(np.ones(4))
    await (await tstore.open(place.folder)).repair(void_intact=[voided])

    store, admin = await opened(place.server), await opened(place.server, ADMIN)
    while await store.log.reader.newest() < 2 * OFTEN:
        async with store.transaction(durability="none") as tx:
            await (await tx.array("w"))[:4].write(np.ones(4))
    await admin.collect(Keep(last=1))
    await tstore.save(store, {"w": VALUES + 8}, 9)
    assert root_key(2 * OFTEN) in files(place.folder)
