"""The protocol of tiers, and the decision from which step a job goes on.

1. A *tier* is a store: the local store of each host, and one durable store for all. Each host commits its part of
   a step to its local store, alone: the arrays of the checkpoint with the chunks that this host writes. The
   commit says of which save it is a part (`objects.Part`), so that parts of different saves are never combined.
   Nobody waits for another host.
2. A host copies what some others have saved (`peers`): it reads their stores through their servers, which serve
   nothing but reads, verifies every chunk, and keeps the copy beside its own store. The server of a host refuses
   all who lack its token, which the durable store has: who may read the parts may read the checkpoint there.
3. Steps that are due for the durable store are pushed there one after the other (`pushes`), by an ordinary
   cooperative commit of all hosts. Host 0 names the step of each push, the newest that is due: an object that is
   created once, which the others wait for. What came between is skipped.
4. A job begins with a round. Every host reads and verifies all that it holds, and creates its offer in the
   durable store: the parts that are whole, and how they are read. Once all hosts have offered, any of them
   decides, by a pure function of the offers, of the steps of the durable store and of the decision before
   (`decide`), and creates the decision under the next number. If that number is taken by another round, it
   decides again on top of it. All hosts read the decision of their round, and nothing else. A later
   `restore_latest` is another round.
5. A save *counts* unless a decision has given it up: its epoch is the number of the decision after which it was
   made, and after decision n with step s, of the saves of earlier epochs only those of steps up to s count. So
   what a host holds that slept through a restart is never taken for newer, whatever its step or its clock says.
6. A save is *covered* if all of its parts were offered, by any holders. The decision is the highest step that
   counts and is covered, or is in the durable store; of equal ones that of the latest epoch. If nothing is, the
   job begins anew, and nothing saved before counts any more.
7. A host restores from a store that consists of the parts of the decided save (`holders`). It exists in its
   memory, and its packs are those of the holders: a host's own storage first, then other holders. What a server
   sends is verified as it is read, and another holder is asked if it is wrong or does not come. Fragments are
   merged with the checks of a cooperative commit, so the store is whole or there is none. If the durable store
   has the same save, the host reads it there if a part has no holder by then. If the last holder of a part fails
   while the packs are read, the restore fails, and the next start of the job decides without that holder.
8. Host 0 drops the steps of the durable store that a decision has given up, which fences the pushes of a job that
   still runs: the commit of a step conflicts with a newer commit that dropped steps. It deletes the objects of
   earlier rounds.
9. Every wait has a deadline, whose error names the absent hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence

import msgspec

from tstore.core.runtime import world
from tstore.core.runtime.concurrency import together
from tstore.core.storage.base import Storage
from tstore.errors import AlreadyExists, DeadlineExceeded, Denied, Inconsistent, NotFound
from tstore.tiers.objects import (
    DECISIONS,
    Decision,
    Holder,
    Limit,
    Offer,
    Saved,
    create,
    decision_key,
    offer_key,
    read,
)

__all__ = ["Round", "decide"]

_log = logging.getLogger("tstore.tiers")

_MIN_POLL, _MAX_POLL = 0.01, 1.0  # seconds
_TAKEOVER = 5.0  # seconds after which hosts other than the first decide too, if all have offered


def decide(
    number: int,
    round: str,
    offers: Sequence[Offer],
    durable: Iterable[Saved],
    previous: Decision | None,
    job: str,
    newest: int | None = None,
) -> Decision:
    """Return the decision with this number; `durable` are the saves of the durable store.

    `newest`, if it is not None, is the highest step to consider, as for a rollback.
    """
    holders: dict[Saved, dict[int, list[Holder]]] = {}
    parts: dict[Saved, int] = {}
    for offer in offers:
        for held in offer.held:
            part = held.part
            if part.job != job:
                continue
            parts[part.saved] = part.hosts
            holder = Holder(offer.place, offer.url, offer.token, held.folder, held.version)
            holders.setdefault(part.saved, {}).setdefault(part.host, []).append(holder)
    covered = {saved for saved, by_host in holders.items() if len(by_host) == parts[saved]}
    durables = set(durable)
    candidates = [
        saved
        for saved in covered | durables
        if (previous is None or previous.counts(saved)) and (newest is None or saved.step <= newest)
    ]
    chosen = max(
        candidates, default=None, key=lambda saved: (saved.step, saved.epoch, saved in covered, saved.save)
    )
    limit = Limit(number, -1 if chosen is None else chosen.step)
    limits = [] if previous is None else [earlier for earlier in previous.limits if earlier.step < limit.step]
    by_host = holders[chosen] if chosen is not None and chosen in covered else {}
    return Decision(
        number,
        round,
        chosen,
        tuple(tuple(by_host[host]) for host in range(len(by_host))),
        chosen in durables,
        (*limits, limit),
        tuple(msgspec.structs.replace(offer, held=()) for offer in sorted(offers, key=lambda offer: offer.host)),
    )


class Round:
    """One round of a job: its offers and its decision, in the durable store."""

    def __init__(self, storage: Storage, job: str, name: str, host: int, hosts: int) -> None:
        self._storage = storage
        self._job = job
        self.name = name
        self._host, self._hosts = host, hosts

    async def previous(self) -> Decision | None:
        """Return the newest decision, None before the first."""
        while keys := await self._storage.list(DECISIONS):
            with contextlib.suppress(NotFound):  # a host has deleted it, because there is a newer one
                return await read(self._storage, keys[-1], Decision)
        return None

    async def run(
        self, offer: Offer, durable: Iterable[Saved], timeout: float, newest: int | None = None
    ) -> Decision:
        """Offer what this host holds, and return the decision of the round once it is made.

        Raise `DeadlineExceeded`, which names the hosts that have not offered within `timeout` seconds, and
        `Inconsistent` if this host has offered something else in the same round.
        """
        await self._offer(offer)
        clock = asyncio.get_running_loop().time
        began, pause = clock(), _MIN_POLL
        while True:
            decision = await self._decision()
            if decision is not None:
                return decision
            waited = clock() - began
            absent: list[int] = []
            if self._host == 0 or waited > min(_TAKEOVER, timeout):
                absent = await self._absent()
                if not absent:
                    await self._decide(durable, newest)
                    continue
            if waited > timeout:
                raise DeadlineExceeded(
                    f"{self._storage.url}: hosts {absent} of {self._hosts} have not said within {timeout:g} s "
                    "what they hold, so the hosts can't agree on a step to resume from; start the job again, or "
                    "allow more time",
                    absent,
                )
            await asyncio.sleep(pause * world.uniform(0.5, 1))
            pause = min(_MAX_POLL, max(pause * 1.5, self._hosts / 1000))

    async def clear(self, decision: Decision) -> None:
        """Delete the objects of earlier rounds, if the storage permits it."""
        with contextlib.suppress(Denied):
            old = [key for key in await self._storage.list(DECISIONS) if key < decision_key(decision.number)]
            current = f"tiers/offers/{self.name}/"
            old += [key for key in await self._storage.list("tiers/offers/") if not key.startswith(current)]
            pushes = f"tiers/pushes/{decision.number}-"
            old += [key for key in await self._storage.list("tiers/pushes/") if not key.startswith(pushes)]
            await together(self._storage.delete, old)

    async def _offer(self, offer: Offer) -> None:
        key = offer_key(self.name, self._host)
        try:
            await create(self._storage, key, offer)
        except AlreadyExists:
            if await read(self._storage, key, Offer) != offer:
                raise Inconsistent(
                    f"{self._storage.url}: host {self._host} of {self._hosts} takes part in this start of the job "
                    "twice; give each process its own host, and each start another attempt",
                    [],
                ) from None

    async def _decision(self) -> Decision | None:
        """Return the decision of this round, if it is made."""
        for key in reversed(await self._storage.list(DECISIONS)):
            with contextlib.suppress(NotFound):
                decision = await read(self._storage, key, Decision)
                if decision.round == self.name:
                    return decision
        return None

    async def _absent(self) -> list[int]:
        offered = set(await self._storage.list(f"tiers/offers/{self.name}/"))
        return [host for host in range(self._hosts) if offer_key(self.name, host) not in offered]

    async def _decide(self, durable: Iterable[Saved], newest: int | None) -> None:
        keys = [offer_key(self.name, host) for host in range(self._hosts)]
        offers = await together(lambda key: read(self._storage, key, Offer), keys)
        if other := [offer.host for offer in offers if offer.hosts != self._hosts]:
            raise Inconsistent(
                f"{self._storage.url}: hosts {other} take part in this start of the job with another number of "
                f"hosts than {self._hosts}; pass the same number on every host, and another attempt",
                [],
            )
        previous = await self.previous()
        number = 1 if previous is None else previous.number + 1
        decision = decide(number, self.name, offers, durable, previous, self._job, newest)
        _log_passed_over(decision, offers, self._job)
        with contextlib.suppress(AlreadyExists):  # another host, or another round, was first
            await create(self._storage, decision_key(number), decision)


def _log_passed_over(decision: Decision, offers: Sequence[Offer], job: str) -> None:
    """Log the newer steps from which the job can't go on, with the hosts whose parts nobody holds."""
    held: dict[tuple[Saved, int], set[int]] = {}
    for part in (held.part for offer in offers for held in offer.held if held.part.job == job):
        held.setdefault((part.saved, part.hosts), set()).add(part.host)
    for (saved, hosts), parts in sorted(held.items()):
        if saved.step > decision.step and len(parts) < hosts:
            absent = sorted(set(range(hosts)) - parts)
            _log.warning(
                "step %d is not whole: nobody holds the parts of hosts %s of %d", saved.step, absent, hosts
            )
