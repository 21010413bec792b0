"""Which cooperative transactions are under way, who has delivered, and who is missing.

A host that writes long or waits renews a heartbeat, the small object `txn/<id>/alive-<host>-of-<hosts>`: first
after a second, so that a quick save costs none, then every ten; it goes with the end of its commit. Hosts of a
large group take longer, so that all together renew about a hundred a second. A heartbeat tells people who is
alive. No step of a commit looks at it, and its loss costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec

from tstore.errors import Corrupt, InvalidArgument, NotFound, TStoreError, UnsupportedFormat, inventory
from tstore.format.arguments import checked_text, shown
from tstore.format.records import Fragment
from tstore.log.log import Log
from tstore.runtime import world
from tstore.storage.base import Backend
from tstore.transactions.group import Membership, slug

__all__ = ["Heartbeat", "HeartbeatWriter", "PendingTransaction", "find_pending", "pending"]

_FIRST, _EVERY = 1.0, 10.0
_BEATS = 100.0  # a second, of all hosts of a group together
_READ_AT_ONCE = 256
_KEY = re.compile(r"txn/([^/]+)/(part|alive)-(\d{5})-of-\d{5,}")


class PendingTransaction(NamedTuple):
    """A cooperative transaction that is not committed: under way, or given up.

    `delivered` and `absent` are the numbers of the hosts whose fragment is there, or is not. `heartbeats` tells
    for each host that has one how many seconds ago it was renewed, by that host's clock and this one's.
    """

    transaction: str
    name: str
    hosts: int
    delivered: tuple[int, ...]
    absent: tuple[int, ...]
    heartbeats: dict[int, float]

    def __repr__(self) -> str:
        delivered = f"{len(self.delivered)} of {self.hosts} hosts delivered"
        return f"<tstore.PendingTransaction {self.transaction} name={self.name!r}: {delivered}>"


class Heartbeat(msgspec.Struct):
    """What an object `txn/<id>/alive-…` holds: the transaction's name, and when its host last said so."""

    name: str
    time: float


class HeartbeatWriter:
    """Renews the heartbeat of one host while it is at work."""

    def __init__(self, backend: Backend, member: Membership) -> None:
        self._backend = backend
        self._name = member.name
        self._key = f"txn/{member.transaction}/alive-{member.host:05d}-of-{member.hosts:05d}"
        self._share = member.hosts / _BEATS
        self._working = 0
        self._due: float | None = None
        self._shown = False
        self._task: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Renews the heartbeat as long as the block takes."""
        self._working += 1
        if self._task is None:
            self._task = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            self._working -= 1
            if self._working == 0:
                task, self._task = self._task, None
                task.cancel()
                await asyncio.wait([task])

    async def stop(self) -> None:
        """Removes the heartbeat, if there is one."""
        if self._shown:
            with contextlib.suppress(TStoreError):  # it only tells people who is alive
                await self._backend.delete(self._key)

    async def _beat(self) -> None:
        clock = asyncio.get_running_loop().time
        if self._due is None:
            self._due = clock() + _FIRST + (world.uniform(0, self._share) if self._share > _FIRST else 0.0)
        while True:
            await asyncio.sleep(max(0.0, self._due - clock()))
            self._due, self._shown = clock() + max(_EVERY, self._share), True
            with contextlib.suppress(TStoreError):
                await self._backend.hint(self._key, msgspec.json.encode(Heartbeat(self._name, world.now())))


async def pending(log: Log) -> list[PendingTransaction]:
    """The cooperative transactions of which something is there but no commit; reads every record."""
    found: dict[str, tuple[set[int], set[int]]] = {}
    for key in await log.backend.list("txn/"):
        match = _KEY.fullmatch(key)
        if match:
            delivered, alive = found.setdefault(match[1], (set(), set()))
            (delivered if match[2] == "part" else alive).add(int(match[3]))
    newest = await log.newest()
    for start in range(1, newest + 1, _READ_AT_ONCE):
        versions = range(start, min(start + _READ_AT_ONCE, newest + 1))
        for record in await asyncio.gather(*[log.record(v) for v in versions]):
            found.pop(record.transaction, None)
    return [await _state(log, transaction, *hosts) for transaction, hosts in sorted(found.items())]


async def find_pending(log: Log, name: str) -> Membership:
    """The group that an id or a name means, one of them that is not committed; `NotFound`, `InvalidArgument`."""
    member = Membership.named(checked_text("transaction", name))
    if member is not None:
        return member
    all_of_them = await pending(log)
    named = [p for p in all_of_them if p.name == name] or [p for p in all_of_them if slug(p.name) == slug(name)]
    if len(named) > 1:
        raise InvalidArgument(
            f"{log.backend.url}: several attempts of transaction {shown(name)} are under way; pass the id of one: "
            + ", ".join(p.transaction for p in named)
        )
    member = Membership.named(named[0].transaction) if named else None
    if member is None:
        known = inventory("pending transactions", [p.transaction for p in all_of_them])
        raise NotFound(f"{log.backend.url}: no transaction {shown(name)} is under way; {known}")
    return member


async def _state(log: Log, transaction: str, delivered: set[int], alive: set[int]) -> PendingTransaction:
    member = Membership.named(transaction)
    name, hosts = (member.name, member.hosts) if member else (transaction, 1 + max(delivered | alive))
    heartbeats, now = {}, world.now()
    for host in sorted(alive):
        key = f"txn/{transaction}/alive-{host:05d}-of-{hosts:05d}"
        try:
            beat = msgspec.json.decode(await log.backend.get(key), type=Heartbeat)
        except (NotFound, Corrupt, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue  # its commit has just ended
        name, heartbeats[host] = beat.name, max(0.0, now - beat.time)
    if delivered and not heartbeats and member is not None:
        with contextlib.suppress(NotFound, Corrupt, UnsupportedFormat):  # who finishes it is told
            tags = (await log.read(member.key(0, min(delivered)), Fragment)).tags
            name = next((tag for tag in tags if slug(tag) == name), name)  # a checkpoint's name, which its id cuts
    absent = tuple(h for h in range(hosts) if h not in delivered)
    return PendingTransaction(transaction, name, hosts, tuple(sorted(delivered)), absent, heartbeats)
