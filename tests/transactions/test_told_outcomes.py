"""What two hosts are told, in every order of what may happen beside them, compared with what new readers see.

A host that is told nothing relies on its peers: once they have delivered too, the transaction is committed. A host
that is told an error may save again: the transaction is never committed, whatever happens later.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable
from datetime import timedelta

import numpy as np
import pytest

import tstore
from tests.support.polling import until
from tstore.core.tags import remove_steps_after
from tstore.core.transactions.membership import Membership
from tstore.core.transactions.transaction import Transaction, withdraw
from tstore.errors import Conflict, DeadlineExceeded, NotFound, TimelineChanged, TStoreError

NAME = "step/30"
ID = Membership.from_arguments(NAME, 0, 2, "a").transaction


class Job:
    """A store with the steps 10 and 20, and two hosts that have begun to save step 30 after them."""

    def __init__(self) -> None:
        self.url = f"memory://{uuid.uuid4()}"
        self.hosts: list[Transaction] = []

    async def begin(self) -> Job:
        store = await tstore.open(self.url)
        for step in (10, 20):
            async with store.transaction(tag=f"step/{step}") as tx:
                await (await tx.create_array(f"s{step}", (2,), "i4")).write(step)
        self.hosts = [
            (await tstore.open(self.url)).transaction(tag=NAME, name=NAME, host=host, hosts=2, attempt="a")
            for host in range(2)
        ]
        for host, tx in enumerate(self.hosts):
            await (await tx.create_array("w", (2,), "i4", (1,)))[host].write(host + 1)
        return self

    async def deliver_0(self) -> int | None:
        return await self.hosts[0].deliver()

    async def deliver_1(self) -> int | None:
        return await self.hosts[1].deliver()

    async def withdraw(self) -> int | None:
        return await withdraw(self.hosts[0])

    async def collect(self) -> None:
        await (await tstore.open(self.url)).collect(abandoned=timedelta(0))

    async def roll_back(self) -> None:
        await remove_steps_after(await tstore.open(self.url), 10)

    async def void(self) -> None:
        assert (await (await tstore.open(self.url)).repair(void_intact=[2])).ok

    async def finish(self) -> int:
        return await (await tstore.open(self.url)).finish(ID)

    async def committed(self) -> int | None:
        """Return the version in which a new reader finds the values of both hosts, None if there is none."""
        version = await (await tstore.open(self.url)).outcome(ID)
        if version is not None:
            array = await (await (await tstore.open(self.url, "r")).snapshot(version)).array("w")
            assert np.array_equal(await array.read(), [1, 2])
        return version


EVENTS = (Job.deliver_0, Job.deliver_1, Job.withdraw, Job.collect, Job.roll_back, Job.void, Job.finish)
Event = Callable[[Job], Awaitable[int | None]]


async def told(job: Job, event: Event) -> int | Exception | None:
    try:
        return await event(job)
    except TStoreError as error:
        return error


async def can_be_committed(events: tuple[Event, ...]) -> bool:
    """Return whether the transaction is committed once every host has delivered after these events."""
    job = await Job().begin()
    rest = [event for event in (Job.deliver_0, Job.deliver_1, Job.finish) if event not in events]
    for event in (*events, *rest):
        await told(job, event)
    return await job.committed() is not None


@pytest.mark.parametrize(
    "first", [Job.deliver_0, Job.deliver_1, Job.withdraw, Job.collect, Job.roll_back, Job.void]
)
async def test_what_a_host_is_told_holds(first: Event) -> None:
    possible: dict[tuple[Event, ...], bool] = {}
    for rest in itertools.permutations([event for event in EVENTS if event is not first], 2):
        job = await Job().begin()
        events = (first, *rest)
        for count, event in enumerate(events, 1):
            result = await told(job, event)
            if event not in (Job.deliver_0, Job.deliver_1, Job.withdraw, Job.finish):
                continue
            past = events[:count]
            if past not in possible:
                possible[past] = await can_be_committed(past)
            names = [happened.__name__ for happened in past]
            match result:
                case int():
                    assert await job.committed() == result, names
                case None if event is Job.withdraw:
                    assert not possible[past], names
                case None:
                    assert possible[past], names
                case TimelineChanged() if event is Job.withdraw:
                    pass  # whether the transaction was committed before the repair is not known
                case DeadlineExceeded() | NotFound() if event is Job.finish:
                    assert await job.committed() is None, names  # until all have delivered
                case Conflict() | DeadlineExceeded():
                    assert not possible[past], names
                case _:
                    pytest.fail(f"{names}: {result!r}")


@pytest.mark.parametrize("event", [Job.collect, Job.roll_back, Job.void])
async def test_a_waiting_host_learns_at_once_that_it_waits_in_vain(event: Event) -> None:
    """Its peer never comes."""
    job = await Job().begin()
    waiting = asyncio.create_task(job.hosts[0].commit(timeout=60))
    storage = (await tstore.open(job.url)).log.storage
    await until(lambda: storage.list(f"txn/{ID}/part-"), waiting)
    await event(job)
    with pytest.raises(Conflict, match=r"not committed|cannot be committed"):
        await waiting
    assert await job.committed() is None
