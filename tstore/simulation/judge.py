"""What a host finds at the end of a simulated run that knows nothing of it: in the store, its copy, and after a
power failure.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator

import tstore
from tstore.errors import NotAStore, SnapshotExpired, TStoreError
from tstore.format.layout import commit_key
from tstore.simulation.checker import Committed, violations
from tstore.simulation.edits import create
from tstore.simulation.history import Attempt, History
from tstore.simulation.site import Darkroom, read_state
from tstore.simulation.storage import HostStorage, SharedObjects
from tstore.simulation.weather import Host
from tstore.store import Store

__all__ = ["committed", "judge_copy", "judge_power_failure", "judge_store"]

Log = dict[int, Committed]
Born = Callable[[str], contextlib.AbstractContextManager[Host]]
"""Makes a host of a name that nothing hinders, in whose world the running task lives."""


async def judge_store(
    born: Born, storage: SharedObjects, first: Committed, history: History
) -> tuple[list[str], Log]:
    """The promises that are broken, and the versions above the one from which the run began."""
    found: list[str] = []
    log: Log = {}
    start = history.start
    with born("judge") as host:
        keys = sorted(k for k in storage.objects if k.startswith("commits/"))
        newest = len(keys)
        if keys != [commit_key(v) for v in range(1, newest + 1)]:
            return [*history.faults, f"the versions are not dense: {keys}"], {}
        with _told(found):
            store = await tstore.open(HostStorage(storage, host))
            if (seen := (await store.snapshot()).version) != newest:
                found.append(f"the newest version is {newest}, and {seen} was found")
            for version in range(start + 1, newest + 1):
                log[version] = await committed(store, version)
            if newest > start and log[newest].state is None:
                found.append(f"the newest version {newest} has expired")
            found += await _verified(store)
            told = [c async for c in store.history() if c.version > start]
            for name in history.attempts:
                history.told.setdefault(name, []).append(await store.outcome(name))
            async with store.transaction("after") as tx:
                await create(tx, "after", None)
            if tx.version != newest + 1:
                found.append(f"the next commit became version {tx.version}, and not {newest + 1}")
    if found:
        return [*history.faults, *found], log
    return violations(first, log, told, history), log


async def judge_copy(
    born: Born, mirror: SharedObjects, first: Committed, source: tuple[SharedObjects, History, Log], own: History
) -> list[str]:
    """The promises that are broken at a copy, where hosts went on too: `own` is what these did and saw."""
    storage, history, log = source
    combined = copy.copy(own)
    combined.start = history.start
    combined.attempts = {name: _untold(attempt) for name, attempt in history.attempts.items()} | own.attempts
    combined.unnamed = {name: _untold(attempt) for name, attempt in history.unnamed.items()} | own.unnamed
    with born("mirror's judge") as host:
        try:
            await tstore.open(HostStorage(mirror, host), "r")
        except NotAStore:
            return []  # it never came so far
    if history.lagging:
        return []  # a copy may be of a version before the run began, and go its own way from there
    ours, theirs = ({v: objects.get(commit_key(v)) for v in log} for objects in (storage.objects, mirror.objects))
    apart = next((v for v in log if ours[v] != theirs[v]), max(log, default=0))
    mixed = [v for v in log if v > apart and ours[v] == theirs[v]]
    if mixed:
        return [f"the copy's version {apart} is its own, and {mixed} above it are of the source"]
    found, _ = await judge_store(born, mirror, first, combined)
    return [f"in the copy: {fault}" for fault in found]


async def judge_power_failure(born: Born, darkroom: Darkroom, log: Log, chance: random.Random) -> list[str]:
    """The promises that are broken where the power failed at the moment of the photograph."""
    assert darkroom.photograph is not None
    storage = darkroom.photograph.after_power_failure(chance)
    found: list[str] = []
    with born("power failure's judge") as host, _told(found):
        store = await tstore.open(HostStorage(storage, host))
        newest = (await store.snapshot()).version
        if newest < darkroom.acknowledged:
            found.append(f"version {newest} is the newest, though {darkroom.acknowledged} was acknowledged")
        for version in (v for v in log if v <= newest):
            there = await committed(store, version)
            if there.record.transaction != log[version].record.transaction:
                found.append(f"version {version} is another than before")
            if there.state is not None and log[version].state not in (None, there.state):
                found.append(f"version {version} has other values than before")
        found += await _verified(store)
    return [f"after a power failure: {fault}" for fault in found]


async def committed(store: Store, version: int) -> Committed:
    """Return the record of a version, and its state unless it has expired."""
    log = store.log.reader
    record = await log.records.with_collection(version, await log.record(version))
    try:
        snapshot = await store.snapshot(version)
    except SnapshotExpired:
        return Committed(record, None, {})
    return Committed(record, await read_state(snapshot), snapshot.tags)


async def _verified(store: Store) -> list[str]:
    """What a verification finds, but for roots that the run began with."""
    return [fault for fault in (await store.verify()).faults if "roots/" not in fault]


@contextlib.contextmanager
def _told(found: list[str]) -> Iterator[None]:
    try:
        yield
    except TStoreError as error:
        found.append(f"in the end: {type(error).__name__}: {error}")


def _untold(attempt: Attempt) -> Attempt:
    """The attempt of a source, of whose outcome there a copy tells nothing."""
    copied = copy.copy(attempt)
    copied.outcomes = []
    return copied
