"""Every field of every metadata object with every absurd value, under valid checksums.

Decoding either raises `Corrupt` or succeeds, at once. What decodes becomes the newest record of a store, on which
every verb must work or raise a `TStoreError`.
"""

from __future__ import annotations

import asyncio
import datetime
import math
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest

import tstore
from tests.support.collisions import tuples_of_equal_hash
from tests.support.forging import forged, placed, sealed
from tests.support.fuzzing import bounded_time
from tests.support.work import counted_work
from tstore import Keep
from tstore.core.format.bounds import RECORD_VALUES
from tstore.core.format.frame import body_of
from tstore.core.format.layout import commit_key
from tstore.core.format.objects.encoding import decode, encode
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.records import Collection, Fragment, LivingVersion, Part, Record, Root
from tstore.core.format.objects.references import Body, Manifest
from tstore.core.storage.base import Storage
from tstore.errors import Corrupt, InvalidArgument, TStoreError

DOCUMENT = b'{"zarr_format":3,"node_type":"group","attributes":{}}'
EMPTY = Manifest.from_nodes([("g", DOCUMENT, True, ())])
COLLECTION = Collection(
    (LivingVersion(2, "b", 1.0, ("step/1",), True, {"loss": 0.5}, ("txn/a/pack-0",)),),
    (1,),
    {"step/0": 1},
    ("gone",),
    ("txn/old/pack-1",),
)
BODIES: dict[str, Any] = {
    "record": Record(
        "a", 2, 1.0, "m", ("x",), False, ("old",), (EMPTY,), 3, metadata={"step": 1}, reused=("txn/b/pack-0",)
    ),
    "tags": Record("a", 2, 1.0, tags=("x",), dropped=("old",), tagged={"y": 1, "z": 2}),
    "collection": Record("gc-1", 2, 1.0, collection=COLLECTION),
    "parts": Record(
        "a.together",
        2,
        2.0,
        tags=("x",),
        manifests=(EMPTY,),
        bytes_added=3,
        parts=(Part("a", 1.0, "m", ("x",), 3, {}), Part("b", 2.0, "", (), 0, {})),
    ),
    "reference": Record("a", 2, 1.0, manifests=(ObjectRef("txn/a/manifest", 99, b"c" * 16),)),
    "fragment": Fragment("t", 0, 2, 1, "m", ("x",), False, (), EMPTY, 3, b"s", {"step": 1}),
    "root": Root(64, b"c" * 16, {"x": 3}, EMPTY),
    "manifest": EMPTY,
}
ABSURD: list[Any] = [
    *(None, True, 0, 1, -1, 3, 10**10, 1 << 40, 1 << 62, (1 << 64) - 1, -(1 << 63)),
    *(math.nan, math.inf, -math.inf, 1e300, -1.0, 253_402_300_800.0),
    *(
        "",
        " ",
        "7",
        "step/007",
        "step/" + "9" * 500,
        "../../etc",
        "a/../b",
        "/",
        "nul\0name",
        "new\nline",
        "é" * 2000,
    ),
    *("é" * 2000, "tstore.json", "latest", commit_key(1), "txn/../tstore.json", "txn/a/part-0", "x" * 70_000),
    *(
        b"",
        b"\xff" * 8,
        b"\0" * 16,
        b"{}",
        [],
        {},
        [[]],
        [None],
        [""],
        ["x", "x"],
        ["zarr.json"],
        ["7"],
        [-1],
        [10**12],
    ),
    *([commit_key(1)], ["tstore.json"], ["latest"], ["txn/a/pack-0"], {"": 1}, {"x": -1}, {"x": 10**12}, {"7": 1}),
    *({"metrics": 5}, {"metrics": {"loss": math.nan}}, {"a": math.nan}, {"a": b"x"}, {1: 2}, {"a": {1: 2}}),
    *({"voided": [1]}, msgspec.Raw(b"\x91" * 150 + b"\xc0"), msgspec.Raw(b"\x91" * 100_000 + b"\xc0")),
    msgspec.Raw(b"\xdc\xff\xff" + b"\x90" * 0xFFFF),
    datetime.datetime(1, 1, 1, tzinfo=datetime.UTC),
]


def places(values: Any, at: tuple[int | str, ...] = ()) -> Iterator[tuple[int | str, ...]]:
    """Yield every position in nested lists and maps, except the root."""
    items = enumerate(values) if isinstance(values, list) else values.items() if isinstance(values, dict) else ()
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def changed(values: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Return the values with the one at `place` replaced."""
    copy = dict(values) if isinstance(values, dict) else list(values)
    copy[place[0]] = changed(copy[place[0]], place[1:], value) if place[1:] else value
    return copy


def variants(name: str) -> Iterator[bytes]:
    """Return the frames of a body with one absurd value each."""
    body = BODIES[name]
    head = forged(body)[6:8]
    values = msgspec.msgpack.decode(body_of(forged(body)))
    for place in places(values):
        for value in ABSURD:
            yield sealed(head, msgspec.msgpack.encode(changed(values, place, value)))


def survivors(name: str) -> list[tuple[bytes, Body]]:
    """Return the variants that decode; all others are `Corrupt`."""
    readable = []
    for data in variants(name):
        with suppress(Corrupt):
            readable.append((data, decode(data, type(BODIES[name]))))
    return readable


@pytest.mark.parametrize("name", BODIES)
def test_a_variant_is_corrupt_or_decodes(name: str) -> None:
    assert decode(forged(BODIES[name]), type(BODIES[name])) == BODIES[name]
    count = sum(1 for _ in variants(name))
    read = survivors(name)
    assert len(read) < count / 3
    for _, body in read:
        assert decode(encode(body), type(body)) == body or "nan" in repr(body)


@pytest.mark.parametrize("name", BODIES)
def test_encoding_refuses_what_readers_refuse(name: str) -> None:
    body = BODIES[name]
    refused = 0
    for field in body.__struct_fields__:
        for value in ABSURD:
            other = msgspec.structs.replace(body, **{field: value})
            try:
                data = encode(other)
            except InvalidArgument:
                refused += 1
                continue
            decode(data, type(body))
    assert refused > 100


@pytest.mark.parametrize("size", [1 << 20, 8 << 20])
@pytest.mark.parametrize("field", ["metadata", "tags", "deleted", "reused", "manifests", "dropped", "tagged"])
def test_a_long_record_of_empty_lists_is_refused_at_once(field: str, size: int) -> None:
    fill = msgspec.Raw(b"\xdd" + size.to_bytes(4, "big") + b"\x90" * size)
    wrong: Any = msgspec.Raw(b"\x81\xa1a" + bytes(fill)) if field == "metadata" else fill
    data = forged(BODIES["record"], **{field: wrong})
    with counted_work() as work, pytest.raises(Corrupt):
        decode(data, Record)
    assert work.steps < 15 * RECORD_VALUES  # rather than of each value until the end


def keyed_by_tuples(length: int) -> msgspec.Raw:
    """Return metadata whose keys are arrays that have one hash."""
    keys = map(msgspec.msgpack.encode, tuples_of_equal_hash(length))
    return msgspec.Raw(b"\x81\xa1a\xdf" + length.to_bytes(4, "big") + b"".join(key + b"\xc0" for key in keys))


@pytest.mark.parametrize("length", [1000, 30_000])
@pytest.mark.parametrize("name", ["record", "fragment", "parts"])
def test_metadata_with_keys_that_collide_is_refused_before_it_is_decoded(name: str, length: int) -> None:
    metadata: Any = keyed_by_tuples(length)
    if name == "parts":
        data = forged(BODIES[name], parts=(Part("a", 1.0, "m", ("x",), 3, metadata), BODIES[name].parts[1]))
    else:
        data = forged(BODIES[name], metadata=metadata)
    with bounded_time(1), pytest.raises(Corrupt, match="the metadata of a commit has a key that is not text"):
        decode(data, type(BODIES[name]))


def test_keys_of_short_metadata_collide_for_a_short_time() -> None:
    metadata: Any = keyed_by_tuples(60)
    parts = tuple(Part(f"a{i}", 1.0, "", (), 0, metadata) for i in range(150))
    with bounded_time(1), pytest.raises(Corrupt, match=r"metadata\['a'\]"):
        decode(forged(BODIES["parts"], parts=parts), Record)


async def small() -> tstore.Store:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    for step in range(3):
        await tstore.save(store, {"w": np.arange(2000.0) + step}, step, metrics={"loss": 1.0})
    await store.collect(Keep(last=2))
    async with store.transaction(tag="x") as tx:
        await tx.create_group("g", {"a": 1})
    return store


async def verbs(url: str) -> None:
    """Run every verb on a store."""

    async def history() -> None:
        async for commit in store.history():
            repr(commit)

    async def commit() -> None:
        async with store.transaction() as tx:
            await (await tx.array("w"))[1:3].write(np.ones(2))

    store = await tstore.open(url)
    works: list[Callable[[], Awaitable[Any]]] = [
        store.snapshot,
        lambda: store.snapshot(1),
        lambda: store.snapshot(datetime.datetime.now(datetime.UTC)),
        store.tags,
        history,
        lambda: tstore.steps(store),
        lambda: tstore.restore(store),
        lambda: tstore.restore(store, 1),
        store.repair,
        store.pending,
        lambda: store.outcome("nobody"),
        lambda: store.diff(3),
        lambda: tstore.copy(store, f"memory://{uuid.uuid4()}"),
        commit,
        lambda: tstore.save(store, {"w": np.ones(9)}, 9),
        lambda: tstore.quantize(store, "e4m3"),
        lambda: store.collect(Keep(last=1, best=(1, "loss")), abandoned=datetime.timedelta(0)),
    ]
    for work in works:
        with suppress(TStoreError):
            repr(await work())
    assert repr(await (await tstore.open(url)).verify())


async def attack(storage: Storage, key: str, data: bytes) -> None:
    await storage.replace(key, data)
    async with asyncio.timeout(20):
        await verbs(storage.url)
    report = await (await tstore.open(storage.url)).repair(void_intact=[int(key[-20:])])
    assert report.voided == [int(key[-20:])]
    store = await tstore.open(storage.url)
    await store.verify()
    with suppress(TStoreError):
        await tstore.save(store, {"w": np.ones(9)}, 77)
    assert not [f.version for f in (await store.repair()).damaged if not f.record_intact]


@pytest.mark.parametrize("most", [5, pytest.param(100, marks=pytest.mark.deep)])
@pytest.mark.parametrize("name", ["record", "tags", "collection", "parts", "reference"])
async def test_every_verb_works_or_raises_an_error_of_tstore(name: str, most: int) -> None:
    read = survivors(name)
    rng = np.random.default_rng(0)
    for at in rng.choice(len(read), min(most, len(read)), replace=False).tolist():
        store = await small()
        storage = store.log.storage
        await attack(storage, commit_key(6), await placed(storage, 6, read[at][0]))


@pytest.mark.parametrize("at", [1, 3, 4, 5, 6])
@pytest.mark.parametrize("data", [b"", b"garbage", forged(Record("t", 0, math.nan)), forged(BODIES["collection"])])
async def test_a_bad_record_anywhere_is_reported_and_can_be_voided(at: int, data: bytes) -> None:
    store = await small()
    await attack(store.log.storage, commit_key(at), data)
