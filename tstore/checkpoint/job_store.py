"""What a `Checkpointer` saves to and restores from: one store, or tiers of stores (`tstore.Tiers`)."""

from __future__ import annotations

import abc
import datetime
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Literal, NamedTuple, TypedDict, TypeVar

from tstore.checkpoint.background import InFlight
from tstore.checkpoint.background_store import BackgroundStore
from tstore.checkpoint.policies import Policy
from tstore.checkpoint.rollback import Rollback, check_order, roll_back
from tstore.checkpoint.series import OnError, OnSaved
from tstore.core.format.tree.retention import Keep
from tstore.core.steps import Step, saved_steps, steps
from tstore.core.store import Store, opened
from tstore.errors import NotAStore
from tstore.quantization.policy import QuantizeRules, Target

__all__ = ["CheckpointerOptions", "Job", "JobStore", "TierStep", "Tiered", "steps_in"]

T = TypeVar("T")


class CheckpointerOptions(TypedDict, total=False):
    """The options of a `Checkpointer` that are the same for arrays of NumPy, PyTorch and JAX."""

    every: int | Policy | None
    keep: int | Keep | None
    codecs: QuantizeRules | Target
    timeout: float | None
    in_flight: InFlight
    on_error: OnError
    on_saved: OnSaved | None


class Job(NamedTuple):
    """One host of a training job, as a `Checkpointer` knows it.

    `token` returns the token that all hosts share and no other start of the job has; every host calls it at the
    same moment. `keep` is None on all hosts but one, or if nothing is collected.
    """

    host: int
    hosts: int
    timeout: float | None
    keep: Keep | None
    token: Callable[[], Awaitable[str]]


class TierStep(NamedTuple):
    """A step, or one host's part of it, in one tier."""

    step: int
    """The step of the training run."""
    tier: Literal["local", "copy", "durable"]
    """The local store of a host, a copy of it on another host, or the durable store."""
    host: int | None
    """The host whose part it is; None in the durable store, which has all parts."""
    version: int
    """The version of the store of that tier."""
    time: datetime.datetime
    """When it was saved."""
    bytes: int
    """The bytes that it added to that store."""
    waiting: bool
    """Whether the step is to be pushed to the durable store."""


class JobStore:
    """The store of one job; subclasses put other tiers in front of it.

    `verifies` says that `resume` chooses only steps all of whose bytes were read and verified, and `collects` that
    the `Checkpointer` is to collect garbage after each save.
    """

    verifies = False
    collects = True

    def __init__(self, store: str | os.PathLike[str] | Store) -> None:
        self.store = store
        self._background: BackgroundStore | None = None

    @staticmethod
    def of(store: str | os.PathLike[str] | Store | Tiered, job: Job) -> JobStore:
        """Return the store of a job from what its `Checkpointer` was given."""
        return store.job_store(job) if isinstance(store, Tiered) else JobStore(store)

    def background(self) -> BackgroundStore:
        """Return the store of background saves."""
        self._background = self._background or BackgroundStore(self.store)
        return self._background

    async def resume(self) -> None:
        """Choose the step to go on from, if the hosts must agree on it; then all of them make this call."""

    async def check_order(self, step: int, last: int | None, pending: Iterable[int]) -> None:
        """Raise `InvalidArgument` if a step comes before the newest, as `rollback.check_order` does."""
        await check_order(self.store, step, last, pending)

    async def steps(self) -> list[int]:
        """Return the steps that can be restored, in increasing order; none if there is no store."""
        return await self._read(steps)

    async def saved_steps(self) -> list[Step]:
        """Return the steps with their metrics, as `steps` does."""
        return await self._read(saved_steps)

    async def _read(self, read: Callable[[Store], Awaitable[list[T]]]) -> list[T]:
        try:
            async with opened(self.store, "r") as source:
                return await read(source)
        except NotAStore:
            return []

    async def tiers(self) -> list[TierStep]:
        """Return what each tier has of each step, in the order of the steps."""
        try:
            async with opened(self.store, "r") as source:
                return await steps_in(source, "durable")
        except NotAStore:
            return []

    async def source(self, step: int) -> str | os.PathLike[str] | Store:
        """Return the store from which to restore a step."""
        return self.store

    async def roll_back(self, step: int, host: int, timeout: float) -> Rollback:
        """Make a step the newest, as `rollback.roll_back` does."""
        async with opened(self.store, "r+") as store:
            return await roll_back(store, step, host, timeout)

    async def close(self, *, completed: bool) -> None:
        """Release files and connections; `completed` says that the job has ended without an error."""
        if self._background is not None:
            await self._background.close()


class Tiered(abc.ABC):
    """Several stores in place of one: the base of `tstore.Tiers`, which `checkpoint` does not import."""

    every: int | None

    @abc.abstractmethod
    def job_store(self, job: Job) -> JobStore:
        """Return what a `Checkpointer` of this job saves to and restores from."""


async def steps_in(
    store: Store, tier: Literal["local", "copy", "durable"], host: int | None = None
) -> list[TierStep]:
    """Return the steps in the store of one tier."""
    found = []
    for step in await saved_steps(store):
        record = await store.log.reader.record(step.version)
        found.append(TierStep(step.step, tier, host, step.version, step.time, record.bytes_added, False))
    return found
