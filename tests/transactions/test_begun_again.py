"""Hosts that begin a cooperative transaction again, with the same attempt, after a collection condemned it.

The collection may still be deleting objects whose keys the transaction uses again, so it is never committed: each
host is told before it delivers.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from datetime import timedelta

import numpy as np
import pytest

import tstore
from tstore.core.transactions.membership import Membership
from tstore.errors import CommitOutcomeUnknown, Conflict
from tstore.lab.conformance.faults import open_faulty
from tstore.lab.simulation.scenario import override_constants

ID = Membership.from_arguments("n", 0, 2, "a").transaction


async def begin(store: tstore.Store, host: int, attempt: str = "a") -> tstore.Transaction:
    """Return the transaction of a host that has written its half of an array."""
    tx = store.transaction(name="n", host=host, hosts=2, attempt=attempt)
    await (await tx.create_array(attempt, (2,), "i4", (1,)))[host].write(host + 1)
    return tx


async def begun(delivered: int) -> str:
    """Return the URL of a store to which that many hosts have delivered; the last of two can't commit."""
    store, faults = await open_faulty(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        await (await tx.create_array("old", (1,), "i4")).write(1)
    faults.fail("create", "commits/*", times=2)
    for host in range(delivered):
        with contextlib.suppress(CommitOutcomeUnknown):
            await (await begin(store, host)).deliver()
    return store.url


async def commit(url: str, attempt: str = "a") -> list[int | BaseException]:
    """Return what two hosts are told that begin now."""
    hosts = [(await begin(await tstore.open(url), host, attempt)).commit(60) for host in range(2)]
    return await asyncio.gather(*hosts, return_exceptions=True)


@pytest.mark.parametrize("delivered", [1, 2])
@pytest.mark.parametrize("last", ["manifest*", "part-*", "merging-*", ""])
async def test_hosts_are_told_at_once_and_another_attempt_is_committed(last: str, delivered: int) -> None:
    """The collection stands still before it deletes one of the objects, which the hosts would create again."""
    with override_constants(INLINE_MANIFEST_BYTES=0):
        url = await begun(delivered)
        collecting, faults = await open_faulty(url)
        gate = faults.hold("delete", f"txn/{ID}/{last}")
        collection = asyncio.create_task(collecting.collect(abandoned=timedelta(0)))
        reached = asyncio.create_task(gate.reached())
        await asyncio.wait([collection, reached], return_when=asyncio.FIRST_COMPLETED)
        for error in await commit(url):
            assert isinstance(error, Conflict)
            assert "removed by the garbage collection" in str(error)
        assert await commit(url, "another") == [3, 3]
        gate.release()
        await collection
        for error in await commit(url):
            assert isinstance(error, Conflict)
        reached.cancel()
    store = await tstore.open(url)
    assert await store.outcome(ID) is None
    assert (await store.verify()).faults == []
    array = await (await store.snapshot()).array("another")
    assert np.array_equal(await array.read(), [1, 2])


async def test_a_host_that_begins_again_does_not_meet_one_that_began_before() -> None:
    """The one that began before the collection delivers after it."""
    url = await begun(0)
    late = await begin(await tstore.open(url), 0)
    await (await begin(await tstore.open(url), 1)).deliver()
    await (await tstore.open(url)).collect(abandoned=timedelta(0))
    with pytest.raises(Conflict):
        await (await begin(await tstore.open(url), 1)).deliver()
    with pytest.raises(Conflict):
        await late.deliver()
    assert await (await tstore.open(url)).outcome(ID) is None
