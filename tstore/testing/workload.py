"""What the hosts of a simulation do: transactions, groups, checkpoints and reads, chosen at random."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np

import tstore
from tstore.checkpoint.shards import Shards
from tstore.checkpoint.steps import step_tag
from tstore.commits.retention import Keep
from tstore.errors import CommitOutcomeUnknown, NotFound, SnapshotExpired, TStoreError, Unavailable
from tstore.snapshot import Snapshot
from tstore.store import Store
from tstore.testing.history import (
    CELLS,
    PER_CHUNK,
    Attempt,
    Create,
    Delete,
    History,
    Look,
    Op,
    Put,
    Read,
    Replace,
    Resize,
    Seen,
    cells_of,
    width_of,
)
from tstore.testing.storage import Host, HostBackend, Storage
from tstore.transactions.group import Membership
from tstore.transactions.transaction import Isolation, Transaction

__all__ = ["PATHS", "GroupPlan", "Site", "read_state"]

PATHS = ("big/0", "big/1", "small/0", "small/1", "small/2")
_RESIZED = PATHS[1:]  # groups write to the first, of which each host knows where its part lies
_TAGS = ("best", "good")
_FROZEN = 1_000_000  # the value of an array that is the same in every second checkpoint, and so is stored once
_LONG_NOTE = "n" * 17_000  # makes a manifest too long to travel in its record


class GroupPlan(NamedTuple):
    """A cooperative transaction that several hosts are to make: a checkpoint, or writes into shared arrays.

    `values[h]` is what host `h` writes.
    """

    name: str
    attempt: str
    hosts: int
    values: tuple[int, ...]
    step: int | None

    @property
    def transactions(self) -> tuple[str, ...]:
        """The ids of the transaction, and of its repetition where a gc took what a checkpoint re-used."""
        again = () if self.step is None else (f"{self.attempt}.anew",)
        return tuple(Membership.of(self.name, 0, self.hosts, a).transaction for a in (self.attempt, *again))


class Site:
    """One run of a host: its store, and the history in which it notes what it does and sees."""

    def __init__(self, host: Host, storage: Storage, history: History) -> None:
        self.host = host
        self.history = history
        self.store = Store(HostBackend(storage, host), "simulated", "a")
        self._random = host.random
        self._loop = asyncio.get_running_loop()

    async def live(self, rounds: int) -> None:
        """The work of this host, in one task or in several that share the store."""
        tasks = self._random.choice((1, 1, 2, 5))  # of which some commit together, where there are many
        await asyncio.gather(*[self.work(min(rounds, 12 // tasks)) for _ in range(tasks)])

    async def work(self, rounds: int) -> None:
        """That many things, one after the other, with pauses between them."""
        doings: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (0.5, self.transact),
            (0.16, self.read),
            (0.1, self.collect),
            (0.06, self.look_back),
            (0.08, self.checkpoint),
            (0.05, self.restore),
            (0.04, self.count_history),
            (0.01, self.verify),
        ]
        chances, calls = zip(*doings, strict=True)
        for _ in range(rounds):
            await asyncio.sleep(self._random.expovariate(2))
            [call] = self._random.choices(calls, chances)
            await call()

    async def transact(self) -> None:
        """An independent transaction of a few operations, which may be given up."""
        tags: dict[str, Any] = {}
        if self._random.random() < 0.3:
            tags[self._random.choice(("move_tag", "move_tag", "tag", "drop_tag", "drop_tag"))] = (
                self._random.choice(_TAGS)
            )
        isolation: Isolation = "serializable" if self._random.random() < 0.25 else "snapshot"
        tx = self.store.transaction("work", isolation=isolation, **tags)
        named = [t for key in ("tag", "move_tag") if (t := tags.get(key)) is not None]
        attempt = self.history.begin((tx.id,), tuple(named))
        attempt.serializable = isolation == "serializable"
        attempt.created = tuple(t for key, t in tags.items() if key == "tag" and t is not None)
        attempt.dropped = tuple(t for key, t in tags.items() if key == "drop_tag" and t is not None)
        after = self._loop.time()
        if self._random.random() < 0.05:
            await self._interrupt(tx, attempt, asyncio.create_task(self._fill(tx, attempt, after)))
            return
        await self._end(tx, attempt, 0, self._fill(tx, attempt, after))

    async def _interrupt(self, tx: Transaction, attempt: Attempt, work: asyncio.Task[int | None]) -> None:
        """Cancels a transaction while it is filled or committed; what it says it became must be true."""
        await asyncio.wait([work], timeout=self._random.expovariate(1))
        work.cancel()
        await asyncio.wait([work])
        if not work.cancelled() and (error := work.exception()) is not None:
            if not isinstance(error, TStoreError):
                raise error
            attempt.outcomes.append(error)
        if tx.version is not None:
            attempt.outcomes.append(tx.version)
            self.history.acknowledged.append((self._loop.time(), tx.version, attempt.transaction))
        await tx.abort()

    async def _fill(self, tx: Transaction, attempt: Attempt, after: float) -> int | None:
        attempt.bases[0] = (await tx.base()).version
        paths = frozenset(await tx.paths())
        self.history.looks.append(Look(self.host.name, after, attempt.bases[0], paths))
        attempt.seen.append(Seen((), None, paths))
        for _ in range(self._random.randint(1, 3)):
            await self._one(tx, attempt)
            if self._random.random() < 0.3:
                await asyncio.sleep(self._random.expovariate(1))
        if self._random.random() < 0.05:
            attempt.given_up = True
            await tx.abort()
            return None
        return await tx.commit()

    async def _one(self, tx: Transaction, attempt: Attempt) -> None:
        """One operation on an array that is there, or is made."""
        ops = attempt.ops[0]
        path = self._random.choice(PATHS)
        there = path in await tx.paths()
        draw = self._random.random()
        if not there:
            note = {"note": _LONG_NOTE} if self._random.random() < 0.1 else None
            await create(tx, path, note)
            ops.append(Create(path))
        elif draw < 0.1 and Create(path) not in ops:
            await tx.delete(path)
            ops.append(Delete(path))
        elif draw < (0.5 if attempt.serializable else 0.3):
            array = await tx.array(path)
            seen = {path: cells_of(path, await array.read())}
            self.history.reads.append(Read(self.host.name, 0, attempt.bases[0], seen, own=tuple(ops), partly=True))
            attempt.seen.append(Seen(tuple(ops), path, seen[path]))
        elif draw > 0.9 and path in _RESIZED:
            cells = self._random.randint(PER_CHUNK + 1, CELLS + 3)
            await (await tx.array(path)).resize((cells * width_of(path),))
            ops.append(Resize(path, cells))
        else:
            cells = (await tx.array(path)).shape[0] // width_of(path)
            if draw < 0.6:
                start = PER_CHUNK * self._random.randrange(-(-cells // PER_CHUNK))
                stop = min(cells, start + PER_CHUNK)
            else:
                start = self._random.randrange(cells)
                stop = min(cells, start + self._random.randint(1, 5))
            put = Put(path, start, stop, self.history.value())
            await write(tx, put)
            ops.append(put)

    async def cooperate(self, plan: GroupPlan, host: int, timeout: float) -> None:
        """This host's part of a group's transaction."""
        tags = (plan.name,)
        attempt = self.history.begin(plan.transactions, tags, plan.hosts)
        await asyncio.sleep(self._random.expovariate(1))
        if plan.step is not None:
            await self._end(None, attempt, host, self._save(plan, attempt, host, timeout))
            return
        tx = self.store.transaction(
            "together", plan.name, name=plan.name, host=host, hosts=plan.hosts, attempt=plan.attempt
        )
        await self._end(tx, attempt, host, self._share(tx, plan, attempt, host, timeout))

    async def checkpoint(self) -> None:
        """A checkpoint of one of a few steps, by two hosts that live and die together."""
        step, values = self._random.randint(3, 9), (self.history.value(), self.history.value())
        plan = GroupPlan(f"step/{step}", f"at {values[0]}", 2, values, step)
        await asyncio.gather(*[self.cooperate(plan, host, 20.0) for host in range(2)])

    async def _save(self, plan: GroupPlan, attempt: Attempt, host: int, timeout: float) -> int:
        assert plan.step is not None
        for h, value in enumerate(plan.values):
            attempt.ops[h] = saved_ops(plan, h, value)
        lines = CELLS // plan.hosts
        mine = slice(host * lines * width_of("w"), (host + 1) * lines * width_of("w"))
        part = np.full(lines * width_of("w"), plan.values[host], np.int64)
        tree = {
            "w": Shards((CELLS * width_of("w"),), "int64", [((mine,), part)]),
            "b": np.full(CELLS, plan.values[0], np.int64),
            "wfrozen": np.full(CELLS * width_of("w"), _frozen(plan), np.int64),
        }
        options: dict[str, Any] = {"host": host, "hosts": plan.hosts, "attempt": plan.attempt}
        return await tstore.save(self.store, tree, plan.step, timeout=timeout, **options)

    async def _share(self, tx: Transaction, plan: GroupPlan, attempt: Attempt, host: int, timeout: float) -> int:
        """Writes one chunk of an array that is there and one of an array that the group makes."""
        base = await tx.base()
        attempt.bases[host] = min(base.version, attempt.bases.get(host, base.version))
        made = f"small/{plan.name}"
        ops: list[Op] = [Create(made)]
        for path in ("big/0", made):
            start = PER_CHUNK * host
            if path == made or path in await tx.paths():
                ops.append(Put(path, start, start + PER_CHUNK, plan.values[host]))
        attempt.ops[host] = ops
        await create(tx, made, None)
        for op in ops:
            if isinstance(op, Put):
                await write(tx, op)
        return await tx.commit(timeout)

    async def _end(self, tx: Transaction | None, attempt: Attempt, host: int, call: Awaitable[int | None]) -> None:
        """Notes how a transaction ended for this host, and asks again where the outcome is not known."""
        try:
            outcome = await call
        except TStoreError as error:
            self.host.tell(f"{attempt.transaction}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
            attempt.outcomes.append(error)
            if tx is not None:
                await tx.abort()
            if isinstance(error, CommitOutcomeUnknown):
                await self._ask(attempt)
            return
        if outcome is not None:
            self.host.tell(f"{attempt.transaction} is version {outcome}, by {attempt.ops[host]}")
            attempt.outcomes.append(outcome)
            self.history.acknowledged.append((self._loop.time(), outcome, attempt.transaction))

    async def _ask(self, attempt: Attempt) -> None:
        """What became of an attempt; only that it stands is told for good."""
        try:
            version = await self.store.outcome(attempt.transaction)
        except Unavailable:
            return
        if version is not None:
            self.history.told.setdefault(attempt.transaction, []).append(version)

    async def read(self) -> None:
        """The newest state, wholly."""
        await self._look(None)

    async def look_back(self) -> None:
        """The state of an earlier version."""
        await self._look(self._random.random())

    async def _look(self, part: float | None) -> None:
        after = self._loop.time()
        try:
            snapshot = await self.store.snapshot()
            if part is not None:
                low = max(self.history.start, 1)
                snapshot = await self.store.snapshot(low + int(part * (snapshot.version - low + 1)))
            await asyncio.sleep(self._random.expovariate(2))
            state = await read_state(snapshot)
        except (Unavailable, SnapshotExpired):
            return
        except TStoreError as error:
            self.history.faults.append(f"{self.host.name} could not read: {type(error).__name__}: {error}")
            return
        self.host.tell(f"reads version {snapshot.version}")
        self.history.reads.append(Read(self.host.name, after, snapshot.version, state, newest=part is None))

    async def restore(self) -> None:
        """The newest checkpoint, if there is one."""
        try:
            steps = await tstore.steps(self.store)
            if not steps:
                return
            tree = await tstore.restore(self.store, steps[-1])
        except Unavailable:
            return
        except NotFound as error:  # a newer step was saved since, and the one that was asked for collected
            if isinstance(error, SnapshotExpired) or "has no step" in str(error):
                return
            raise
        except TStoreError as error:
            self.history.faults.append(f"{self.host.name} could not restore: {type(error).__name__}: {error}")
            return
        state = {path: cells_of(path, values) for path, values in tree.items()}
        self.history.reads.append(Read(self.host.name, 0, None, state, tag=step_tag(steps[-1])))

    async def verify(self) -> None:
        """The whole store, in which nothing may be amiss at any time."""
        try:
            report = await self.store.verify()
        except Unavailable:
            return
        self.history.faults += [f"{self.host.name} verified: {fault}" for fault in report.faults]

    async def collect(self) -> None:
        """Retention and garbage collection, which may take slow transactions for abandoned."""
        keep = self._random.choice((None, Keep(last=1), Keep(every=2), Keep(newer_than=timedelta(seconds=5))))
        abandoned = timedelta(seconds=self._random.choice((1, 10, 100)))
        try:
            report = await self.store.collect(keep, abandoned=abandoned)
        except (Unavailable, CommitOutcomeUnknown) as error:
            self.host.tell(f"gc: {type(error).__name__}")
        except TStoreError as error:
            self.history.faults.append(f"{self.host.name} could not collect: {type(error).__name__}: {error}")
        else:
            self.host.tell(f"gc is version {report.version}: {report.versions} and {report.abandoned} go")

    async def count_history(self) -> None:
        """Every commit of the log, which must not change from one look to the next."""
        try:
            seen = {c.version: c.transaction async for c in self.store.history()}
        except Unavailable:
            return
        except TStoreError as error:
            self.history.faults.append(f"{self.host.name} could not list: {type(error).__name__}: {error}")
            return
        for version, transaction in seen.items():
            if version > self.history.start:
                self.history.told.setdefault(transaction, []).append(version)


def saved_ops(plan: GroupPlan, host: int, value: int) -> list[Op]:
    """What a host contributes to a checkpoint, as the model has it."""
    lines = CELLS // plan.hosts
    ops: list[Op] = [Replace(), Create("w"), Create("b"), Create("wfrozen")]
    if host == 0:
        ops += [Put("b", 0, CELLS, value), Put("wfrozen", 0, CELLS, _frozen(plan))]
    return [*ops, Put("w", host * lines, (host + 1) * lines, value)]


def _frozen(plan: GroupPlan) -> int:
    assert plan.step is not None
    return _FROZEN + plan.step % 2


async def create(tx: Transaction, path: str, attributes: dict[str, Any] | None) -> None:
    """A new array of zeros."""
    width = width_of(path)
    await tx.create_array(
        path, (CELLS * width,), "int64", (PER_CHUNK * width,), attributes=attributes, sparse=True
    )


async def write(tx: Transaction, put: Put) -> None:
    """What the operation says."""
    array, width = await tx.array(put.path), width_of(put.path)
    await array[put.start * width : put.stop * width].write(put.value)


async def read_state(snapshot: Snapshot) -> dict[str, tuple[int, ...]]:
    """The cells of every array of a snapshot."""
    return {path: cells_of(path, await (await snapshot.array(path)).read()) for path in snapshot.paths()}
