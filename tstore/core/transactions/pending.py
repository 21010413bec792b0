"""Cooperative transactions under way: which hosts have delivered fragments, and which are absent.

Heartbeats show people which hosts are alive; no step of a commit reads them, and losing one costs nothing. While a
host writes or waits, it renews its heartbeat, the small object `txn/<id>/alive-<host>-of-<hosts>`: first
after one second, so that a quick save needs none, then every ten seconds. The hosts of a large job renew less
often, so that together they send about a hundred per second. A heartbeat is deleted at the end of its transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec

from tstore.core.format.arguments import checked_text, quote
from tstore.core.format.layout import TRANSACTIONS, folder_of
from tstore.core.format.objects.records import Fragment
from tstore.core.log.reader import LogReader
from tstore.core.runtime import world
from tstore.core.runtime.concurrency import batched
from tstore.core.storage.base import Storage
from tstore.core.transactions.decision import withdrawal_in
from tstore.core.transactions.membership import Membership, slug
from tstore.errors import Corrupt, Denied, InvalidArgument, NotFound, TStoreError, UnsupportedFormat, name_list

__all__ = [
    "Heartbeat",
    "HeartbeatWriter",
    "PendingTransaction",
    "base_of",
    "describe_pending",
    "find_pending",
    "hosts_under_way",
    "pending",
]

_FIRST_DELAY, _INTERVAL = 1.0, 10.0  # seconds
_MAX_RATE = 100.0  # heartbeats per second of all hosts of a transaction together
_KEY = re.compile(TRANSACTIONS + r"([^/]+)/(part|alive)-(\d{5})-of-\d{5,}")


class PendingTransaction(NamedTuple):
    """A cooperative transaction that is not committed: under way, or abandoned.

    `transaction` is its id, `name` what its writers called it, and `hosts` their number.
    `delivered` lists the hosts whose fragment exists, `absent` the other hosts. `heartbeats` maps a host to the
    seconds since it last renewed its heartbeat, if its clock agrees with that of this machine. `withdrawn_by` is
    the host of a `Checkpointer` that gave up, so that the transaction can never be committed.
    """

    transaction: str
    name: str
    hosts: int
    delivered: tuple[int, ...]
    absent: tuple[int, ...]
    heartbeats: dict[int, float]
    withdrawn_by: int | None = None

    def __repr__(self) -> str:
        state = f"{len(self.delivered)} of {self.hosts} hosts delivered"
        if self.withdrawn_by is not None:
            state = f"withdrawn by host {self.withdrawn_by}"
        return f"<tstore.PendingTransaction {self.transaction} name={self.name!r}: {state}>"


class Heartbeat(msgspec.Struct):
    """The contents of `txn/<id>/alive-…`: the transaction's name, and when the host last renewed the heartbeat."""

    name: str
    time: float


class HeartbeatWriter:
    """Renews the heartbeat of one host while it writes or waits."""

    def __init__(self, storage: Storage, member: Membership) -> None:
        self._storage = storage
        self._name = member.name
        self._key = member.heartbeat_key(member.host)
        self._spread = member.hosts / _MAX_RATE  # seconds in which each host may renew its heartbeat once
        self._runs = 0  # blocks of `run` under way
        self._due: float | None = None
        self._written = False
        self._task: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Renew the heartbeat while the block runs."""
        self._runs += 1
        if self._task is None:
            self._task = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            self._runs -= 1
            if self._runs == 0:
                task, self._task = self._task, None
                task.cancel()
                await asyncio.wait([task])

    async def delete(self) -> None:
        """Delete the heartbeat, if there is one."""
        if self._written:
            with contextlib.suppress(TStoreError):  # leaving a heartbeat costs nothing
                await self._storage.delete(self._key)

    async def _beat(self) -> None:
        clock = asyncio.get_running_loop().time
        if self._due is None:
            random_delay = world.uniform(0, self._spread) if self._spread > _FIRST_DELAY else 0.0
            self._due = clock() + _FIRST_DELAY + random_delay
        while True:
            await asyncio.sleep(max(0.0, self._due - clock()))
            self._due, self._written = clock() + max(_INTERVAL, self._spread), True
            with contextlib.suppress(TStoreError):
                await self._storage.replace(self._key, msgspec.json.encode(Heartbeat(self._name, world.now())))


async def pending(log: LogReader) -> list[PendingTransaction]:
    """Return the cooperative transactions with fragments or heartbeats but no commit; this reads every record."""
    under_way = await hosts_under_way(log)
    return [await describe_pending(log, transaction, hosts) for transaction, hosts in sorted(under_way.items())]


async def hosts_under_way(log: LogReader) -> dict[str, dict[str, set[int]]]:
    """Return the hosts of each transaction that is not committed: those with a "part", and those "alive"."""
    transactions: dict[str, dict[str, set[int]]] = {}
    for key in await log.storage.list(TRANSACTIONS):
        match = _KEY.fullmatch(key)
        if match:
            hosts = transactions.setdefault(match[1], {"part": set(), "alive": set()})
            hosts[match[2]].add(int(match[3]))
    if transactions:
        async for _, record in log.each_record(range(1, await log.newest() + 1)):
            transactions.pop(record.transaction, None)
    return transactions


async def find_pending(log: LogReader, name: str) -> Membership:
    """Return the membership of host 0 in the pending transaction with this name or id, or in a committed one.

    Raise `NotFound` if no pending transaction has the name, `InvalidArgument` if several attempts have it. An id
    is accepted even if no such transaction is pending.
    """
    member = Membership.from_id(checked_text("transaction", name))
    if member is not None:
        return member._replace(name=name)
    under_way = await pending(log)
    named = [p for p in under_way if p.name == name] or [p for p in under_way if slug(p.name) == slug(name)]
    if len(named) > 1:
        raise InvalidArgument(
            f"{log.storage.url}: several attempts of transaction {quote(name)} are under way; pass the id of one: "
            + ", ".join(p.transaction for p in named)
        )
    member = Membership.from_id(named[0].transaction) if named else await _committed(log, name)
    if member is None:
        known = name_list("pending transactions", [p.transaction for p in under_way])
        raise NotFound(f"{log.storage.url} has no transaction {quote(name)} under way; {known}")
    return member._replace(name=name)


async def base_of(log: LogReader, transaction: str) -> int:
    """Return the base of a fragment of a transaction, 0 without one: a version below that of its commit.

    Once the version of an earlier use of the id has expired, only a later use has fragments.
    """
    with contextlib.suppress(Corrupt, Denied, NotFound, UnsupportedFormat):
        if Membership.from_id(transaction) is not None:
            keys = await log.storage.list(f"{folder_of(transaction)}/part-")
            return (await log.objects.read(keys[0], Fragment)).base if keys else 0
    return 0


async def _committed(log: LogReader, name: str) -> Membership | None:
    """Return the membership of host 0 in the newest committed transaction with a name, None if there is none.

    Its id has only a slug of the name, so a name that differs from its slug is found as a tag of the commit.
    """
    newest = None
    async for _, record in log.each_record(range(1, await log.newest() + 1)):
        member = Membership.from_id(record.transaction)
        if member is not None and (name in record.tags or name == member.name):
            newest = member
    return newest


async def describe_pending(log: LogReader, transaction: str, hosts: dict[str, set[int]]) -> PendingTransaction:
    """Return one of the transactions of `hosts_under_way`."""
    delivered, alive = hosts["part"], hosts["alive"]
    member, now = Membership.from_id(transaction), world.now()
    name, count = transaction, 1 + max(delivered | alive)
    if member is not None:
        name, count = member.name, member.hosts
    withdrawn_by = None
    if member is not None:
        with contextlib.suppress(NotFound, Corrupt):
            withdrawal = withdrawal_in(await log.storage.get(member.claim_key(member.top, 0)))
            withdrawn_by = None if withdrawal is None else withdrawal.host
    beats: dict[int, Heartbeat] = {}  # without damaged ones, and those just deleted by a commit
    for batch in batched(sorted(alive)):
        keys = [f"{folder_of(transaction)}/alive-{host:05d}-of-{count:05d}" for host in batch]
        for host, data in zip(batch, await log.storage.short_objects(keys), strict=True):
            if data is not None:
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    beats[host] = msgspec.json.decode(data, type=Heartbeat)
    if beats:
        name = beats[max(beats)].name
    elif delivered and member is not None:  # the id has only a slug of the name, which often is a tag
        with contextlib.suppress(NotFound, Corrupt, UnsupportedFormat):  # `finish` reports these errors
            fragment = await log.objects.read(member.fragment_key(0, min(delivered)), Fragment)
            name = next((tag for tag in fragment.tags if slug(tag) == name), name)
    absent = tuple(host for host in range(count) if host not in delivered)
    ages = {host: max(0.0, now - beat.time) for host, beat in beats.items()}
    return PendingTransaction(transaction, name, count, tuple(sorted(delivered)), absent, ages, withdrawn_by)
