"""Records and roots with valid checksums that refer to themselves, to objects of others, or to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import pytest

import tstore
from tests.support.forging import forged, place, rewrite, sealed
from tstore import Keep
from tstore.core.format.frame import PLAIN, seal
from tstore.core.format.layout import ROOT_EVERY, commit_key, root_key
from tstore.core.format.objects.encoding import decode, encode
from tstore.core.format.objects.records import Collection, Fragment, LivingVersion, Part, Record, Root
from tstore.core.format.objects.references import Manifest
from tstore.core.log.expiry import last_collection
from tstore.core.log.marker import read_marker
from tstore.core.storage.base import Storage
from tstore.core.storage.objects import Durability
from tstore.errors import (
    CommitOutcomeUnknown,
    Conflict,
    Corrupt,
    DeadlineExceeded,
    InvalidArgument,
    SnapshotExpired,
    TStoreError,
)
from tstore.service.server.kinds import Kind, parse_metadata

VALUES = np.arange(4000.0)


async def filled(*steps: int) -> tstore.Store:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    for step in steps:
        await tstore.save(store, {"w": VALUES + step, "b": np.arange(3)}, step)
    return store


async def keys(storage: Storage) -> set[str]:
    return set(await storage.list(""))


async def test_a_gc_deletes_no_record_named_as_a_pack() -> None:
    """Versions name records as reused packs, which a gc would treat as data."""
    store = await filled(0)
    storage = store.log.storage
    for number in (1, 2):
        record = Record(f"forged{number}", number, 0.0, tags=(f"step/{number}",), reused=(commit_key(number),))
        await place(storage, number + 1, forged(record))
    store = await tstore.open(store.url)
    for _ in range(2):
        with pytest.raises(Corrupt, match=r"commits/0000000000000000000[23]: .*the key of a pack"):
            await store.collect(Keep(last=1), abandoned=timedelta(0))
    assert {commit_key(v) for v in (1, 2, 3)} <= await keys(storage)


@pytest.mark.parametrize("ahead", [0, 1, 1 << 61])
async def test_a_record_that_refers_to_itself_is_refused(ahead: int) -> None:
    """A search for the gc that removed a version would never end."""
    store = await filled(0, 1)
    gone = Collection((), (), {}, (), ())
    record = Record("forged", 2, 0.0, collected=3 + ahead, collection=gone)
    await place(store.log.storage, 3, forged(record))
    store = await tstore.open(store.url, "r")
    with pytest.raises(Corrupt, match="commits/00000000000000000003: it refers to version 3 or a later one"):
        async with asyncio.timeout(60):
            await store.snapshot(1)


@pytest.mark.parametrize("named", [10**12, 0])
async def test_a_root_with_a_tag_of_no_version_is_ignored(named: int) -> None:
    store = await filled(0)
    for _ in range(ROOT_EVERY - 1):
        async with store.transaction(durability="none"):
            pass
    storage = store.log.storage
    root = decode(await storage.get(root_key(ROOT_EVERY)), Root)
    await storage.replace(root_key(ROOT_EVERY), forged(root, tags={"step/0": named}))
    store = await tstore.open(store.url, "r")
    assert await store.tags() == {"step/0": 1}
    assert np.array_equal((await tstore.restore(store, 0))["w"], VALUES)
    assert not (await store.verify()).ok


@pytest.mark.parametrize("counts", [(-1, 3), (1 << 62, -(1 << 62) + 2)])
async def test_counts_of_rows_that_overflow_are_refused(counts: tuple[int, int]) -> None:
    """Their sum is correct modulo 2^64."""
    store = await filled(0)
    storage = store.log.storage
    record = decode(await storage.get(commit_key(1)), Record)
    [manifest] = await store.log.reader.objects.manifests(1, record)
    assert len(manifest.paths) == 3  # with the root group
    column = np.array([*counts, 0], "<i8").tobytes()
    wrong = msgspec.structs.replace(manifest, count=column)
    await place(storage, 2, forged(Record("forged", 1, 0.0, manifests=(wrong,))))
    store = await tstore.open(store.url, "r")
    with pytest.raises(Corrupt, match="chunk counts in a manifest"):
        await store.snapshot()


async def with_odd_manifest(bad: int, **values: object) -> tstore.Store:
    """Make a store of three small versions, one of them with an invalid manifest."""
    store = await filled(0, 1, 2)
    storage = store.log.storage
    record = decode(await storage.get(commit_key(bad)), Record)
    [manifest] = await store.log.reader.objects.manifests(bad, record)
    wrong = msgspec.structs.replace(manifest, **values)
    await rewrite(storage, bad, forged(record, manifests=(wrong,)))
    return await tstore.open(store.url, "r")


ODD_MANIFESTS: list[dict[str, object]] = [
    {"number": b"odd"},
    {"count": b""},
    {"document": b"\xff" * 12},
    {"replaces_node": b"\x04" * 3},
    {"pack": b"\xff" * 8},
    {"paths": ("w", "w", "b")},
    {"paths": ("..", "w", "b")},
    {"checks": b"1" * 16},
    {"packs": ("tstore.json",), "inline": ()},
]


@pytest.mark.parametrize("values", ODD_MANIFESTS, ids=str)
async def test_the_history_reads_no_manifest_and_readers_refuse_an_invalid_one(values: dict[str, object]) -> None:
    store = await with_odd_manifest(2, **values)
    assert [commit.version async for commit in store.history()] == [3, 2, 1]
    with pytest.raises(Corrupt, match="commits/00000000000000000002: "):
        await store.snapshot(2)
    assert np.array_equal((await tstore.restore(store, 0))["w"], VALUES)


@pytest.mark.parametrize("values", ODD_MANIFESTS, ids=str)
async def test_verify_and_repair_report_an_invalid_manifest(values: dict[str, object]) -> None:
    store = await with_odd_manifest(2, **values)
    assert any("commits/00000000000000000002: " in fault for fault in (await store.verify()).faults)
    [damaged] = (await store.repair()).damaged
    assert damaged.version == 2
    assert not damaged.record_intact


@pytest.mark.parametrize(
    "name", ["tstore.json", "commits/00000000000000000001", "nothing", "txn/../latest", "txn/a/b"]
)
async def test_only_objects_of_transactions_are_packs(name: str) -> None:
    store = await filled(0)
    storage = store.log.storage
    [manifest] = await store.log.reader.objects.manifests(1, decode(await storage.get(commit_key(1)), Record))
    wrong = msgspec.structs.replace(manifest, packs=tuple(p and name for p in manifest.packs))
    await place(storage, 2, forged(Record("forged", 1, 0.0, manifests=(wrong,))))
    store = await tstore.open(store.url, "r")
    with pytest.raises(Corrupt, match=r"commits/00000000000000000002: .*the key of a pack"):
        await store.snapshot()
    with pytest.raises(TStoreError):
        await tstore.copy(store, f"memory://{uuid.uuid4()}")


async def test_a_fragment_with_a_negative_base_is_not_committed() -> None:
    """The number of its commit would follow from the base."""
    store = await filled(0, 1, 2)
    first, second = (store.transaction(name="step/7", host=i, hosts=2, attempt="a") for i in range(2))
    await (await first.create_array("x", (4,), "f4", (4,))).write(np.ones(4))
    with pytest.raises(DeadlineExceeded):
        await first.commit(timeout=0.01)
    storage = store.log.storage
    [part] = [key for key in await storage.list("txn/") if "/part-" in key]
    await storage.replace(part, forged(decode(await storage.get(part), Fragment), base=-5))
    with pytest.raises(CommitOutcomeUnknown, match="does not parse"):  # for the other host may have read it before
        await second.commit(timeout=60)
    assert {key for key in await keys(storage) if key.startswith("commits")} == {commit_key(v) for v in (1, 2, 3)}


async def test_a_group_of_a_million_hosts_costs_no_requests() -> None:
    store = await filled(0)
    for hosts in ("1000000", "99999999999"):
        name = f"txn/n.a.{'0' * 32}-of-{hosts}"
        await store.log.storage.replace(f"{name}/part-00000-of-{hosts}", b"")
    async with asyncio.timeout(60):
        assert [p.hosts for p in await store.pending()] == [1, 1]
        for transaction in await store.pending():
            with pytest.raises(TStoreError):
                await store.finish(transaction.transaction)


async def test_a_copy_trusts_no_other_history_at_the_destination() -> None:
    """The source's record of version 1 has another length for a manifest that the destination has."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction(tag="big") as tx:
        for i in range(150):
            await (await tx.create_array(f"many/{i}", (64,), "f4", (4,))).write(np.full(64, i))
    url = f"memory://{uuid.uuid4()}"
    await tstore.copy(store, url)
    await tstore.save(store, {"w": VALUES}, 1)
    storage = store.log.storage
    record = decode(await storage.get(commit_key(1)), Record)
    [reference] = record.manifests
    [manifest] = await store.log.reader.objects.manifests(1, record)
    data = encode(msgspec.structs.replace(manifest, documents=(*manifest.documents, b"{}")))
    await storage.replace(reference.key, data)
    other = msgspec.structs.replace(reference, length=len(data), check=data[-16:])
    changed = msgspec.structs.replace(record, manifests=(other,))
    await rewrite(storage, 1, encode(changed))
    store = await tstore.open(store.url)
    async with store.transaction():  # both have the same newest record
        pass
    there = (await tstore.open(url)).log.storage
    await there.create(commit_key(2), await storage.get(commit_key(2)), Durability.NONE)
    before = {key: await there.get(key) for key in await keys(there)}
    with pytest.raises(Conflict, match="from version 1 on"):
        await tstore.copy(await tstore.open(store.url), url)
    assert {key: await there.get(key) for key in before} == before


@pytest.mark.parametrize(
    "own", [5, [], {"structure": 5}, {"structure": ["dict", [["str"]]]}, {"quantization": {}}]
)
async def test_attributes_named_tstore_may_hold_anything(own: Any) -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        await tx.create_group("", {"tstore": own})
        await (await tx.create_array("w", (4000,), "f4", (4000,))).write(VALUES)
    with contextlib.suppress(Corrupt):  # its structure
        assert np.array_equal((await tstore.restore(store))["w"], VALUES.astype("f4"))
    with pytest.raises(TStoreError):
        await tstore.quantize_report(store)


async def test_a_marker_that_is_nested_deeply_is_damaged() -> None:
    store = await filled(0)
    await store.log.storage.replace("tstore.json", b'{"format":1,"x":' + b"[" * 100_000)
    with pytest.raises(Corrupt):
        await read_marker(store.log.storage)


def test_encoding_refuses_what_readers_refuse() -> None:
    for record in (Record("t", -1, 0.0), Record("t", 1 << 63, 0.0), Record("t", 0, 0.0, collected=1 << 62)):
        with pytest.raises(InvalidArgument):
            encode(record)


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[" * 600 + b"]" * 600,
        b"5",
        b"{}",
        b'{"node_type":"array"}',
        b'{"zarr_format":3,"node_type":"group","attributes":5}',
        b'{"zarr_format":3,"node_type":"group","attributes":{"tstore":{"structure":["dict",[5]]}}}',
        b'{"zarr_format":3,"node_type":"group","attributes":{"tstore":{"structure":["int","x"]}}}',
    ],
)
async def test_verify_lists_invalid_documents_and_checks_the_rest(document: bytes) -> None:
    store = await filled(0)
    storage = store.log.storage
    [manifest] = await store.log.reader.objects.manifests(1, decode(await storage.get(commit_key(1)), Record))
    at = manifest.paths.index("")
    number = int.from_bytes(manifest.document[4 * at : 4 * at + 4], "little")
    documents = tuple(document if i == number else d for i, d in enumerate(manifest.documents))
    wrong = msgspec.structs.replace(manifest, documents=documents)
    record = Record("forged", 1, 0.0, replaces=True, manifests=(wrong,), reused=tuple(filter(None, wrong.packs)))
    await place(storage, 2, forged(record))
    store = await tstore.open(store.url, "r")
    report = await store.verify()
    assert (report.arrays, report.chunks) == (2, 2)
    assert len(report.faults) == 1
    with contextlib.suppress(TStoreError):
        await tstore.restore(store)


async def test_a_document_that_is_nested_too_deeply_is_corrupt_with_its_record() -> None:
    store = await filled(0)
    storage = store.log.storage
    [manifest] = await store.log.reader.objects.manifests(1, decode(await storage.get(commit_key(1)), Record))
    deep = b'{"zarr_format":3,"node_type":"group","attributes":' + b'{"a":' * 800 + b"1" + b"}" * 801
    wrong = msgspec.structs.replace(manifest, documents=(deep, *manifest.documents[1:]))
    await place(storage, 2, forged(Record("forged", 1, 0.0, manifests=(wrong,))))
    store = await tstore.open(store.url, "r")
    with pytest.raises(Corrupt, match=r"commits/00000000000000000002: .* levels of nesting"):
        await store.snapshot()


async def test_a_marker_and_a_heartbeat_that_are_too_long_are_refused() -> None:
    store = await filled(0)
    storage = store.log.storage
    await storage.replace("txn/t/alive-00000-of-00001", b'{"name":"' + b"x" * 5000 + b'","time":1.0}')
    assert [p.heartbeats for p in await store.pending()] == [{}]
    await storage.replace("tstore.json", await storage.get("tstore.json") + b" " * 5000)
    with pytest.raises(Corrupt, match="longer than 4096 bytes"):
        await read_marker(storage)


async def test_the_call_that_exceeds_a_bound_is_refused() -> None:
    store = await filled(0)
    with pytest.raises(InvalidArgument, match="expected at most 131072 values"):
        store.transaction(metadata={"a": [0] * (1 << 17)})
    metrics = dict.fromkeys(map(str, range(4096)), 0.5)
    await tstore.save(store, {"w": np.arange(3)}, 8, metrics=metrics)
    with pytest.raises(InvalidArgument, match="4,097 metrics; a commit has at most 4,096"):
        await tstore.save(store, {"w": np.arange(3)}, 9, metrics=metrics | {"one more": 1})
    async with store.transaction() as tx:
        with pytest.raises(InvalidArgument, match="more than 2,097,152 values"):
            await tx.create_group("g", {"a": [0] * (1 << 21)})
    assert (await store.snapshot()).version == 3


@pytest.mark.parametrize("name", ["step/1", "repair-of-mine"])
async def test_no_transaction_takes_a_void_record_for_its_own(name: str) -> None:
    """A void record with the id of a transaction is invalid, unless it is named like that of a repair."""
    store = await filled(0)
    tx = store.transaction(name=name, host=0, hosts=1, attempt="a")
    await (await tx.create_array("x", (4,), "f4", (4,))).write(np.ones(4))
    void = Record(tx.id, 1, 0.0, void=True)
    await place(store.log.storage, 2, forged(void))
    reason = "commits/00000000000000000002: a void record has the id of a transaction"
    if name != "step/1":
        assert await store.outcome(tx.id) is None
        reason = "a repair that voided version 2 has not ended"
    with pytest.raises(CommitOutcomeUnknown, match=reason):
        await tx.commit()
    if name == "step/1":
        return
    assert await store.outcome(tx.id) is None
    assert "x" not in (await store.snapshot()).paths()


async def test_a_gc_below_void_records_is_detected() -> None:
    """A repair may have replaced each later gc by one."""
    store = await filled(0, 1)
    assert (await store.collect(Keep(last=1))).version == 3
    for version in (4, 5):
        void = Record(f"repair-{version}", version - 1, 1.0, void=True, collected=version - 1)
        await place(store.log.storage, version, encode(void))
    repair = Record("repair-6", 5, 1.0, collected=5, metadata={"voided": [4, 5]})
    await place(store.log.storage, 6, encode(repair))
    store = await tstore.open(store.url)
    assert await last_collection(store.log.reader, 5) == 3
    with pytest.raises(SnapshotExpired):
        await store.snapshot(1)
    assert (await store.verify()).ok


_NAMES = tuple(f"params/{i:06d}" for i in range(20_000))
_ALIVE = tuple(
    LivingVersion(v, f"t{v}", float(v), (f"step/{v}",), True, {"loss": 1.5}, (f"txn/a{v}/pack-0",))
    for v in range(1, 20_001)
)
_PART = Part("part", 1.0, "m", (), 0, {"note": "x" * 200_000})


@pytest.mark.parametrize(
    "record",
    [
        Record("t", 1, 1.0, deleted=_NAMES),
        Record("t", 1, 1.0, tags=_NAMES),
        Record("t", 1, 1.0, metadata={"note": "x" * 200_000}),
        Record("t", 1, 1.0, reused=tuple(f"txn/a{i}/pack-0" for i in range(20_000))),
        Record("t", 1, 1.0, dropped=_NAMES),
        Record("t", 1, 1.0, tagged=dict.fromkeys(_NAMES, 1)),
        Record("t", 1, 1.0, parts=(_PART,)),
        Record("t", 20_001, 1.0, collection=Collection(_ALIVE, (), {}, (), ())),
    ],
    ids=["deleted", "tags", "metadata", "reused", "dropped", "tagged", "parts", "collection"],
)
def test_a_long_record_is_read_as_it_was_written(record: Record) -> None:
    """Trailing fields with default values are omitted."""
    data = encode(record)
    assert len(data) > 1 << 17
    assert decode(data, Record) == record


@pytest.mark.parametrize("fields", range(18))
def test_a_long_record_of_empty_lists_is_corrupt_at_once(fields: int) -> None:
    """In any of its fields, whether the record ends there or not."""
    lists = b"\xdd" + (1_000_000).to_bytes(4, "big") + b"\x90" * 1_000_000
    good = [msgspec.msgpack.encode(value) for value in msgspec.structs.astuple(Record("t", 1, 1.0))]
    values = [*good[:fields], b"\x81\xa1a" + lists if fields == 10 else lists]
    for rest in ([], good[fields + 1 :]):
        packed = b"\xdc" + len(values + rest).to_bytes(2, "big") + b"".join(values + rest)
        with pytest.raises(Corrupt):
            decode(sealed(b"R\1", packed), Record)


def test_a_long_document_is_compared_with_its_bounds_when_it_is_sent() -> None:
    """Readers do so when they use its node."""
    document = b"[" * 1000 + b" " * (64 << 10) + b"]" * 1000
    manifest = Manifest.from_nodes([("w", document, True, ())])
    data = seal(b"M", PLAIN, msgspec.msgpack.encode(manifest))
    with pytest.raises(Corrupt, match="levels of nesting"):
        parse_metadata("txn/a/manifest-1", Kind.MANIFEST, data)
    metadata, _ = decode(data, Manifest).node(0)
    with pytest.raises(Corrupt, match="levels of nesting"):
        _ = metadata.is_array
