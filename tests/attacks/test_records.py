"""Objects written by another program, with valid checksums and absurd content.

One object of a store is changed in a few places (`absurd`), and all checksums over it are recomputed. Then every
verb must work or raise a `TStoreError`, soon, in little memory, and without damage to other data.
`TSTORE_FORGERIES` sets the number of such stores; `TSTORE_FORGERY` tries a single one.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import math
import random
import resource
import signal
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import pytest

import tstore
from tests.support.forging import sealed
from tstore import Keep
from tstore.core.format.frame import NO_RECORD, Link, body_of, check_of, linked
from tstore.core.log.marker import Marker
from tstore.core.storage.connect import connect
from tstore.errors import TStoreError

SEEDS = [*range(12), *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(12, 200))]
SECONDS = 20
MEMORY = 3 << 30
NOW = datetime.timedelta(0)

Objects = dict[str, bytes]


def nested(levels: int) -> msgspec.Raw:
    return msgspec.Raw(b"\x91" * levels + b"\xc0")


ABSURD: list[Callable[[], Any]] = [
    lambda: None,
    lambda: True,
    lambda: 0,
    lambda: 1,
    lambda: -1,
    lambda: 65,
    lambda: 1 << 31,
    lambda: 10**10,
    lambda: 1 << 40,
    lambda: 1 << 60,
    lambda: (1 << 63) - 1,
    lambda: (1 << 64) - 1,
    lambda: -(1 << 63),
    lambda: math.nan,
    lambda: math.inf,
    lambda: -math.inf,
    lambda: 1e300,
    lambda: 0.5,
    lambda: "",
    lambda: "step/007",
    lambda: "step/" + "9" * 5000,
    lambda: "7",
    lambda: "../../etc",
    lambda: "a/../b",
    lambda: "nul\0name",
    lambda: "txn/../tstore.json",
    lambda: "commits/00000000000000000001",
    lambda: "tstore.json",
    lambda: "latest",
    lambda: "é" * 2000,
    lambda: "object",
    lambda: "manifest",
    lambda: b"",
    lambda: b"\xff" * 8,
    lambda: b"\0" * 16,
    lambda: np.array([-1, 2], "<i8").tobytes(),
    lambda: b"{}",
    list,
    dict,
    lambda: [[]],
    lambda: {"metrics": 5},
    lambda: {"quantized": "x"},
    lambda: nested(10),
    lambda: nested(100_000),
]
"""The values that may replace another."""

TEXT: list[Callable[[], Any]] = [
    *(make for make in ABSURD if not isinstance(make(), bytes | msgspec.Raw | float)),
    lambda: "NaN",
    lambda: 1e300,
    lambda: "float128",
    lambda: "object",
    lambda: "exmy",
    lambda: "blosc",
    lambda: "zstd",
    lambda: "e99m99",
    lambda: [["dict", [["str"], ["array", "w"]]]],
    lambda: ["array", 5],
    lambda: ["int", "x"],
    lambda: ["complex", "1"],
]
"""The same in JSON."""

NAMES = ["", "step/007", "7", "a/../b", "nul\0name", "tstore.json", "é" * 2000]


def mutated(value: Any, choice: random.Random, absurd: list[Callable[[], Any]]) -> Any:
    """Return the value with one part of it replaced."""
    if isinstance(value, (list, tuple)) and value and choice.random() < 0.93:
        items, at = list(value), choice.randrange(len(value))
        match choice.randrange(10):
            case 0:
                del items[at]
            case 1:
                items.insert(at, items[choice.randrange(len(items))])
            case 2:
                items[at] = items[choice.randrange(len(items))]
            case _:
                items[at] = mutated(items[at], choice, absurd)
        return items
    if isinstance(value, dict) and value and choice.random() < 0.93:
        copy, key = dict(value), choice.choice(list(value))
        if choice.random() < 0.1:
            copy[choice.choice(NAMES)] = copy.pop(key)
        else:
            copy[key] = mutated(copy[key], choice, absurd)
        return copy
    if isinstance(value, bytes) and value[:1] == b"{" and choice.random() < 0.9:
        return document(value, choice)
    if isinstance(value, bytes) and len(value) >= 8 and choice.random() < 0.8:
        data = bytearray(value)
        size = choice.choice((1, 4, 8))
        at = choice.randrange(len(data) // size) * size
        data[at : at + size] = choice.choice((b"\xff", b"\0", b"\x01", b"\x80", b"\x10")) * size
        return bytes(data)
    if isinstance(value, int) and choice.random() < 0.3:
        return value + choice.choice((-1, 1, 2, 64))
    return choice.choice(absurd)()


def document(data: bytes, choice: random.Random) -> bytes:
    """Return a mutated `zarr.json` or marker."""
    if choice.random() < 0.03:
        return b"[" * 100_000
    return msgspec.json.encode(mutated(json.loads(data), choice, TEXT))


def opened(data: bytes) -> Any:
    """Return the decoded values of a frame."""
    return msgspec.msgpack.decode(body_of(data))


def framed(head: bytes, values: Any) -> bytes:
    """Return values in a frame with a valid checksum."""
    return sealed(head[6:8], msgspec.msgpack.encode(values))


def versions(objects: Objects) -> list[str]:
    return sorted(key for key in objects if key.startswith("commits/"))


def forge(good: Objects, seed: int) -> Objects:
    """Return the objects of a store with an absurd one, changed or added."""
    choice = random.Random(seed)
    objects = dict(good)
    records = versions(objects)
    near = [lambda: choice.choice(list(objects)), lambda: len(records) + choice.choice((-2, -1, 0, 1, 2))]
    near += [lambda: [choice.choice(list(objects))], lambda: [choice.randrange(1, len(records) + 2)]]
    near += [lambda: {"t3": choice.choice((1, 3, 10**12, -1))}]
    absurd = [*ABSURD, *near * 4]
    kinds = [
        "record",
        "record",
        "new",
        "new",
        "new",
        "new",
        "root",
        "manifest",
        "fragment",
        "marker",
        "hint",
        "beat",
    ]
    kind = choice.choice(kinds)
    times = choice.choice((1, 1, 1, 2, 5))

    def changed(key: str, head: bytes | None = None) -> bytes:
        values = opened(objects[key])
        for _ in range(times):
            values = mutated(values, choice, absurd)
        return framed(head or objects[key][:8], values)

    if kind == "record":
        key = choice.choice(records)
        objects[key] = changed(key)
        bind(objects, key)
    elif kind == "new":  # above the newest version
        key = f"commits/{len(records) + 1:020d}"
        rich = [r for r in records if len(objects[r]) > 150]
        made = changed(choice.choice(rich))
        if choice.random() < 0.5:  # not the id of a committed transaction
            name = opened(objects[choice.choice(rich)])[0]
            body = bytes(body_of(made)).replace(
                msgspec.msgpack.encode(name), msgspec.msgpack.encode("f" * len(name))
            )
            made = sealed(made[6:8], body)
        objects[key] = made
        bind(objects, key)
    elif kind == "root":
        key = choice.choice([k for k in objects if k.startswith("roots/")])
        objects[key] = changed(key)
    elif kind == "manifest":
        [key] = [k for k in objects if "/manifest" in k]
        before = objects[key]
        objects[key] = changed(key)
        for record in records:
            values = opened(objects[record])
            if refer(values, key, before, objects[key]):
                objects[record] = framed(objects[record][:8], values)
                bind(objects, record)
    elif kind == "fragment":
        key = choice.choice([k for k in objects if "/part-" in k])
        objects[key] = changed(key)
        if choice.random() < 0.2:
            objects[key.replace("00001", "99999").replace("00002", "999999999999")] = objects[key]
    elif kind == "marker":
        fields = json.loads(objects["tstore.json"])
        fields[choice.choice(list(fields))] = choice.choice(TEXT)()
        objects["tstore.json"] = msgspec.json.encode({**fields, "checksum": ""})
        if choice.random() < 0.2:
            objects["tstore.json"] = b'{"format":1,"x":' + b"[" * 100_000
    elif kind == "hint":
        objects["latest"] = choice.choice(
            (b"9" * 5000, b"-1", b"nan", b"", b"\xff", b"4611686018427387903", b" 7")
        )
    else:
        [key] = [k for k in objects if "/alive-" in k]
        texts = (b"[" * 100_000, b'{"name":"x","time":1e308}', b'{"name":5,"time":0}', b"")
        objects[key] = choice.choice(texts)
    return objects


def refer(values: Any, key: str, before: bytes, after: bytes) -> bool:
    """Update the reference of a record to a changed object; return whether it has one."""
    referred = False
    for item in values if isinstance(values, list) else ():
        if isinstance(item, list) and item[:2] == ["object", key]:
            item[2:] = [len(after), after[-16:]]
            referred = True
        elif refer(item, key, before, after):
            referred = True
    return referred


def bind(objects: Objects, record: str) -> None:
    """Update a changed record and all later ones, and their roots, so that they refer to each other."""
    log_id, check = Marker.decode(objects["tstore.json"]).log_id, NO_RECORD
    for number, name in enumerate(versions(objects), 1):
        if name >= record:
            objects[name] = linked(objects[name], Link(log_id, number - 1, check))
        check = check_of(objects[name])
        if name >= record and (key := name.replace("commits", "roots")) in objects:
            values = opened(objects[key])
            values[1] = check
            objects[key] = framed(objects[key][:8], values)


TREES = [{"w": np.arange(1200, dtype="f4").reshape(30, 40) + i, "l": [np.arange(9) + i, 5]} for i in range(4)]


async def taken(storage: Any) -> Objects:
    contents = {}
    for key in await storage.list(""):
        contents[key] = bytearray(await storage.size(key) or 0)  # `read` has no bound on the length, unlike `get`
        storage.reader(key).read_into(0, [memoryview(contents[key])], len(contents[key]))
    return {key: bytes(data) for key, data in contents.items()}


async def put(url: str, objects: Objects) -> None:
    storage = connect(url)
    for key, data in objects.items():
        await storage.replace(key, data)


@pytest.fixture(scope="module")
def stores() -> tuple[Objects, Objects]:
    """Return a store with an object of every kind, and a copy of an older version of it."""

    async def make() -> tuple[Objects, Objects]:
        store = await tstore.open(f"memory://{uuid.uuid4()}")
        await tstore.save(store, TREES[0], 0, codecs={"w": "e4m3"}, metrics={"loss": 0.5})
        await tstore.save(store, TREES[1], 1, metrics={"loss": 0.25})
        async with store.transaction(tag="big") as tx:
            for i in range(150):
                await (await tx.create_array(f"many/{i}", (64,), "f4", (4,))).write(np.full(64, i))
        await store.collect(Keep(last=1, tags=("big",)))
        for i in range(58):
            async with store.transaction(durability="none", tag=f"t{i}") as tx:
                if i % 20 == 0:
                    await (await tx.create_array(f"small{i}", (8,), "f4", (4,))).write(np.ones(8))
        older = await taken(store.log.storage)
        await tstore.save(store, TREES[2], 2, metrics={"loss": 0.125})
        await store.collect(Keep(last=2, tags=("t3", "big")))
        await tstore.save(store, TREES[3], 3, codecs={"w": "e4m3"})
        async with store.transaction() as tx:
            await (await tx.create_array("g/x", (8, 8), "f4", (4, 8), codecs="lossless")).write(np.eye(8))
            await (await tx.create_array("s", (100,), "f8", (10,), sparse=True)).write(np.ones(100))
        for name, hosts in (("whole", (0, 1)), ("half", (1,))):
            for host in hosts:
                tx = store.transaction(name=name, host=host, hosts=2, attempt="a", tag=name)
                await (await tx.create_array(f"{name}", (8,), "f4", (4,)))[4 * host : 4 * host + 4].write(
                    np.ones(4)
                )
                with suppress(TStoreError):  # the other host is absent
                    await tx.commit(timeout=0.01)
        objects = await taken(store.log.storage)
        part = next(k for k in objects if "/part-00001" in k)
        objects[part.replace("part", "alive")] = b'{"name":"half","time":1.0}'
        return objects, older

    return asyncio.run(make())


@contextmanager
def bounded() -> Iterator[None]:
    """Limit the time and memory of the block."""

    def late(*_: object) -> None:
        raise AssertionError("it takes too long")

    old = signal.signal(signal.SIGALRM, late)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, limits[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_AS, limits)


async def reads(url: str) -> None:
    """Run every verb that reads."""
    store = await tstore.open(url, "r")

    async def everything(at: Any) -> None:
        snapshot = await store.snapshot(at)
        repr(snapshot)
        snapshot.attributes()
        for path in snapshot.paths():
            with suppress(TStoreError):
                array = await snapshot.array(path)
                repr((array, array.shape, array.dtype, array.attributes))
                await array[tuple(slice(0, 1) for _ in array.shape)].read()

    async def history() -> None:
        async for commit in store.history():
            repr(commit)

    async def tags() -> None:
        for tag in list(await store.tags())[-6:]:
            with suppress(TStoreError):
                await everything(tag)

    now = datetime.datetime.now(datetime.UTC)
    verbs: list[Callable[[], Awaitable[Any]]] = [
        lambda: everything(None),
        lambda: everything(now),
        lambda: everything(3),
        lambda: everything(1),
        history,
        tags,
        lambda: tstore.steps(store),
        lambda: tstore.restore(store),
        lambda: tstore.restore(store, 1),
        lambda: tstore.restore(store, 3, packed=True),
        lambda: tstore.restore(store, target=TREES[3]),
        lambda: tstore.restore(store, at="big", only="many/1"),
        lambda: tstore.restore(store, at="whole"),
        store.verify,
        store.pending,
        lambda: store.outcome("nobody"),
        lambda: store.collect(Keep(last=1), dry_run=True),
        lambda: store.collect(Keep(best=(1, "loss"), every=2), abandoned=NOW, dry_run=True),
        lambda: store.diff("step/2"),
        lambda: store.diff(65),
        lambda: store.diff(3, 66),
    ]
    for verb in verbs:
        with suppress(TStoreError):
            repr(await verb())


async def writes(url: str) -> None:
    """Run every verb that writes."""
    store = await tstore.open(url)

    async def commit(path: str, isolation: Any) -> None:
        async with store.transaction(isolation=isolation) as tx:
            await (await tx.array(path))[1:3].write(np.ones((2, 40) if path == "w" else 2))

    async def change() -> None:
        async with store.transaction() as tx:
            await (await tx.array("g/x")).resize((9, 8))
            await tx.delete("s")

    async def finish() -> None:
        for transaction in await store.pending():
            with suppress(TStoreError):
                await store.finish(transaction.transaction)
            with suppress(TStoreError):
                await store.finish(transaction.name)

    verbs: list[Callable[[], Awaitable[Any]]] = [
        lambda: commit("w", "snapshot"),
        lambda: commit("s", "serializable"),
        change,
        finish,
        lambda: tstore.save(store, TREES[1], 4),
        lambda: tstore.quantize(store, "e4m3", at="step/2"),
        lambda: tstore.quantize(store),
        lambda: store.collect(Keep(last=1, tags=("whole",))),
        lambda: store.collect(abandoned=NOW),
        lambda: store.collect(Keep(last=1), abandoned=NOW),
        lambda: tstore.save(store, TREES[1], 5),
        lambda: tstore.restore(store, 5),
        store.verify,
    ]
    for verb in verbs:
        with suppress(TStoreError):
            await verb()


@pytest.mark.parametrize("seed", SEEDS)
def test_every_verb_survives_a_forged_object(seed: int, stores: tuple[Objects, Objects], tmp_path: Any) -> None:
    good, older = stores
    objects = forge(good, seed)
    names = [f"memory://{uuid.uuid4()}" for _ in range(4)]
    url, new, old, copied = names

    async def attack() -> None:
        await put(url, objects)
        with suppress(TStoreError):
            await reads(url)
        assert await taken(connect(url)) == objects
        await put(old, older)
        for at in (None, "big", 3):
            for target in (new, old) if at is None else (copied,):
                with suppress(TStoreError):
                    await tstore.copy(url, target, at)
        with suppress(TStoreError):
            await writes(url)
        after = await taken(connect(url))
        lost = [k for k in objects if k.startswith(("commits/", "tstore")) and after.get(k) != objects[k]]
        assert not lost
        kept = await taken(connect(old))
        assert {k: v for k, v in kept.items() if k in older and k != "latest"} == {
            k: v for k, v in older.items() if k != "latest"
        }
        odd = [k for name in names for k in await connect(name).list("") if not k.startswith(PLACES)]
        assert not odd

    with bounded():
        asyncio.run(attack())


PLACES = ("commits/0", "roots/0", "txn/", "latest", "tstore.json")
