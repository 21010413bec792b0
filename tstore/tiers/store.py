"""What a `Checkpointer` of one host saves to and restores from, if it has tiers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple, TypeVar

import msgspec
import xxhash

from tstore.checkpoint.background_store import BackgroundStore
from tstore.checkpoint.checkpoint import Checkpoint
from tstore.checkpoint.checkpoint import Saved as Committed
from tstore.checkpoint.job_store import Job, JobStore, TierStep
from tstore.checkpoint.rollback import Rollback, check_newest
from tstore.core.data.writer import WriteJob
from tstore.core.format.arguments import checked_commit_timeout
from tstore.core.runtime import world
from tstore.core.runtime.event_loops import BACKGROUND
from tstore.core.runtime.pool import run, wait_all
from tstore.core.steps import Step, saved_steps, step_tag, steps_of
from tstore.core.store import Store
from tstore.core.store import open as open_store
from tstore.core.tags import drop_steps_after
from tstore.core.transactions.membership import Membership
from tstore.errors import (
    Conflict,
    Corrupt,
    DeadlineExceeded,
    Denied,
    InvalidArgument,
    NotFound,
    StorageFull,
    TimelineChanged,
    TStoreError,
    Unavailable,
)
from tstore.service.server.server import Certificate
from tstore.tiers.holders import METADATA, HeldStorage, assembled, saved_of
from tstore.tiers.local import LocalTier, overwriting
from tstore.tiers.objects import Decision, Offer, Saved
from tstore.tiers.peers import PeerServer, copied_by
from tstore.tiers.pushes import Pushes
from tstore.tiers.resume import Round

__all__ = ["Options", "TieredStore"]

T = TypeVar("T")

_FOREIGN = 1 << 62
"""The epoch of steps of the durable store that were saved without tiers: no decision gives them up."""

_log = logging.getLogger("tstore.tiers")


class Options(NamedTuple):
    """The checked arguments of `Tiers`."""

    local: str
    durable: str
    peers: int
    durable_every: int | None
    keep: int
    domain: str
    address: str
    certificate: Certificate | None


class _Due(NamedTuple):
    """A step that this host has saved locally, or that it saves to the durable store alone (`version` is None)."""

    checkpoint: Checkpoint
    version: int | None


class TieredStore(JobStore):
    """One host's local store and its pushes; what it does with stores runs on the loop of background saves."""

    verifies = True
    collects = False

    def __init__(self, options: Options, job: Job) -> None:
        super().__init__(options.durable)
        self._options = options
        self._job = job
        self._timeout = checked_commit_timeout(job.timeout)
        self._token = ""
        self._decision: Decision | None = None
        self._saved: dict[int, _Due] = {}  # since the decision, by step: the newest and those to push
        self._began_save = False  # since the decision, whatever became of it
        self._last_due = 0
        self._durable: Store | None = None
        self._local: LocalTier | None = None  # None if it can't be used
        self._server: PeerServer | None = None
        self._pushes: Pushes | None = None
        self._assembled: HeldStorage | None = None  # the decided step
        self._upkeep: asyncio.Task[None] | None = None  # of the local store, after a save

    # ---- the face to the Checkpointer, on its event loop

    def background(self) -> BackgroundStore:
        """Return the store of background saves, which saves to the local store."""
        if self._background is None:
            self._background = _Background(self, self._options.durable)
        return self._background

    async def resume(self) -> None:
        """Decide on a step with the other hosts, unless no save has begun since the last decision.

        Whether this host has saved anything does not matter: a step that it left out others may have saved.
        """
        if self._decision is None or self._began_save:
            await self._decide()

    async def check_order(self, step: int, last: int | None, pending: Iterable[int]) -> None:
        """Raise `InvalidArgument` if a step comes before the newest of this job."""
        decision = self._decision or await self._decide()
        self._began_save = True
        decided = [] if decision.saved is None else [decision.step]
        known = [*decided, *self._saved, *pending]
        check_newest(self._options.durable, step, {step_tag(number): 0 for number in known})

    async def steps(self) -> list[int]:
        """Return the decided step and the newest saved since, without a request: the durable store may be away."""
        decision = self._decision or await self._decide()
        return sorted({*self._saved, *([] if decision.saved is None else [decision.step])})

    async def saved_steps(self) -> list[Step]:
        """Return the steps in any tier, in increasing order; the version is that of the tier."""
        decision = self._decision or await self._decide()
        found: dict[int, Step] = {}
        with contextlib.suppress(Unavailable):  # the durable store is away
            saves = await self._on_loop(self._durable_saves())
            counted = {saved.step for saved in saves if decision.counts(saved)}
            found = {step.step: step for step in await self._read(saved_steps) if step.step in counted}
        if decision.holders and decision.step not in found:
            with contextlib.suppress(TStoreError):  # superseded since, and dropped
                [found[decision.step]] = await saved_steps(await self._decided(decision))
        if self._local is not None and self._saved:
            for step in await saved_steps(self._local.reader()):
                if step.step in self._saved:
                    found.setdefault(step.step, step)
        return [found[step] for step in sorted(found)]

    async def tiers(self) -> list[TierStep]:
        """Return what the durable store, the local store and the copies on this host have of each step."""
        found: list[TierStep] = []
        with contextlib.suppress(Unavailable):  # the durable store is away
            found = await super().tiers()
        if self._local is not None:
            found += await self._local.steps()
        pending = {} if self._pushes is None else self._pushes.pending
        waiting = [step._replace(waiting=step.tier == "local" and step.step in pending) for step in found]
        return sorted(waiting, key=lambda step: (step.step, step.tier != "durable", step.tier, step.host or 0))

    async def source(self, step: int) -> str | os.PathLike[str] | Store:
        """Return the store of the nearest tier with a step."""
        decision = self._decision or await self._decide()
        if step in self._saved and self._job.hosts == 1 and self._local is not None:
            local = self._local.reader()
            if step in steps_of(await local.tags()):  # else it is in the durable store only, or was dropped
                return local
        if step not in self._saved and decision.holders and decision.step == step:
            try:
                return await self._decided(decision)
            except TStoreError as error:
                if not decision.durable:
                    raise
                _log.warning("%s; the durable store is read", error)
        return self._options.durable

    async def roll_back(self, step: int, host: int, timeout: float) -> Rollback:
        """Decide with the other hosts to go on from a step; the versions are the number of the decision."""
        if step not in {saved.step for saved in await self.saved_steps()}:
            raise NotFound(f"{self._options.durable}: no tier has step {step}")
        decision = await self._decide(newest=step)
        if decision.step != step:
            raise NotFound(
                f"{self._options.durable}: step {step} is not whole in any tier; the job goes on from "
                f"{'no step' if decision.saved is None else f'step {decision.step}'}"
            )
        return Rollback(decision.number, decision.number)

    async def close(self, *, completed: bool) -> None:
        """Push the last step if the job has ended without an error, and stop the server."""
        try:
            await self._on_loop(self._finish(completed))
        finally:
            await super().close(completed=completed)

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        call = BACKGROUND.start(work)
        [result] = await wait_all([call.future], call.cancel)
        return result

    async def _decide(self, newest: int | None = None) -> Decision:
        if not self._token:
            self._token = await self._job.token() if self._job.hosts > 1 else world.token(12)
        return await self._on_loop(self._run_round(newest))

    async def _decided(self, decision: Decision) -> Store:
        """Return a store with the decided step, made of the parts that its holders have."""
        if self._assembled is None:
            root, place = ("", "") if self._local is None else (self._local.root, self._local.place)
            self._assembled = await self._on_loop(assembled(decision, root, place))
        return Store(self._assembled, None, "r")

    # ---- on the loop of background saves

    async def _run_round(self, newest: int | None) -> Decision:
        options, job = self._options, self._job
        if self._pushes is not None:
            await self._pushes.cancel()
        durable = await self._durable_store()
        _rounds[durable.url, self._token, job.host] += 1
        text = f"{self._token} {_rounds[durable.url, self._token, job.host]}"
        round = Round(
            durable.log.storage, durable.uuid, xxhash.xxh3_128_hexdigest(text.encode()), job.host, job.hosts
        )
        held = []
        try:
            if self._local is None:
                start = round.name[:16]
                self._local = await LocalTier.open(options.local, durable.uuid, start, job.host, options.keep)
            held = await self._local.held()
        except TStoreError as error:
            self._local = None
            _log.warning("%s can't be used, so steps go to the durable store only: %s", options.local, error)
        if self._server is None and job.hosts > 1 and self._local is not None:
            self._server = await run(PeerServer, self._local.root, options.address, options.certificate)
        url, token = ("", "") if self._server is None else (self._server.url, self._server.token)
        place = "" if self._local is None else self._local.place
        offer = Offer(job.host, job.hosts, place, url, token, options.domain, tuple(held))
        decision = await round.run(offer, await self._durable_saves(), self._timeout, newest)
        self._decision, self._assembled, self._saved, self._began_save = decision, None, {}, False
        self._last_due = max(0, decision.step)
        self._pushes = Pushes(durable.log.storage, decision.number, job.host, job.hosts, self._push)
        if job.host == 0:
            await round.clear(decision)
            with contextlib.suppress(
                Conflict
            ):  # a push of a job that still runs; it has failed, or counts as given up
                await drop_steps_after(durable, decision.step)
        if self._local is not None:
            await self._local.begin(decision, held)
            if self._server is not None and options.peers:
                by_number = copied_by(decision.offers, options.peers, job.host)
                copied = [other for other in by_number if decision.offers[other].url]  # else it has no local store
                await run(self._server.copy, decision.offers, copied, self._local.start, job.host)
        return decision

    async def _durable_store(self) -> Store:
        if self._durable is None:
            store = await open_store(self._options.durable, "a")
            await store.log.ensure_created()
            if not store.log.storage.capabilities.listing:
                raise InvalidArgument(f"{store.url} can't be listed, as Tiers needs; serve it with tstore serve")
            self._durable = store
        return self._durable

    async def _durable_saves(self) -> list[Saved]:
        """Return the saves in the durable store, those without tiers with an epoch that always counts."""
        store = await self._durable_store()
        tags = await store.tags()
        steps = steps_of(tags)
        saves: list[Saved] = []
        async for _, record in store.log.reader.each_record([tags[step_tag(step)] for step in steps]):
            saves.append(saved_of(record) or Saved(steps[len(saves)], _FOREIGN))
        return saves

    async def save(self, checkpoint: Checkpoint, on_written: Callable[[], None] | None) -> Committed:
        """Save this host's part of a checkpoint to its local store, or to the durable store if that is full."""
        decision = self._decision
        assert decision is not None  # `check_order` comes first
        assert self._pushes is not None
        step, hosts = checkpoint.step, checkpoint.hosts
        name = world.token(12)
        if checkpoint.attempt is not None and hosts > 1:
            name = Membership.from_arguments(step_tag(step), 0, hosts, str(checkpoint.attempt)).transaction
        saved = Saved(step, decision.number, name)
        durable = checkpoint._replace(
            metadata={**checkpoint.metadata, METADATA: msgspec.to_builtins(saved)},
            settings=overwriting(checkpoint.settings),
            check_tags=lambda tags: None,
        )
        every = self._options.durable_every
        is_due = every is not None and step // every > self._last_due // every
        if is_due:
            self._last_due = step
        if self._upkeep is not None:
            await self._upkeep
        needed = {*self._pushes.pending, *sorted(self._saved)[-self._options.keep :]}
        self._saved = {number: due for number, due in self._saved.items() if number in needed}
        if self._server is not None and len(self._saved) > 1:
            await run(self._server.wait_copied, sorted(self._saved)[-2])
        try:
            if self._local is None:
                raise Unavailable(f"{self._options.local} can't be used")
            committed = await self._local.save(checkpoint, saved, on_written)
        except (StorageFull, Unavailable, Corrupt, NotFound, Denied, TimelineChanged) as error:
            return await self._save_durably(durable, is_due, error, on_written)
        bare = [WriteJob(job.path, job.meta, ()) for job in checkpoint.jobs]
        self._saved[step] = _Due(durable._replace(jobs=bare), committed.version)
        if is_due:
            self._pushes.add(step)  # `finish` tells its failure
        if self._server is not None:
            self._server.wake()
        self._upkeep = asyncio.create_task(self._local.collect(self._pushes.pending.keys() & self._saved.keys()))
        return committed

    async def _save_durably(
        self, checkpoint: Checkpoint, is_due: bool, error: TStoreError, on_written: Callable[[], None] | None
    ) -> Committed:
        """Save a step for which there is no room locally; leave out one that only some hosts would save."""
        assert self._pushes is not None
        is_due |= checkpoint.hosts == 1
        where = ", but to the durable one" if is_due else ""
        _log.warning("step %d is not saved to the local store%s: %s", checkpoint.step, where, error)
        if is_due:
            self._saved[checkpoint.step] = _Due(checkpoint, None)
            try:
                return Committed(await self._pushes.add(checkpoint.step), 0, 0)
            finally:
                self._saved[checkpoint.step] = _Due(checkpoint._replace(jobs=()), None)  # not its arrays for ever
        if on_written is not None:
            on_written()
        return Committed(0, 0, 0)

    async def _push(self, step: int) -> int:
        """Commit this host's part of a step to the durable store, with the other hosts, and return the version."""
        durable = await self._durable_store()
        due = await self._due(step)
        checkpoint = due.checkpoint
        if due.version is not None:
            assert self._local is not None
            checkpoint = checkpoint._replace(copied=await self._local.snapshot(due.version))
        committed = await checkpoint.save(durable)
        if self._job.keep is not None:
            try:
                await durable.collect(self._job.keep)
            except TStoreError as error:  # the step is there all the same
                _log.warning("%s: superseded steps were not dropped: %s", durable.url, error)
        return committed.version

    async def _due(self, step: int) -> _Due:
        """Return a step once this host has saved it; host 0 may have named it before."""
        clock = asyncio.get_running_loop().time
        end = clock() + self._timeout
        while (due := self._saved.get(step)) is None:
            if clock() > end or max(self._saved, default=step) > step:
                raise DeadlineExceeded(f"host {self._job.host} has no step {step} to push", [self._job.host])
            await asyncio.sleep(0.02)
        return due

    async def _finish(self, completed: bool) -> None:
        try:
            if self._pushes is not None and completed:
                last = max(self._saved, default=None)
                if last is not None and last != self._pushes.pushed:
                    self._pushes.add(last)
                await self._pushes.finish(self._timeout)
            elif self._pushes is not None:
                await self._pushes.cancel()
        finally:
            if self._upkeep is not None:
                await self._upkeep
            if self._server is not None:
                await run(self._server.close)
            for store in (self._local, self._durable):
                if store is not None:
                    await store.close()


class _Background(BackgroundStore):
    """The local store of a host, as background saves use it; `opened` is the durable store, to withdraw from."""

    def __init__(self, owner: TieredStore, url: str) -> None:
        super().__init__(url)
        self._owner = owner

    async def save(self, checkpoint: Checkpoint, on_written: Callable[[], None] | None = None) -> Committed:
        return await self._owner.save(checkpoint, on_written)


_rounds: Counter[tuple[str, str, int]] = Counter()
"""The rounds of this process by durable store, token and host."""
