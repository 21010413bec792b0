"""Cooperative transactions: many hosts, one commit; no coordinator, no barrier.

1. All hosts use one transaction name, one `attempt`, and know `hosts`. The id of the transaction is made of all
   three, so that two incarnations of a job never meet in one transaction.
2. Each writes its packs and then one fragment `txn/<id>/part-<host>-of-<hosts>`, created if absent; a second,
   different one of the same host is refused, and so is another number of hosts under the same name and attempt.
3. Merging is a tree (`fragments`): a host whose fragment is durable looks whether the hosts that share its
   hundred are all there. The first to say so (`merging-…`, created if absent) merges them to
   `merge-1-<hundred>-of-<hosts>`, looks whether the hundreds are all there, and so on; the others leave it to the
   first. Up to a hundred hosts need no step between.
4. The first who sees all that is below the top merges it: same metadata and structure, no chunk twice, every chunk
   present. Then it appends the record, reading every record from the lowest base among the fragments on, so that
   a late finisher meets an earlier commit of the same transaction and never makes a second. Creation is
   exclusive and what is created is determined by the fragments, so at each step several may try.
5. The others wait for the record, and ask for nothing else as a rule; where the system tells what appears in the
   log (`watch`) they seldom need ask even for that. Now and then, the more hosts the more seldom, each makes up
   for hosts that died after their fragment: it merges what is full and nobody merged, and commits. So may any
   process, by `finish_group`, also long after.
6. Every wait has a deadline, whose error names the absent hosts. A group that lost a host never commits.
"""

from __future__ import annotations

import asyncio
import math
import numbers
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import xxhash

from tstore.errors import (
    AlreadyExists,
    Conflict,
    DeadlineExceeded,
    Inconsistent,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from tstore.format.arguments import checked_index, checked_name
from tstore.format.encoding import encode
from tstore.format.records import INLINE_MANIFEST, Fragment, Record
from tstore.format.references import reference
from tstore.format.tree import Changes
from tstore.log.group_commit import Newer
from tstore.log.log import Log
from tstore.runtime import world
from tstore.runtime.pool import uncancelled
from tstore.storage.base import Durability
from tstore.storage.watch import Watch
from tstore.transactions.fragments import FAN, check_complete, merged, record_of

__all__ = ["Membership", "checked_timeout", "commit_group", "detected_attempt", "finish_group", "slug"]

DEFAULT_TIMEOUT = 300.0
_MOST_HOSTS = 100_000
_POLL_FIRST, _POLL_MOST = 0.005, 0.2
_POLL_TOLD = 0.05  # the shortest from the second on, where the system tells what appears
_POLLS = 1000.0  # a second, of all waiting hosts together, where they are many
_GRACE = 0.25
_ID = re.compile(r"(.*)\.[^.]*\.[0-9a-f]{32}-of-(\d{5,})")


class Membership(NamedTuple):
    """The place of one host in a group, and the keys of the group's fragments."""

    transaction: str
    name: str
    host: int
    hosts: int

    @staticmethod
    def of(name: str, host: int, hosts: int, attempt: str | None) -> Membership:
        """The membership; `InvalidArgument` where the host is out of range or the attempt is not known."""
        name = checked_name("name", name)
        attempt = None if attempt is None else checked_name("attempt", attempt)
        host, hosts = checked_index("host", host), checked_index("hosts", hosts)
        if hosts < 1 or not 0 <= host < hosts:
            raise InvalidArgument(
                f"host {host} of {hosts} does not exist: hosts are numbered from 0 to hosts - 1 = {hosts - 1}"
            )
        if hosts > _MOST_HOSTS:
            raise InvalidArgument(f"{hosts} hosts are more than a group may have: expected up to {_MOST_HOSTS}")
        if not name:
            raise InvalidArgument("a cooperative transaction needs a name that all its hosts share")
        token = attempt if attempt is not None else detected_attempt(os.environ)
        if not token:
            raise InvalidArgument(
                f"transaction {name!r} of {hosts} hosts needs attempt=…: a token that is the same on every host "
                "and was never used by an earlier start of the job (job id and restart count); without it two "
                "incarnations of the job could mix in one checkpoint"
            )
        unique = xxhash.xxh3_128_hexdigest(f"{len(name)}:{name}{token}".encode())
        family = f"{slug(name)}.{slug(token)}.{unique}"
        return Membership(f"{family}-of-{hosts:05d}", name, host, hosts)

    @staticmethod
    def named(transaction: str) -> Membership | None:
        """The membership of host 0 in the group of that id, by what the id tells; None where it is no group's."""
        found = _ID.fullmatch(transaction)
        hosts = int(found[2]) if found and len(found[2]) <= len(str(_MOST_HOSTS)) else 0
        return Membership(transaction, found[1], 0, hosts) if found and 0 < hosts <= _MOST_HOSTS else None

    @property
    def family(self) -> str:
        """What the ids of all transactions of this name and attempt begin with, whatever their size."""
        return self.transaction.rpartition("-of-")[0]

    @property
    def top(self) -> int:
        """The lowest level at which no more than `FAN` are left; at level 0 are the hosts."""
        return 0 if self.hosts <= FAN else 1 if self.hosts <= FAN**2 else 2

    def count(self, level: int) -> int:
        """How many fragments or merged fragments a level has."""
        size = FAN**level if level else 1
        return -(-self.hosts // size)

    def siblings(self, level: int, group: int) -> range:
        """The numbers at a level that are merged to number `group` of the next."""
        return range(group * FAN, min((group + 1) * FAN, self.count(level)))

    def prefix(self, level: int, group: int) -> str:
        """What the keys of the siblings begin with, and no other's."""
        kind = f"merge-{level}" if level else "part"
        return f"txn/{self.transaction}/{kind}-{group:03d}"

    def key(self, level: int, number: int) -> str:
        """The key of a host's fragment (level 0), or of a merged one."""
        return f"{self.prefix(level, number // FAN)}{number % FAN:02d}-of-{self.hosts:05d}"


def detected_attempt(environment: Mapping[str, str]) -> str | None:
    """What names this incarnation of the job: from SLURM's and torchelastic's variables, else None.

    torchelastic restarts its workers within one SLURM job, so where both are set, both are in the name.
    """
    found = []
    if "SLURM_JOB_ID" in environment:
        parts = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        found.append("slurm-" + ".".join(environment.get(p, "0") for p in parts))
    run, count = environment.get("TORCHELASTIC_RUN_ID", "none"), environment.get("TORCHELASTIC_RESTART_COUNT")
    if count is not None and (found or run != "none"):
        found.append(f"elastic-{run}.{count}")
    return "-".join(found) or None


def slug(text: str) -> str:
    """The text as ids hold it."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text)[:40]


async def commit_group(
    log: Log, member: Membership, fragment: Fragment, durability: Durability, timeout: float | None
) -> int:
    """The version that the group's transaction became, by the steps at the top of this file."""
    limit = checked_timeout(timeout)
    clock = asyncio.get_running_loop().time
    deadline = clock() + limit
    await _deliver(log, member, fragment, durability)
    if await _climb(log, member, durability):
        return await uncancelled(_finish(log, member))
    waited, floor = clock(), max(_POLL_FIRST, member.hosts / _POLLS)
    grace = _GRACE * max(1, member.hosts / FAN) ** 2  # of a large group few look at once: each may read a hundred
    look = waited + _GRACE + grace * world.uniform(0, 2)
    seen, takeover = fragment.base, math.inf
    async with Watch(log.backend, "commits") as watch:
        while True:
            pause = max(floor, min(_POLL_MOST, (clock() - waited) / 20))
            await watch.wait(min(pause * world.uniform(0.5, 1), max(0.001, deadline - clock())))
            floor = max(floor, _POLL_TOLD if watch.told else 0.0)
            version, seen = await log.scan(fragment.transaction, seen)
            if version is not None:
                await log.confirm(version, durability)
                return version
            now = clock()
            if takeover < math.inf:
                if now >= min(takeover, deadline):
                    return await uncancelled(_finish(log, member))
            elif now >= deadline:
                absent = await _absent(log, member, durability)
                if absent:
                    raise DeadlineExceeded(
                        f"{log.backend.url}: transaction {member.name!r} waited {limit:g} s for hosts {absent} "
                        f"of {member.hosts}; it is not committed, and will be only if they still deliver. Start "
                        "the job again with another attempt, or give them more time",
                        absent,
                    )
                takeover = now
            elif now >= look:
                if await _help(log, member, durability):
                    takeover = now + _GRACE * world.uniform(1, 2)
                grace *= 2
                look = now + grace * world.uniform(1, 2)


async def finish_group(log: Log, member: Membership) -> int:
    """The version of a group's transaction, committed now if all hosts have delivered and none has done it.

    Raises `DeadlineExceeded`, which names the absent hosts, at once where some have not delivered.
    """
    fragments = await log.backend.list(f"txn/{member.transaction}/part-")
    if not fragments:
        raise NotFound(
            f"{log.backend.url}: no host has delivered to a cooperative transaction {member.transaction!r}"
        )
    fragment = await log.read(fragments[0], Fragment)
    version = await log.find(member.transaction, fragment.base)
    if version is not None:
        await log.confirm(version, Durability.FSYNC if fragment.durable else Durability.NONE)
        return version
    absent = await _absent(log, member, Durability.FSYNC)
    if absent:
        raise DeadlineExceeded(
            f"{log.backend.url}: transaction {member.name!r} can't be finished: hosts {absent} of {member.hosts} "
            "have not delivered; nothing was committed. Start the job again with another attempt",
            absent,
        )
    return await uncancelled(_finish(log, member))


def checked_timeout(timeout: float | None) -> float:
    """The timeout in seconds, or the default; `InvalidArgument` where it leaves no time."""
    limit = DEFAULT_TIMEOUT if timeout is None else timeout
    if not isinstance(limit, numbers.Real):
        raise InvalidArgument(f"timeout={timeout!r}: expected a number of seconds, or None")
    if not limit > 0:
        raise InvalidArgument(f"a timeout of {timeout} seconds leaves no time: expected more than 0")
    return limit


async def _deliver(log: Log, member: Membership, fragment: Fragment, durability: Durability) -> None:
    key = member.key(0, member.host)
    data = encode(fragment)
    if member.hosts <= FAN or member.host % FAN == 0:  # of a large group not every host looks at all of it
        await _check_size(log, member, "")
    try:
        await log.backend.create(key, data, durability)
    except AlreadyExists:
        if await log.backend.get(key) == data:
            await log.backend.settle(f"txn/{member.transaction}", durability)  # its creator may not have got to it
            return
        raise Inconsistent(
            f"{log.backend.url}: host {member.host} has already delivered a different fragment of transaction "
            f"{member.name!r}; was it started twice? A restarted job needs another attempt",
            [key],
        ) from None


async def _check_size(log: Log, member: Membership, part: str) -> None:
    """Raises `Inconsistent` where fragments say another number of hosts; `part` is how their keys begin."""
    begin = f"txn/{member.family}-of-"
    for size in await log.backend.folders(begin):
        strange = [] if int(size) == member.hosts else await log.backend.list(f"{begin}{size}/part-{part}")
        if strange:
            raise Inconsistent(
                f"{log.backend.url}: transaction {member.name!r} was begun with another number of hosts than "
                f"{member.hosts}; a group of another size needs another attempt",
                strange,
            )


async def _there(log: Log, member: Membership, level: int, group: int) -> set[int]:
    """Which fragments of a group (level 0), or merged ones, are there."""
    found = set(await log.backend.list(member.prefix(level, group)))
    return {i for i in member.siblings(level, group) if member.key(level, i) in found}


async def _climb(log: Log, member: Membership, durability: Durability) -> bool:
    """Whether this host is to finish: all below the top is there, and it was the first to say that it merges it.

    Every full group from this host upwards is merged, by the first who says so.
    """
    group = member.host // FAN
    for level in range(member.top + 1):
        if len(await _there(log, member, level, group)) < len(member.siblings(level, group)):
            return False
        if not await _first_to_merge(log, member, level, group):
            return False
        if level < member.top:
            await _merge(log, member, level, group, durability)
            group //= FAN
    return True


async def _first_to_merge(log: Log, member: Membership, level: int, group: int) -> bool:
    key = f"txn/{member.transaction}/merging-{level}-{group:05d}-of-{member.hosts:05d}"
    try:
        await log.backend.create(key, str(member.host).encode(), Durability.NONE)
    except (AlreadyExists, Unavailable):
        return False  # another one does; should it die, whoever waits makes up for it
    return True


async def _help(log: Log, member: Membership, durability: Durability) -> bool:
    """Whether all below the top is there; else a group that is full but not merged is, if one is found.

    It looks where this host is, or where it is merged already anywhere else, so that many find all.
    """
    group, level = 0, member.top
    while True:
        there = await _there(log, member, level, group)
        missing = [i for i in member.siblings(level, group) if i not in there]
        if not missing:
            break
        if level == 0:
            return False
        own = member.host // FAN**level
        group = own if own in missing else missing[int(world.uniform(0, len(missing)))]
        level -= 1
    if level < member.top:
        await _merge(log, member, level, group, durability)
    return level == member.top


async def _absent(log: Log, member: Membership, durability: Durability) -> list[int]:
    """The hosts that have not delivered; every group that has, and was not merged, is merged now."""
    found = set(await log.backend.list(f"txn/{member.transaction}/part-"))

    async def below(level: int, group: int) -> list[int]:
        if level == 0:
            return [i for i in member.siblings(0, group) if member.key(0, i) not in found]
        there = await _there(log, member, level, group)
        absent = []
        for number in member.siblings(level, group):
            if number not in there:
                lost = await below(level - 1, number)
                absent += lost
                if not lost:
                    await _merge(log, member, level - 1, number, durability)
        return absent

    return await below(member.top, 0)


async def _merge(log: Log, member: Membership, level: int, group: int, durability: Durability) -> None:
    try:
        data = encode(await _merged(log, member, level, group))
        await log.backend.create(member.key(level + 1, group), data, durability)
    except AlreadyExists:
        return  # another host merged the same


async def _merged(log: Log, member: Membership, level: int, group: int) -> Fragment:
    keys = [member.key(level, i) for i in member.siblings(level, group)]
    fragments = list(await asyncio.gather(*[log.read(k, Fragment) for k in keys]))
    manifests = list(await asyncio.gather(*[log.manifest(f.manifest) for f in fragments]))
    return merged(member.name, fragments, manifests)


async def _finish(log: Log, member: Membership) -> int:
    await _check_size(log, member, f"{0:05d}")  # of two groups that differ in size at most one passes
    whole = await _merged(log, member, member.top, 0)
    manifest = await log.manifest(whole.manifest)
    check_complete(member.name, manifest)
    durability = Durability.FSYNC if whole.durable else Durability.NONE
    data = encode(manifest)
    if len(data) > INLINE_MANIFEST:
        key = f"txn/{member.transaction}/manifest"
        try:
            await log.backend.create(key, data, durability)
        except AlreadyExists:
            if await log.backend.get(key) != data:  # another finisher makes the same
                raise Inconsistent(
                    f"{log.backend.url}: somebody else wrote another manifest of transaction {member.name!r} than "
                    "its fragments make; nothing was committed: repeat it with another attempt",
                    [key],
                ) from None
            await log.backend.settle(f"txn/{member.transaction}", durability)
        whole = msgspec.structs.replace(whole, manifest=reference(key, data))
    record = record_of(whole, world.now())
    record = msgspec.structs.replace(record, reused=manifest.reused(member.transaction))
    changes = Changes.of(record, [manifest])

    async def validate(newer: Newer) -> Record:
        for version, other in newer:
            overlap = changes.overlap(Changes.of(other, await log.manifests(version, other)))
            met = [*overlap.fatal, *overlap.chunks]
            if met:
                raise Conflict(
                    f"{log.backend.url}: version {version} changed the same as transaction {member.name!r}; "
                    "nothing of it was committed",
                    met,
                )
        return record

    return await log.append(record, validate, durability)
