"""Many independent writers: every one gets through, and is told what came in its way."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest

import tstore
import tstore.sync as blocking
from tstore.testing.faults import open_faulty

WRITERS = 64


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4()}"


async def make(url: str, cells: int, chunk: int = 1) -> None:
    async with (await tstore.open(url)).transaction() as tx:
        await (await tx.create_array("w", (cells,), "int64", (chunk,))).write(-1)


async def set_cell(store: tstore.Store, cell: int) -> tstore.Transaction:
    tx = store.transaction(f"cell {cell}", durability="none")
    await (await tx.array("w"))[cell].write(cell)
    return tx


async def values(url: str) -> list[int]:
    snapshot = await (await tstore.open(url, "r")).snapshot()
    return [int(v) for v in await (await snapshot.array("w")).read()]


async def test_the_slowest_of_many_processes_gets_through(url: str) -> None:
    """Each loses at most once to each of the others: a try fails only where another succeeded."""
    await make(url, WRITERS)
    ready = [await set_cell(await tstore.open(url), i) for i in range(WRITERS)]
    versions = await asyncio.gather(*[tx.commit() for tx in ready])
    assert sorted(versions) == list(range(2, WRITERS + 2))
    assert await values(url) == list(range(WRITERS))
    store = await tstore.open(url, "r")
    told = {c.version: c.facts.get("tries", 1) async for c in store.history()}
    for tx in ready:
        assert len(tx.retries) < WRITERS
        assert told[tx.version or 0] == len(tx.retries) + 1
        lost = [r.version for r in tx.retries]
        assert lost == sorted(set(lost))
        assert not {tx.version} & set(lost)


async def test_the_commits_of_one_process_do_not_race_each_other(url: str) -> None:
    await make(url, WRITERS)
    store = await tstore.open(url)
    ready = [await set_cell(store, i) for i in range(WRITERS)]
    await asyncio.gather(*[tx.commit() for tx in ready])
    assert [tx.retries for tx in ready] == [[]] * WRITERS
    assert await values(url) == list(range(WRITERS))


async def test_a_lost_race_is_told(url: str) -> None:
    await make(url, 4)
    store, faults = await open_faulty(url)
    tx = await set_cell(store, 0)
    gate = faults.hold("create", "commits/*")
    commit = asyncio.create_task(tx.commit())
    await gate.reached()
    other = await set_cell(await tstore.open(url), 1)
    await other.commit()
    gate.release()
    assert await commit == 3
    assert tx.retries == [tstore.Retry(2, "another transaction became this version first")]
    assert (await anext(store.history())).facts == {"tries": 2}
    assert (other.retries, await values(url)) == ([], [0, 1, -1, -1])


async def test_a_create_without_an_answer_is_told(url: str) -> None:
    await make(url, 4)
    store, faults = await open_faulty(url)
    tx = await set_cell(store, 0)
    faults.fail("create", "commits/*")
    assert await tx.commit() == 3
    [retry] = tx.retries
    assert retry.version == 2
    assert "no answer" in retry.reason
    assert (await anext(store.history())).facts == {"tries": 2}


async def test_parts_of_chunks_that_were_written_again_are_told(url: str) -> None:
    await make(url, 4, chunk=4)
    store = await tstore.open(url)
    tx, other = await set_cell(store, 0), await set_cell(store, 1)
    await other.commit()
    await tx.commit()
    [retry] = tx.retries
    assert retry.version == 2
    assert retry.reason.endswith("w")
    assert (await anext(store.history())).facts == {}  # the record was created at the first try
    assert await values(url) == [0, 1, -1, -1]


def test_a_store_serves_one_event_loop_after_the_other(url: str) -> None:
    asyncio.run(make(url, 8))
    store = asyncio.run(tstore.open(url))

    async def four(first: int) -> None:
        ready = [await set_cell(store, i) for i in range(first, first + 4)]
        await asyncio.gather(*[tx.commit() for tx in ready])

    asyncio.run(four(0))
    asyncio.run(four(4))
    assert asyncio.run(values(url)) == list(range(8))


def test_blocking_transactions_tell_their_retries() -> None:
    store = blocking.open(f"memory://{uuid.uuid4()}")
    with store.transaction() as tx:
        tx.create_array("w", (4,), "int64", (4,)).write(0)
    tx = store.transaction()
    tx.array("w")[0].write(1)
    with store.transaction() as other:
        other.array("w")[1].write(2)
    tx.commit()
    assert [r.version for r in tx.retries] == [2]
    assert isinstance(tx.retries[0], blocking.Retry)
