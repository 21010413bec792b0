"""Hosts that begin a cooperative transaction again, with the same attempt, after a collection removed it.

The last collection may still be deleting objects whose keys the transaction uses again, so it is not committed:
each host is told before it delivers. After a further collection its id is committed once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from datetime import timedelta

import numpy as np
import pytest

import tstore
from tstore.core.transactions.membership import Membership
from tstore.errors import AlreadyExists, CommitOutcomeUnknown, Conflict, DeadlineExceeded
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
    url = f"memory://{uuid.uuid4()}"
    async with await tstore.open(url) as store, store.transaction() as tx:
        await (await tx.create_array("old", (1,), "i4")).write(1)
    await deliver(url, delivered)
    return url


async def deliver(url: str, hosts: int) -> None:
    """Deliver from that many hosts; the last of two can't commit."""
    store, faults = await open_faulty(url)
    faults.fail("create", "commits/*", times=2)
    for host in range(hosts):
        with contextlib.suppress(CommitOutcomeUnknown):
            await (await begin(store, host)).deliver()


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


# ---- once nothing of the first use is left


async def replace_all(store: tstore.Store, number: int) -> None:
    """Save a step that needs no older version."""
    await tstore.save(store, {"w": np.full(2, number)}, number)


async def expired(hold: str = "") -> tuple[str, Callable[[], Awaitable[object]]]:
    """Return the URL of a store whose version 1 was the transaction, and has expired, and what remains to be done.

    The first of three collections removed it. It stands still before it deletes an object that matches `hold`.
    """
    url = f"memory://{uuid.uuid4()}"
    assert await commit(url) == [1, 1]
    collecting, faults = await open_faulty(url)
    await replace_all(collecting, 1)
    gate = faults.hold("delete", hold or "none")
    collection = asyncio.create_task(collecting.collect(tstore.Keep(last=1)))
    reached = asyncio.create_task(gate.reached())
    await asyncio.wait([collection, reached], return_when=asyncio.FIRST_COMPLETED)
    for number in (2, 3):
        await replace_all(store := await tstore.open(url), number)
        assert (await store.collect(tstore.Keep(last=1))).version is not None
    assert not await store.log.storage.list(f"txn/{ID}/")

    async def go_on() -> None:
        gate.release()
        await collection
        reached.cancel()

    return url, go_on


async def check(url: str, version: int) -> None:
    store = await tstore.open(url)
    assert (await store.verify()).faults == []
    assert [c.version async for c in store.history() if c.transaction == ID] == [version, 1]
    array = await (await store.snapshot()).array("a")
    assert np.array_equal(await array.read(), [1, 2])


async def test_the_id_is_committed_once_more_and_the_store_is_valid() -> None:
    url, go_on = await expired()
    await go_on()
    assert await commit(url) == [8, 8]
    await check(url, 8)
    copy = f"memory://{uuid.uuid4()}"
    store = await tstore.open(url)
    assert await store.outcome(ID) == 8
    await tstore.copy(store, copy)
    await check(copy, 8)
    await replace_all(store, 9)
    assert (await store.collect(tstore.Keep(last=1))).versions == [6, 8]
    assert not await store.log.storage.list(f"txn/{ID}/")
    assert (await store.verify()).faults == []


@pytest.mark.parametrize("hold", ["manifest*", "part-*", "merging-*"])
async def test_an_older_collection_that_stands_still_removes_nothing_that_is_committed(hold: str) -> None:
    with override_constants(INLINE_MANIFEST_BYTES=0):
        url, go_on = await expired(f"txn/{ID}/{hold}")
        assert await commit(url) == [8, 8]
        await go_on()
        await check(url, 8)


async def test_what_a_host_is_told_that_waited_in_vain_is_not_committed_later() -> None:
    """It is told to use another attempt, as if the others knew already that their version was removed."""
    url, go_on = await expired()
    await go_on()
    with pytest.raises(Conflict, match=r"committed by transaction 'n' in this attempt; .*another attempt"):
        await (await begin(await tstore.open(url), 1)).commit(0.01)
    with pytest.raises(DeadlineExceeded, match="host 1 of 2 gave up waiting for hosts"):
        await (await begin(await tstore.open(url), 0)).commit(60)


async def test_a_host_of_the_first_use_that_wakes_up_is_told_its_version_and_the_others_are_not() -> None:
    url = f"memory://{uuid.uuid4()}"
    late = await begin(await tstore.open(url), 0)
    assert await commit(url) == [1, 1]
    for number in (1, 2, 3):
        await replace_all(store := await tstore.open(url), number)
        await store.collect(tstore.Keep(last=1))
    other = await begin(await tstore.open(url), 1)
    waiting = asyncio.create_task(other.commit(60))
    assert await late.commit(60) == 1
    with pytest.raises(Conflict, match=r"committed as version 1 before .*another attempt"):
        await waiting
    assert (await (await tstore.open(url)).verify()).faults == []
    assert await (await tstore.open(url)).outcome(ID) == 1


async def test_a_host_of_the_first_use_that_helps_does_not_commit_the_second() -> None:
    """It stands still before it commits for the hosts that failed; another process does so."""
    url = await begun(2)
    slow, faults = await open_faulty(url)
    gate = faults.hold("create", f"txn/{ID}/merging-*", nth=2)
    helping = asyncio.create_task((await begin(slow, 0)).commit(60))
    await gate.reached()
    assert await (await tstore.open(url)).finish(ID) == 2
    for number in (1, 2, 3):
        await replace_all(store := await tstore.open(url), number)
        await store.collect(tstore.Keep(last=1))
    await deliver(url, 2)
    gate.release()
    assert await helping == 2
    assert await store.finish(ID) == 9
    assert (await store.verify()).faults == []


async def test_an_expired_version_whose_packs_are_needed_is_told_too() -> None:
    """The collection condemns each of the other objects by itself."""
    url = f"memory://{uuid.uuid4()}"
    save = [tstore.save(url, {"w": np.arange(5000)}, 1, host=h, hosts=2, attempt="a") for h in range(2)]
    assert await asyncio.gather(*save) == [1, 1]
    await tstore.save(url, {"w": np.arange(5000)}, 2)
    await (await tstore.open(url)).collect(tstore.Keep(last=1))
    again = [
        tstore.save(url, {"w": np.arange(9000)}, 1, host=h, hosts=2, attempt="a", timeout=60) for h in range(2)
    ]
    for error in await asyncio.gather(*again, return_exceptions=True):
        assert isinstance(error, AlreadyExists)
        assert "already saved step 1, as version 1" in str(error)
    assert await tstore.steps(url) == [2]
