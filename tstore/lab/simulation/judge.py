"""Checks of the store at the end of a simulated run, of its copy, and of its state after a power failure."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator

import tstore
from tstore.core.copying.copy import copy_to
from tstore.core.format.layout import MARKER, commit_key, is_archive
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.segments import SEGMENT_ROW
from tstore.core.log.expiry import head_as_of
from tstore.core.store import Store
from tstore.core.transactions.decision import withdrawal_in
from tstore.core.transactions.membership import Membership
from tstore.errors import Conflict, NotAStore, NotFound, SnapshotExpired, TStoreError
from tstore.lab.simulation.checker import find_violations
from tstore.lab.simulation.client import SimulatedStore, read_state
from tstore.lab.simulation.edits import create
from tstore.lab.simulation.history import Attempt, History, Traits
from tstore.lab.simulation.replay import CommittedVersion, rolled_back_to
from tstore.lab.simulation.storage import HostStorage, SharedObjects
from tstore.lab.simulation.virtual import Host

__all__ = ["count_objects", "finish_copy", "judge_copy", "judge_power_failure", "judge_store", "read_committed"]

CommittedLog = dict[int, CommittedVersion]
NewHost = Callable[[str], contextlib.AbstractContextManager[Host]]
"""A function that returns a context in which the running task acts as a new host of this name, without faults."""


async def judge_store(
    new_host: NewHost, storage: SharedObjects, initial: CommittedVersion, history: History
) -> tuple[list[str], CommittedLog]:
    """Return the broken promises, and the log of the versions that the run made."""
    violations: list[str] = []
    log: CommittedLog = {}
    start = history.start
    with new_host("judge") as host:
        versions = sorted(storage.records())
        newest = len(versions)
        if versions != list(range(1, newest + 1)):
            return [*history.violations, f"versions are missing: {versions}"], {}
        with _errors_as_violations(violations):
            store = await tstore.open(HostStorage(storage, host))
            if (found := await store.log.reader.newest()) != newest:
                violations.append(f"the newest version is {newest}, but {found} was returned")
            for version in range(start + 1, newest + 1):
                log[version] = await read_committed(store, version)
            head = max((v for v, commit in log.items() if not commit.record.source), default=start)
            if (seen := (await store.snapshot()).version) != head:
                violations.append(f"the head is version {head}, but {seen} was returned")
            if head > start and log[head].state is None:
                violations.append(f"the head, version {head}, has expired")
            violations += await _find_faults(store, history.traits)
            violations += _find_withdrawn(storage, log)
            violations += _find_behind_rollback(storage, log)
            commits = [c async for c in store.history() if c.version > start]
            for name in history.attempts:
                history.reported.setdefault(name, []).append(await store.outcome(name))
            async with store.transaction("after") as tx:
                await create(tx, "after", None)
            if tx.version != newest + 1:
                violations.append(f"the next commit is version {tx.version}, expected {newest + 1}")
    if violations:
        return [*history.violations, *violations], log
    return find_violations(initial, log, commits, history), log


async def finish_copy(new_host: NewHost, source: SharedObjects, mirror: SharedObjects) -> None:
    """Copy again if a version that is living in the copy has expired in the source, as its users must.

    Do nothing if there is no copy, or if the copy has diverged.
    """
    with new_host("copier") as host, contextlib.suppress(NotAStore, NotFound, Conflict):
        store, target = await tstore.open(HostStorage(source, host), "r"), HostStorage(mirror, host)
        copied = await tstore.open(target, "r")
        newest = await copied.log.reader.newest()
        living = {c.version async for c in copied.history() if not c.expired}
        try:
            for version in sorted(living | {newest, await head_as_of(copied.log.reader, newest)}):
                await store.snapshot(version)
        except SnapshotExpired:
            host.log(f"copies up to version {(await copy_to(store, target)).version}, again")


async def judge_copy(
    new_host: NewHost,
    mirror: SimulatedStore,
    initial: CommittedVersion,
    source: SimulatedStore,
    log: CommittedLog,
    rng: random.Random,
) -> list[str]:
    """Return the promises that the copy of a source breaks; `log` is the log of the source.

    After a failover, a host has written to the copy too.
    """
    if source.history.traits.lagging:
        return []  # the copy may be of a version before the run began, and may have diverged there
    if MARKER not in mirror.storage.objects:
        return []  # no copy was made
    records, copies = (s.storage.records() for s in (source, mirror))
    diverged = next((v for v in log if records[v] != copies.get(v)), max(log, default=0))
    equal_later = [v for v in log if v > diverged and records[v] == copies.get(v)]
    if equal_later:
        return [f"the copy differs from the source in version {diverged}, but not in the later {equal_later}"]
    history = copy.copy(mirror.history)  # with the attempts of both stores, once the next lines have added them
    history.attempts = _without_outcomes(source.history.attempts) | history.attempts
    history.attempts_by_message = (
        _without_outcomes(source.history.attempts_by_message) | history.attempts_by_message
    )
    violations, mirror_log = await judge_store(new_host, mirror.storage, initial, history)
    if not violations:
        violations = await judge_power_failure(new_host, mirror, mirror_log, rng)
    return [f"in the copy: {violation}" for violation in violations]


async def judge_power_failure(
    new_host: NewHost, simulated: SimulatedStore, log: CommittedLog, rng: random.Random
) -> list[str]:
    """Return the promises that are broken if the power fails when the image is taken; none without an image."""
    violations: list[str] = []
    if simulated.image is None:
        return violations
    storage = simulated.image.after_power_failure(rng)
    with new_host("power failure's judge") as host, _errors_as_violations(violations):
        store = await tstore.open(HostStorage(storage, host))
        newest = await store.log.reader.newest()
        if newest < simulated.image_version:
            violations.append(f"version {newest} is the newest, though {simulated.image_version} was acknowledged")
        for version in (v for v in log if v <= newest):
            after = await read_committed(store, version)
            if after.record.transaction != log[version].record.transaction:
                violations.append(f"version {version} has another transaction than before")
            if after.state is not None and log[version].state not in (None, after.state):
                violations.append(f"version {version} has other values than before")
        violations += await _find_faults(store, simulated.history.traits)
    return [f"after a power failure: {violation}" for violation in violations]


async def count_objects(new_host: NewHost, storage: SharedObjects, log: CommittedLog) -> Counter[str]:
    """Return the number of commits, and how many parts of metadata the living ones have, by kind."""
    counts = Counter(commits=len(log), archives=sum(map(is_archive, storage.objects)))
    with new_host("counter") as host:
        reader = (await tstore.open(HostStorage(storage, host), "r")).log.reader
        for version in (v for v, commit in log.items() if commit.state is not None):
            record = await reader.record(version)
            counts["pages"] += sum(len(m.pages) for m in record.manifests if isinstance(m, ObjectRef))
            for manifest in await reader.objects.manifests(version, record):
                counts["segments"] += len(manifest.segments) // SEGMENT_ROW.itemsize
                counts["compactions"] += len(manifest.compactions)
            root = await reader.trees.root(version)
            counts["roots that refer to others"] += root is not None and bool(root.parent)
    return counts


async def read_committed(store: Store, version: int) -> CommittedVersion:
    """Return a version with its record, and with its state and tags unless it has expired."""
    log = store.log.reader
    record = await log.records.with_collection(version, await log.record(version))
    try:
        snapshot = await store.snapshot(version)
    except SnapshotExpired:
        return CommittedVersion(record, None, {})
    return CommittedVersion(record, await read_state(snapshot), snapshot.tags)


async def _find_faults(store: Store, traits: Traits) -> list[str]:
    """Return the faults that `verify` reports, except for those of roots that somebody damaged."""
    return [fault for fault in (await store.verify()).faults if not (traits.wrong_roots and "roots/" in fault)]


def _find_withdrawn(storage: SharedObjects, log: CommittedLog) -> list[str]:
    """Return one sentence for each transaction that was committed after one of its hosts had withdrawn it.

    A gc may delete the claim of a commit, and a host that comes later may then withdraw, which changes nothing.
    """
    violations = []
    for version, commit in log.items():
        for transaction in () if commit.record.void else commit.record.transactions:
            member = Membership.from_id(transaction)
            key = "" if member is None else member.claim_key(member.top, 0)
            if (claim := storage.objects.get(key)) is None or (withdrawal := withdrawal_in(claim)) is None:
                continue
            if storage.created[key] < storage.created[commit_key(version)]:
                violations.append(f"host {withdrawal.host} withdrew {transaction}, which is version {version}")
    return violations


def _find_behind_rollback(storage: SharedObjects, log: CommittedLog) -> list[str]:
    """Return one sentence for each step saved behind a rollback if a host had delivered its part before."""
    violations, rollback = [], 0
    for version, commit in log.items():
        if rolled_back_to(commit.record) is not None:
            rollback = version
        if not rollback or commit.record.void or not any(tag.startswith("step/") for tag in commit.record.tags):
            continue
        for transaction in commit.record.transactions:
            parts = [time for key, time in storage.created.items() if key.startswith(f"txn/{transaction}/part-")]
            if min(parts, default=math.inf) < storage.created[commit_key(rollback)]:
                violations.append(f"version {version} saves {commit.record.tags} behind the rollback {rollback}")
    return violations


@contextlib.contextmanager
def _errors_as_violations(violations: list[str]) -> Iterator[None]:
    try:
        yield
    except TStoreError as error:
        violations.append(f"at the end: {type(error).__name__}: {error}")


def _without_outcomes(attempts: dict[str, Attempt]) -> dict[str, Attempt]:
    """Return copies of attempts on the source without their outcomes, which do not apply to the copied store."""
    copies = {name: copy.copy(attempt) for name, attempt in attempts.items()}
    for attempt in copies.values():
        attempt.outcomes = []
    return copies
