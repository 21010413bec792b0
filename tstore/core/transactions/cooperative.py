"""The cooperative commit: many hosts, one commit, without a coordinator or a barrier.

1. All hosts use one transaction name and one `attempt`, and know `hosts`. The id of the transaction is made from
   all three, so that two starts of a job never share a transaction.
2. Each host writes its packs and then one fragment `txn/<id>/part-<host>-of-<hosts>`, created if absent. A second,
   different fragment of the same host is refused, and so is the same name and attempt with another number of
   hosts.
3. Fragments are merged in a tree (`fragments`), so that no host reads thousands of them.
4. The first host that finds the top level of the tree complete claims it: it creates an object with its number,
   unless that exists (`decision`). This decides that the transaction may be committed. Then the host checks and
   merges the top level: same metadata and structure, no chunk twice, every chunk present. It reads every record
   above the lowest base of the fragments, and appends the transaction's record. So a late host finds an earlier
   commit of the transaction and makes no second one; and one that meets a repair fails, since the version that was
   voided may have been this transaction. Objects are created once, and the fragments determine their
   contents, so several hosts may try each step.
5. The other hosts poll for the record, rarely for the claim, and usually request nothing else; they poll less
   often if the system reports new files in the log (`watch`). Now and then, less often the more hosts there are,
   each does the work of hosts that died after they delivered: it merges complete blocks, and commits. Any process
   may do so later (`finish`). Each of them creates the claim, or reads it, before it appends the record.
6. Every wait has a deadline, whose error names the absent hosts. If a host dies before it delivers its fragment,
   the transaction is never committed. From the creation of its fragment on, a host can't tell what others do: its
   errors are `CommitOutcomeUnknown`, except for those that every host would get, and the deadline. It may deliver
   the same values again, even in other packs, and wait once more. An earlier error is `CommitOutcomeUnknown` too
   if the fragment exists, since an earlier run of the host with the same attempt may have delivered it. If a newer
   commit excludes the transaction (`exclusion`), each host that delivers or waits learns of it at once.
7. A host of a `Checkpointer` whose save fails, and which will save again as another transaction, withdraws this
   one (`withdraw`), so that a late host can't commit its fragment together with values of a later moment, and
   waiting hosts stop. It creates the claim to the top level with another content: "withdrawn by", its number, and
   the hosts that had not delivered. Exactly one creation of that object succeeds:
   - If it is the withdrawal, nobody appends the record, because everybody who would must create or read the claim
     first. Hosts that still wait, and late ones, fail as soon as they read it. The outcome is known to all.
   - If another host had claimed the level, all hosts had delivered while this one still waited, so all fragments
     are of one moment. The commit continues, and this host looks for its record once more; if there is none yet,
     the outcome is unknown.
   - If a power failure (of a server, since the hosts themselves do not survive theirs) loses the claim of a host
     that commits, another host may withdraw the transaction, and yet it is committed. That is an error in place of
     a success, but no mixture: all hosts had delivered before the claim. A withdrawal is made durable before its
     host continues. After a power failure of the hosts, the job starts with another attempt.
   - If the withdrawal fails, a late host may still commit; a note on the error of the save says so.
   - A garbage collection deletes the claim only of a transaction that is committed, or that its record condemns,
     so what was withdrawn is never committed.
8. An attempt should be new with each start of a job. If hosts use it again, they continue the transaction while it
   has objects. Once a collection has removed these, they are refused until another collection is the last one
   (`Exclusion.check_begun_again`). From then on the id is used again, and may be committed once more. The bases of
   the fragments tell the two uses apart: those of the second are above the version, or the collection, that ended
   the first.
   - A fragment of the first use, of a host that was late, is merged with those of the second only by a host that
     then reads the log from the lower base: it finds the commit or the collection, and each host learns that
     nothing of the second is committed.
   - An older collection that stood still may remove objects of the second use. But the key of the manifest has
     the base, so nothing that is committed needs them. Hosts may miss a fragment, and fail at the deadline, or a
     claim, as after a power failure (7).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable
from typing import TypeVar

from msgspec.structs import replace

from tstore.core.format.objects.encoding import encode
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.pages import stored
from tstore.core.format.objects.records import INLINE_MANIFEST_BYTES, Fragment, Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree.changes import Changes
from tstore.core.log.expiry import check_alive, last_collection
from tstore.core.log.group_commit import Newer
from tstore.core.log.log import Log
from tstore.core.runtime import world
from tstore.core.runtime.pool import run, run_to_end
from tstore.core.storage.objects import Durability
from tstore.core.storage.watch import Watch
from tstore.core.transactions.agreement import NumberOfHosts
from tstore.core.transactions.conflicts import Exclusion
from tstore.core.transactions.fragments import FragmentTree, check_complete, have_same_values, record_from_fragment
from tstore.core.transactions.membership import FAN_IN, Membership
from tstore.errors import (
    AlreadyExists,
    CommitOutcomeUnknown,
    Conflict,
    DeadlineExceeded,
    Inconsistent,
    NotFound,
    SnapshotExpired,
    TimelineChanged,
    TStoreError,
    Unavailable,
)

__all__ = ["CooperativeCommit"]

T = TypeVar("T")

_MIN_POLL, _MAX_POLL = 0.005, 0.2  # seconds between polls
_MIN_POLL_WATCHED = 0.05  # the minimum after the first poll, if the system reports new files
_MAX_POLL_RATE = 1000.0  # polls per second of all waiting hosts of a large job together
_GRACE = 0.25  # seconds before a waiting host first does the work of others
_DECISION_INTERVAL = 1.0  # seconds from one read of the decision by a waiting host to the next
_MAX_DECISION_RATE = 100.0  # reads of the decision per second by all waiting hosts of a large job together


class CooperativeCommit:
    """One host's part in the commit of a cooperative transaction."""

    def __init__(self, log: Log, member: Membership, durability: Durability) -> None:
        self.log = log
        self.member = member
        self.durability = durability
        self.fragments = FragmentTree(log.reader, member, durability)
        self.exclusion = Exclusion(log.reader, member)
        self.number_of_hosts = NumberOfHosts(log.storage, member, self.fragments.decision)
        self._storage = log.storage

    async def commit(self, fragment: Fragment, timeout: float) -> int:
        """Deliver this host's fragment, and return the version once the transaction is committed."""
        waiter = _Waiter(self, timeout)
        fragment = await self._create_fragment(fragment)
        version = await self._conclude(fragment, self._climb(fragment.base))
        return await self._conclude(fragment, waiter.wait(fragment)) if version is None else version

    async def deliver(self, fragment: Fragment) -> int | None:
        """Deliver this host's fragment; commit if it was the last one, and return the version.

        Return None if the other hosts have not all delivered, or one of them is about to commit. Raise `Conflict`
        or `DeadlineExceeded` if it is known already that the transaction can never be committed.
        """
        fragment = await self._create_fragment(fragment)
        version = await self._conclude(fragment, self._climb(fragment.base))
        return await self._conclude(fragment, self._find(fragment)) if version is None else version

    async def withdraw(self, base: int) -> int | None:
        """Decide that the transaction is never committed; return its version if it is already committed.

        Raise `CommitOutcomeUnknown` if another host is about to commit it. `base` is a version before its commit.
        """
        absent: list[int] = []
        with contextlib.suppress(TStoreError):  # they are only reported to the other hosts
            absent = await self.fragments.absent()
        withdrawn = await self.fragments.decision.withdraw(absent)
        # also if it is withdrawn: a garbage collection may have deleted the claim of a commit
        version = await self.log.reader.find(self.member.transaction, base)
        if version is not None:
            await self.log.make_durable(version, self.durability)
        elif not withdrawn:
            raise self._outcome_unknown("all hosts have delivered, and another one is about to commit")
        return version

    async def check_undelivered(self, failure: Exception) -> None:
        """Raise `CommitOutcomeUnknown` if this host's fragment may exist, although this run has not created it.

        An earlier run of this host with the same attempt may have.
        """
        try:
            size = await self._storage.size(self.member.fragment_key(0, self.member.host))
        except TStoreError as error:
            failure.add_note(f"whether this host has delivered its fragment is unknown: {error}")
        else:
            if size is None:
                return
        raise self._outcome_unknown(failure) from failure

    async def finish(self) -> int:
        """Return the version of the transaction; commit it now if all hosts have delivered but none has committed.

        Raise `DeadlineExceeded`, naming the absent hosts, if some have not delivered, or naming the host that has
        withdrawn the transaction; raise `NotFound` if none has delivered.
        """
        keys = await self._storage.list(f"{self.member.folder}/part-")
        if not keys:
            version = await self.log.reader.find(self.member.transaction)
            if version is not None:  # a garbage collection has deleted the fragments since
                return version
            raise NotFound(
                f"{self._storage.url}: no host has delivered a fragment of the cooperative transaction "
                f"{self.member.transaction!r}, or a garbage collection removed them; check the id"
            )
        fragment = await self.log.reader.objects.read(keys[0], Fragment)
        version = await self.log.reader.find(self.member.transaction, fragment.base)
        if version is not None:
            await self.log.make_durable(version, Durability.FSYNC if fragment.durable else Durability.NONE)
            return version
        await self.fragments.decision.check()
        absent = await self.fragments.merge_available()
        if absent:
            raise DeadlineExceeded(
                f"{self._storage.url}: transaction {self.member.name!r} cannot be committed: hosts {absent} of "
                f"{self.member.hosts} have not delivered; start the job again with another attempt",
                absent,
            )
        return await run_to_end(self.take_over(fragment.base))

    async def take_over(self, base: int) -> int:
        """Commit in place of the host that should, and return the version; `base` as in `append`.

        Raise `DeadlineExceeded` if a host has withdrawn the transaction.
        """
        await self.fragments.decision.commit()
        return await self.append(base)

    async def append(self, base: int) -> int:
        """Merge the top level, append the record, and return its version; it must be decided to commit.

        `base` is that of this host's fragment. Raise `Conflict` if the version is not above it.
        """
        await self.number_of_hosts.check_before_commit()
        merged = await self.fragments.merge_block(self.member.top, 0)
        [manifest] = await self.log.reader.objects.manifest(merged.manifest)
        await run(check_complete, self.member.name, manifest)
        durability = Durability.FSYNC if merged.durable else Durability.NONE
        if manifest.size > INLINE_MANIFEST_BYTES:
            merged = replace(merged, manifest=await self._write_manifest(manifest, merged.base, durability))
        record = replace(
            record_from_fragment(merged, world.now()),
            base=min(merged.base, base),
            reused=manifest.reused(self.member.transaction),
        )
        changes = await run(Changes.from_record, record, [manifest])

        async def validate(newer: Newer) -> Record:
            await self.exclusion.check(changes, newer)
            return record

        version = await self.log.append(record, validate, durability)
        if version <= base:
            raise Conflict(
                f"{self._storage.url}: transaction {self.member.name!r} was committed as version {version} before "
                "this host began it again with the same attempt, so nothing of this run is committed; repeat it "
                "with another attempt",
                [],
            )
        return version

    async def _find(self, fragment: Fragment) -> int | None:
        """Return the version of the transaction, or None; raise if it can never be committed."""
        base = fragment.base
        try:
            newer = await self.log.reader.above(base)
        except TimelineChanged:  # a repair voided a version that this process has read
            newer = await self.log.reader.anew().above(base)
        for version, other in enumerate(newer, base + 1):
            if other.commits(self.member.transaction):
                await self.log.make_durable(version, self.durability)
                return version
        # after all were searched: a repair may have voided an earlier one since the transaction was committed
        for version, other in enumerate(newer, base + 1):
            await self.exclusion.check_record(fragment, version, other)
        await self.fragments.decision.check()
        return None

    async def _climb(self, base: int) -> int | None:
        """Merge the blocks that are complete; commit and return the version if all are, else None."""
        return await run_to_end(self.append(base)) if await self.fragments.climb() else None

    async def _conclude(self, fragment: Fragment, work: Awaitable[T]) -> T | int:
        """Return the result of work after this host's delivery, or the version that the transaction has become.

        Raise `CommitOutcomeUnknown` for an error after which other hosts may still commit.
        """
        try:
            return await work
        except (Conflict, Inconsistent, CommitOutcomeUnknown):
            raise  # the first two follow from what is stored, so every other host gets them too
        except Exception as error:
            try:
                version = await self._find(fragment)
            except (Conflict, DeadlineExceeded):
                raise
            except TStoreError as failure:
                error.add_note(f"whether the transaction can still be committed is unknown: {failure}")
            else:
                if version is not None:
                    return version
            if isinstance(error, DeadlineExceeded):
                raise
            raise self._outcome_unknown(error) from error

    def _outcome_unknown(self, cause: Exception | str) -> CommitOutcomeUnknown:
        transaction = self.member.transaction
        return CommitOutcomeUnknown(
            f"{self._storage.url}: host {self.member.host} of transaction {self.member.name!r} may have delivered "
            f"its fragment before it failed ({cause}), so the other hosts may or may not commit it; call "
            f"store.outcome({transaction!r}) later",
            transaction,
        )

    async def _create_fragment(self, fragment: Fragment) -> Fragment:
        """Create this host's fragment and return it, or one with the same values that it delivered before."""
        key = self.member.fragment_key(0, self.member.host)
        try:
            await self.exclusion.check_begun_again(fragment.base)
            await self.number_of_hosts.check_before_delivery()
        except (Conflict, Inconsistent):
            raise
        except TStoreError as error:
            await self.check_undelivered(error)
            raise
        try:
            await self._storage.create(key, encode(fragment), self.durability)
        except AlreadyExists:
            return await self._delivered(key, fragment)
        except Exception as error:
            if not isinstance(error, TStoreError) or isinstance(error, Unavailable):  # it may appear later
                raise self._outcome_unknown(error) from error
            await self.check_undelivered(error)
            raise
        return fragment

    async def _delivered(self, key: str, fragment: Fragment) -> Fragment:
        """Return the fragment that exists; raise `Inconsistent` if its values are other than those of this one."""
        objects = self.log.reader.objects
        try:
            delivered = await objects.read(key, Fragment)
            manifests = [await objects.manifest(f.manifest) for f in (delivered, fragment)]
            same = await run(have_same_values, (delivered, fragment), manifests)
        except TStoreError as error:
            raise self._outcome_unknown(error) from error
        if not same:
            raise Inconsistent(
                f"{self._storage.url}: host {self.member.host} has already delivered a different fragment of "
                f"transaction {self.member.name!r}; was it started twice? A restarted job needs another attempt",
                [],
            )
        return delivered

    async def _write_manifest(self, manifest: Manifest, base: int, durability: Durability) -> ObjectRef:
        reference, data = stored(f"{self.member.folder}/manifest-{base}", manifest)
        refusal = (
            f"the manifest of transaction {self.member.name!r} does not follow from its fragments, so the "
            "transaction cannot be committed; repeat it with another attempt"
        )
        await self._create_once(reference.key, data, durability, refusal)
        return reference

    async def _create_once(self, key: str, data: bytes, durability: Durability, refusal: str) -> None:
        """Create an object, unless it exists with the same bytes; raise `Inconsistent` if it has other bytes."""
        try:
            await self._storage.create(key, data, durability)
        except AlreadyExists:
            if await self._storage.get(key) != data:
                raise Inconsistent(f"{self._storage.url}: {refusal}", []) from None


class _Waiter:
    """One host's wait for the record, during which it does the work of hosts that died."""

    def __init__(self, commit: CooperativeCommit, timeout: float) -> None:
        hosts = commit.member.hosts
        self._commit = commit
        self._timeout = timeout
        self._clock = asyncio.get_running_loop().time
        self._deadline = self._clock() + timeout
        self._min_poll = max(_MIN_POLL, hosts / _MAX_POLL_RATE)
        # seconds between two times at which this host helps; more for a job of many hosts, so that few of them
        # help at once: each may read 100 objects
        self._help_interval = _GRACE * max(1, hosts / FAN_IN) ** 2
        self._next_help = math.inf  # when to merge a block that other hosts should have merged
        self._takeover = math.inf  # when to commit in place of the host that should; set once all have delivered
        self._decision_interval = max(_DECISION_INTERVAL, hosts / _MAX_DECISION_RATE)
        self._next_decision = self._clock() + self._decision_interval  # when to read the decision

    async def wait(self, fragment: Fragment) -> int:
        """Return the version of the commit of the fragment that this host has delivered.

        Raise `DeadlineExceeded`, which names the absent hosts, or the host that has withdrawn the transaction.
        """
        started = self._clock()
        self._next_help = started + _GRACE + self._help_interval * world.uniform(0, 2)
        seen = fragment.base  # no version up to this one is the commit
        async with Watch(self._commit.log.storage, "commits") as watch:
            while True:
                await self._pause(watch, self._clock() - started)
                version, newest = await self._commit.log.reader.scan(self._commit.member.transaction, seen)
                if version is not None:
                    await self._commit.log.make_durable(version, self._commit.durability)
                    return version
                for newer in range(seen + 1, newest + 1):
                    record = await self._commit.log.reader.record(newer)
                    await self._commit.exclusion.check_record(fragment, newer, record)
                seen = newest
                now = self._clock()
                if now >= self._takeover:
                    return await run_to_end(self._commit.take_over(fragment.base))
                if self._takeover == math.inf:
                    await self._help(fragment.base, now)

    async def _pause(self, watch: Watch, waited: float) -> None:
        pause = max(self._min_poll, min(_MAX_POLL, waited / 20))
        remaining = max(0.001, self._deadline - self._clock())
        await watch.wait(min(pause * world.uniform(0.5, 1), remaining))
        if watch.notified:
            self._min_poll = max(self._min_poll, _MIN_POLL_WATCHED)

    async def _help(self, base: int, now: float) -> None:
        """Do the work of hosts that seem dead, if it is time, and plan the takeover if all have delivered."""
        if now >= min(self._next_decision, self._deadline):
            try:
                await self._commit.fragments.decision.check()
            except DeadlineExceeded:
                await self._commit.number_of_hosts.check_while_waiting()  # that may be why it is withdrawn
                raise
            self._next_decision = now + self._decision_interval * world.uniform(1, 2)
        if now >= self._deadline:
            await self._check_delivered(base)
            self._takeover = now
        elif now >= self._next_help:
            await self._commit.number_of_hosts.check_while_waiting()
            if await self._commit.fragments.help():
                self._takeover = min(now + _GRACE * world.uniform(1, 2), self._deadline)
            self._help_interval *= 2
            self._next_help = now + self._help_interval * world.uniform(1, 2)

    async def _check_delivered(self, base: int) -> None:
        await self._commit.number_of_hosts.check_while_waiting()
        absent = await self._commit.fragments.merge_available()
        if absent:
            await self._check_not_removed(base)
            member = self._commit.member
            raise DeadlineExceeded(
                f"{self._commit.log.storage.url}: transaction {member.name!r} is not committed: hosts "
                f"{absent} of {member.hosts} did not deliver within {self._timeout:g} s; start the job again with "
                "another attempt, or allow more time",
                absent,
            )

    async def _check_not_removed(self, base: int) -> None:
        """Raise `Conflict` if the transaction was committed before this host began, and removed since.

        Then this host withdraws it first, since the others may begin it again too.
        """
        log, member = self._commit.log.reader, self._commit.member
        if not await last_collection(log, await log.newest()):
            return
        if (version := await log.find(member.transaction)) is not None:
            try:
                await check_alive(log, version)
            except SnapshotExpired as error:
                if await self._commit.withdraw(base) is not None:
                    return
                raise Conflict(
                    f"{error}. It was committed by transaction {member.name!r} in this attempt; repeat the "
                    "transaction with another attempt",
                    [],
                ) from error
