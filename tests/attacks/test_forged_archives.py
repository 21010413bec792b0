"""Archives, links, collections and records of repairs by another program, with valid checksums and absurd content.

A few objects of a store with all of these are changed, and in half of the cases the links and roots after them
follow. Every verb works or raises a `TStoreError`, soon and in little memory. `TSTORE_FUZZ_SECONDS` and
`TSTORE_FUZZ_SEED` are those of `support/fuzzing.py`.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import pytest

import tstore
from tests.support.forging import sealed
from tests.support.fuzzing import ABSURD, changed, fuzz
from tstore import Keep
from tstore.core.format.frame import Link, body_of, check_of, link_of, linked
from tstore.core.format.layout import HINT, MARKER, archive_key, commit_key, root_key, version_of
from tstore.core.log.marker import Marker
from tstore.core.storage.connect import connect
from tstore.errors import Corrupt, TStoreError
from tstore.lab.simulation.scenario import override_constants

CONSTANTS = {"ARCHIVE_EVERY": 8, "ROOT_EVERY": 4}
FAR = [0, 1, 5, 8, 9, 24, 26, 33, 40, 1 << 40, 10**19]
VALUES: list[Any] = [
    *(v for v in ABSURD if (v.isascii() if isinstance(v, str) else not isinstance(v, int) or abs(v) < 1 << 63)),
    *(b"", b"\0" * 16, "../../etc", "txn/../tstore.json", "nul\0name", "repair-x", "x.void", "step/007"),
    *({"voided": voided} for voided in (5, [1], list(range(40)), [-1, 0, 1 << 63, 10**12, True, None, "a"])),
    *({"resumes": version} for version in (-4, 4, 28, 1 << 62)),
    *({"replaced": checks} for checks in (7, ["zz", 5], ["00" * 16], [b"x"])),
    msgspec.Raw(b"\x91" * 150 + b"\xc0"),
]
Objects = dict[str, bytes]


async def commit(store: tstore.Store, value: int) -> None:
    async with store.transaction(tag=f"t{value}") as tx:
        if value == 1:
            await (await tx.create_array("x", (8,), "i8", (1,))).write(0)
        await (await tx.array("x"))[value % 8 : value % 8 + 1].write(np.array([value]))


async def make() -> Objects:
    """Return the objects of a store with archives, collections, roots, a repair and what that saved."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    for value in range(1, 22):
        await commit(store, value)
    for tags in (("t21", "t20", "t5"), ("t21", "t5")):
        await store.collect(Keep(last=1, tags=tags))
    await commit(store, 22)
    await store.repair(void_intact=[(await store.snapshot()).version])
    store = await tstore.open(store.url)
    for value in range(23, 30):
        await commit(store, value)
    storage, contents = store.log.storage, dict[str, bytes]()
    for key in await storage.list(""):
        contents[key] = bytes(await storage.size(key) or 0) if "/pack-" in key else await storage.get(key)
    assert any(key.startswith("damaged/") for key in contents)
    assert archive_key(8) in contents
    return contents


def mutated(data: bytes, choice: random.Random, others: list[bytes]) -> bytes:
    """Return a frame with other values, or a record with another link."""
    is_record = data[6:7] == b"R"
    if is_record and choice.random() < 0.3:
        one, other = link_of(data), link_of(choice.choice(others))
        version = choice.choice([max(0, one.version - 1), one.version + 1, *FAR[:-1]])
        links = [one._replace(version=version), one._replace(check=other.check), one._replace(log_id=b"z" * 16)]
        return linked(data, choice.choice([*links, other]))
    values = changed(msgspec.msgpack.decode(body_of(data)), choice, VALUES)
    forged = sealed(data[6:8], msgspec.msgpack.encode(values))
    return linked(forged, link_of(data)) if is_record else forged


def records_of(objects: Objects) -> list[bytes]:
    """Return all records, with those in archives."""
    archives = [msgspec.msgpack.decode(body_of(objects[key])) for key in objects if key.startswith("archives/")]
    own = [data for key, data in objects.items() if key.startswith("commits/")]
    return [*own, *(record for _, records in archives for record in records)]


def forged_archive(data: bytes, choice: random.Random, records: list[bytes]) -> bytes:
    """Return an archive with another end, or with other records."""
    end, own = msgspec.msgpack.decode(body_of(data))
    at = choice.randrange(len(own))
    replacing = [mutated(own[at], choice, records), choice.choice(records), b"", data, b"\0" * 1000]
    match choice.randrange(6):
        case 0:
            end = choice.choice(FAR[:-1])
        case 1:
            own = own * choice.choice((0, 2, 64))
        case 2:
            own = own[::-1]
        case _:
            own[at] = choice.choice([replacing[0], *replacing])
    return sealed(data[6:8], msgspec.msgpack.encode([end, own]))


def damaged_key(version: int) -> str:
    """Return the key at which a repair could have saved a record."""
    return f"damaged/{version:020d}-{'0' * 32}"


def forge(good: Objects, choice: random.Random) -> Objects:
    """Return the objects of a store of which a few are changed, moved, exchanged or gone."""
    objects, records = dict(good), records_of(good)
    for _ in range(choice.choice((1, 1, 1, 2, 3))):
        folder = choice.choice(("archives/", "archives/", "commits/", "commits/", "roots/"))
        key = choice.choice(sorted(key for key in good if key.startswith(folder)))
        match choice.randrange(8):
            case 0:
                objects.pop(key, None)
            case 1:
                place = choice.choice((archive_key, commit_key, root_key, damaged_key))
                objects[place(choice.choice(FAR))] = good[key]
            case 2:
                objects[HINT] = choice.choice((b"0", b"8", b"9" * 40, b"-1", b"", b"1_6", b"4611686018427387903"))
            case _ if folder == "archives/":
                objects[key] = forged_archive(good[key], choice, records)
            case _:
                objects[key] = mutated(good[key], choice, records)
    if choice.random() < 0.5:
        follow(objects)
    return objects


def follow(objects: Objects) -> None:
    """Set the link of each record to the one before it, and the checksum in its root, so that they fit again."""
    log_id = Marker.decode(objects[MARKER]).log_id
    for key in sorted(key for key in objects if key.startswith("commits/")):
        version = version_of(key)
        if before := objects.get(commit_key(version - 1), b""):
            objects[key] = linked(objects[key], Link(log_id, version - 1, check_of(before)))
        if root := objects.get(root_key(version)):
            with suppress(msgspec.DecodeError, ValueError):  # another object may be in its place
                number, _, *rest = msgspec.msgpack.decode(body_of(root), type=list[msgspec.Raw])
                values = [number, check_of(objects[key]), *rest]
                objects[root_key(version)] = sealed(root[6:8], msgspec.msgpack.encode(values))


async def read(store: tstore.Store) -> None:
    for at in (None, 5, 8, 20, 24, 27):
        with suppress(TStoreError):
            snapshot = await store.snapshot(at)
            assert repr([snapshot, snapshot.paths(), await store.tags()])
    async for entry in store.history():
        assert repr(entry)


async def repair(store: tstore.Store) -> None:
    damaged = [damage.version for damage in (await store.repair()).damaged]
    with suppress(TStoreError):
        await store.repair(damaged)
    await store.repair(void_intact=damaged or [(await store.snapshot()).version])


async def collect(store: tstore.Store) -> None:
    for _ in range(2):
        await store.collect(Keep(last=1), abandoned=timedelta(0))


VERBS: list[Callable[[tstore.Store], Awaitable[Any]]] = [
    read,
    repair,
    collect,
    lambda store: store.verify(),
    lambda store: store.outcome("nobody"),
    lambda store: store.pending(),
    lambda store: store.diff(20),
    lambda store: commit(store, 30),
    lambda store: tstore.save(store, {"w": np.arange(9)}, 1),
    lambda store: tstore.copy(store, f"memory://{uuid.uuid4()}"),
]
NAMED = ("commits/", "archives/", "roots/", "damaged/", "txn/", "version", "latest")


async def attack(good: Objects, choice: random.Random) -> bool:
    """Run every verb on a forged store of its own; return whether all but one succeeded."""
    objects, errors = forge(good, choice), list[TStoreError]()
    for verb in VERBS:
        storage = connect(url := f"memory://{uuid.uuid4()}")
        for key, data in objects.items():
            await storage.replace(key, data)
        try:
            await verb(await tstore.open(url))
        except TStoreError as error:
            errors.append(error)
    assert all(any(name in str(e) for name in NAMED) for e in errors if isinstance(e, Corrupt)), errors
    return len(errors) <= 1


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("cases", [15, pytest.param(400, marks=pytest.mark.deep)])
def test_every_verb_works_or_raises_an_error_of_tstore(cases: int) -> None:
    with override_constants(**CONSTANTS):
        good = asyncio.run(make())
        fuzz("forged archives", lambda choice: asyncio.run(attack(good, choice)), cases)
