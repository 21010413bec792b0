"""Hosts that give up and withdraw their transaction, against hosts that commit it: exactly one succeeds."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

import tstore
from tests.support.dying import Dead, Dying
from tests.support.thresholds import Thresholds
from tstore import Checkpointer, Shards
from tstore.core.format.objects.encoding import encode
from tstore.core.storage.objects import Durability
from tstore.core.transactions import cooperative
from tstore.core.transactions.decision import Decision
from tstore.core.transactions.fragments import FragmentTree
from tstore.core.transactions.membership import Membership
from tstore.core.transactions.transaction import Transaction, withdraw
from tstore.errors import CommitOutcomeUnknown, DeadlineExceeded, Unavailable
from tstore.lab.conformance.faults import open_faulty
from tstore.lab.simulation.scenario import override_constants
from tstore.lab.simulation.storage import HostStorage, SharedObjects
from tstore.lab.simulation.virtual import NO_FAULTS, Host
from tstore.service.server import Access, Server

TOKEN = "write-token-of-the-test"


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4()}"


@pytest.fixture(params=[3, 5], ids=["one level", "three levels"])
def hosts(request: pytest.FixtureRequest) -> Iterator[int]:
    with override_constants(FAN_IN=100 if request.param == 3 else 2):
        yield request.param


async def transactions(store: tstore.Store, hosts: int) -> list[Transaction]:
    """Return the transaction of each host, with one chunk written."""
    opened = [store.transaction(name="n", host=host, hosts=hosts, attempt="a") for host in range(hosts)]
    for host, tx in enumerate(opened):
        await (await tx.create_array("w", (hosts,), "int32", (1,)))[host].write(host + 1)
    return opened


def claim_key(hosts: int) -> str:
    member = Membership.from_arguments("n", 0, hosts, "a")
    return member.claim_key(member.top, 0)


async def check_withdrawn(store: tstore.Store, by: int, hosts: int) -> None:
    assert (await store.snapshot()).version == 0
    with pytest.raises(DeadlineExceeded, match=f"host {by} of {hosts} gave up"):
        await store.finish("n")
    [state] = await store.pending()
    assert state.withdrawn_by == by
    assert f"withdrawn by host {by}" in repr(state)


async def check_committed(store: tstore.Store, hosts: int) -> None:
    values = await (await (await store.snapshot(1)).array("w")).read()
    assert values.tolist() == list(range(1, hosts + 1))
    assert (await store.verify()).ok


async def test_a_late_host_cannot_commit_what_another_has_withdrawn(url: str, hosts: int) -> None:
    store = await tstore.open(url)
    txs = await transactions(store, hosts)
    for tx in txs[:-1]:
        assert await tx.deliver() is None
    assert await withdraw(txs[1]) is None
    with pytest.raises(DeadlineExceeded, match=r"host 1 of .* gave up .* save again"):
        await txs[-1].deliver()
    assert await withdraw(txs[-1]) is None  # by now, so does that host
    await check_withdrawn(store, 1, hosts)
    report = await store.verify()
    assert (report.ok, report.foreign) == (True, [])


async def test_a_host_may_withdraw_while_another_merges_its_block(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await tstore.open(url)
    with override_constants(FAN_IN=2):
        txs = await transactions(store, 5)

        async def create_merged(self: FragmentTree, level: int, block: int) -> None:
            data = encode(await self.merge_block(level, block))
            if block == 0 and level == 0:
                assert await withdraw(txs[0]) is None
            await self._storage.create(self._member.fragment_key(level + 1, block), data, self._durability)

        monkeypatch.setattr(FragmentTree, "_create_merged", create_merged)
        assert await txs[0].deliver() is None
        for tx in txs[1:]:
            with pytest.raises(DeadlineExceeded, match="host 0 of 5 gave up"):
                await tx.deliver()
        await check_withdrawn(store, 0, 5)


async def test_waiting_hosts_stop_at_once(url: str, hosts: int, thresholds: Thresholds) -> None:
    """Their own deadline is an hour."""
    thresholds(_DECISION_INTERVAL=0.01, _MAX_DECISION_RATE=1e9)
    store = await tstore.open(url)
    txs = await transactions(store, hosts)
    waiting = [asyncio.create_task(tx.commit(timeout=3600)) for tx in txs[1:]]
    assert await withdraw(txs[0]) is None  # before it delivers
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(error) for error in errors} == {DeadlineExceeded}
    assert {"host 0 of" in str(error) for error in errors} == {True}
    await check_withdrawn(store, 0, hosts)


async def test_a_host_whose_deadline_has_passed_names_who_withdrew(url: str, hosts: int) -> None:
    store = await tstore.open(url)
    txs = await transactions(store, hosts)
    assert await withdraw(txs[0]) is None
    with pytest.raises(DeadlineExceeded, match="host 0 of"):
        await txs[1].commit(timeout=0.01)


async def test_a_host_that_gives_up_after_another_claimed_does_not_withdraw(url: str, hosts: int) -> None:
    """The last host has claimed the transaction, and has not appended its record yet."""
    store = await tstore.open(url)
    late, faults = await open_faulty(url)
    txs = await transactions(store, hosts)
    last = (await transactions(late, hosts))[-1]
    for tx in txs[:-1]:
        await tx.deliver()
    gate = faults.hold("create", "commits/*")
    committing = asyncio.create_task(last.deliver())
    await gate.reached()
    with pytest.raises(CommitOutcomeUnknown, match="another one is about to commit"):
        await withdraw(txs[0])  # the record does not exist yet
    assert (await store.pending())[0].withdrawn_by is None
    gate.release()
    assert await committing == 1
    assert await withdraw(txs[0]) == 1
    await check_committed(store, hosts)


async def test_finish_decides_before_it_commits(url: str, hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All hosts have delivered, and the last one died before it claimed the transaction."""
    store, faults = await open_faulty(url)
    txs = await transactions(store, hosts)
    with monkeypatch.context() as dying:
        dying.setattr(Decision, "commit", AsyncMock(return_value=False))
        for tx in txs:
            assert await tx.deliver() is None
    gate = faults.hold("create", "commits/*")
    finishing = asyncio.create_task(store.finish("n"))
    await gate.reached()
    with pytest.raises(CommitOutcomeUnknown):
        await withdraw(txs[0])
    assert (await store.pending())[0].withdrawn_by is None
    gate.release()
    assert await finishing == 1
    await check_committed(store, hosts)


async def test_a_withdrawal_overtakes_the_claim_of_finish(
    url: str, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await tstore.open(url)
    txs = await transactions(store, hosts)
    with monkeypatch.context() as dying:
        dying.setattr(Decision, "commit", AsyncMock(return_value=False))
        for tx in txs:
            assert await tx.deliver() is None
    finisher, faults = await open_faulty(url)
    gate = faults.hold("create", "*/merging-*")
    finishing = asyncio.create_task(finisher.finish("n"))
    await gate.reached()
    assert await withdraw(txs[0]) is None
    gate.release()
    with pytest.raises(DeadlineExceeded, match="host 0 of"):
        await finishing
    await check_withdrawn(store, 0, hosts)


@pytest.mark.parametrize("other", [False, True], ids=["its own", "that of another host"])
async def test_a_withdrawal_is_durable(other: bool) -> None:
    """The other host may have died after it created the object, and before it synced its folder."""
    shared = SharedObjects({})
    storage = HostStorage(shared, Host("a", "a", NO_FAULTS, 0, lambda _who, _what: None))
    if other:
        shared.create(claim_key(2), b"withdrawn by 1")
    decision = Decision(storage, Membership.from_arguments("n", 0, 2, "a"), Durability.FSYNC)
    assert await decision.withdraw()
    assert shared.objects.keys() == {claim_key(2)}
    assert not shared.volatile


@pytest.mark.parametrize("claim", [b"1", b"", b"\0"], ids=["whole", "emptied", "zeroed"])
async def test_others_commit_after_the_claimant_has_died(url: str, hosts: int, claim: bytes) -> None:
    """A power failure may empty the claim, but not a withdrawal."""
    store = await tstore.open(url)
    await store.log.storage.replace(claim_key(hosts), claim)
    txs = await transactions(store, hosts)
    for tx in txs:
        assert await tx.deliver() is None
    with pytest.raises(CommitOutcomeUnknown):
        await withdraw(txs[0])
    assert await store.finish("n") == 1
    await check_committed(store, hosts)


async def test_a_damaged_claim_is_told(url: str) -> None:
    store = await tstore.open(url)
    await store.log.storage.replace(claim_key(2), b"wit\0drawn by 1")
    for tx in await transactions(store, 2):
        with pytest.raises(CommitOutcomeUnknown, match="merging-0-00000-of-00002: expected the number"):
            await tx.deliver()
    assert [state.withdrawn_by for state in await store.pending()] == [None]


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("dying", ["late", "giving up"])
async def test_either_host_may_die_at_each_step(tmp_path: Path, hosts: int, dying: str, done: bool) -> None:
    """All other hosts have delivered. The survivor, and a later process, agree on what was decided."""
    before = await tstore.open(tmp_path / "before")
    for tx in (await transactions(before, hosts))[:-1]:
        await tx.deliver()
    ends, steps, survived = [], 0, False
    while not survived:
        shutil.copytree(tmp_path / "before", tmp_path / "store")
        store = await tstore.open(tmp_path / "store")
        start = "/part-" if dying == "late" else "/merging-"
        mortal: Any = Dying(store.log.storage, steps, done=done, start=start)
        mortal = tstore.Store(mortal, store.marker, "a")
        first = (await transactions(store if dying == "late" else mortal, hosts))[0]
        last = (await transactions(mortal if dying == "late" else store, hosts))[-1]
        calls = [last.deliver(), withdraw(first)]
        results = []
        for call in calls if dying == "late" else reversed(calls):
            try:
                results.append(await call)
            except (Dead, DeadlineExceeded, CommitOutcomeUnknown) as error:
                results.append(type(error))
        survived = Dead not in results
        try:
            assert await store.finish(last.id) == 1
        except DeadlineExceeded:
            assert 1 not in results
            await check_withdrawn(store, 0, hosts)
            ends.append("withdrawn")
        else:
            await check_committed(store, hosts)
            ends.append("committed")
        shutil.rmtree(tmp_path / "store")
        steps += 1
    one, other = ("withdrawn", "committed") if dying == "late" else ("committed", "withdrawn")
    switch = ends.index(other)
    assert ends == [one] * switch + [other] * (steps - switch)
    assert switch > 1 if dying == "late" else switch == 0 + (not done)


async def test_a_checkpointer_withdraws_through_a_server_that_deletes_nothing(tmp_path: Path) -> None:
    """A host saves alone and gives up. Then all hosts, with other values, save the step again."""
    async with Server(tmp_path, access=Access({TOKEN: "write"})) as server:
        options = {"token": TOKEN}
        stores = [await tstore.open(server.url, "a", storage_options=options) for _ in range(2)]  # type: ignore[arg-type]
        jobs = [Checkpointer(store, host=h, hosts=2, attempt="a", timeout=1) for h, store in enumerate(stores)]

        async def save(host: int, step: int, value: float) -> int | str:
            rows = slice(2 * host, 2 * host + 2)
            part = Shards((4,), "f8", [((rows,), np.full(2, value))], shard_shape=(2,))
            try:
                return await (await jobs[host].save(step, part)).committed
            except DeadlineExceeded as error:
                return str(error)

        assert await asyncio.gather(save(0, 2, 2.0), save(1, 2, 2.0)) == [1, 1]
        assert "hosts [1] of 2 did not deliver" in str(await save(0, 3, 3.0))
        errors = await asyncio.gather(save(0, 3, 3.5), save(1, 3, 3.5))
        assert "host 0 of 2 gave up" in str(errors[1])
        assert await tstore.steps(stores[0]) == [2]
        assert await asyncio.gather(save(0, 4, 4.0), save(1, 4, 4.0)) == [2, 2]
        assert (await tstore.restore(stores[0])).tolist() == [4.0] * 4
        for job, store in zip(jobs, stores, strict=True):
            await job.close()
            await store.close()


async def test_a_checkpointer_returns_the_version_that_was_committed_when_it_gave_up(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host 1 delivers and commits after host 0 has looked for it the last time."""
    jobs = [Checkpointer(url, host=host, hosts=2, attempt="a", timeout=0.05) for host in range(2)]
    check = cooperative._Waiter._check_delivered

    async def save(host: int) -> int:
        rows = slice(2 * host, 2 * host + 2)
        part = Shards((4,), "f8", [((rows,), np.ones(2))], shard_shape=(2,))
        return await (await jobs[host].save(1, part)).committed

    async def check_and_commit(waiter: cooperative._Waiter, base: int) -> None:
        try:
            await check(waiter, base)
        finally:
            assert await save(1) == 1

    monkeypatch.setattr(cooperative._Waiter, "_check_delivered", check_and_commit)
    assert await save(0) == 1


async def test_a_note_says_that_a_withdrawal_failed(url: str) -> None:
    store, faults = await open_faulty(url)
    faults.fail("create", "*/merging-*", times=99)
    job = Checkpointer(store, host=0, hosts=2, attempt="a", timeout=0.01)
    with pytest.raises(DeadlineExceeded, match="did not deliver") as caught:
        await (await job.save(1, np.ones(3))).committed
    assert "late hosts may still commit the step" in "".join(caught.value.__notes__)


async def save_half(store: tstore.Store, host: int) -> int:
    rows = slice(20_000 * host, 20_000 * (host + 1))
    part = Shards((40_000,), "f8", [((rows,), np.ones(20_000))], shard_shape=(20_000,))
    return await tstore.save(store, part, 1, host=host, hosts=2, attempt="a", timeout=0.05)


@pytest.mark.parametrize("blind", [False, True], ids=["looks", "can't look"])
@pytest.mark.parametrize(
    ("operation", "key"),
    [("head", "archives/*"), ("writer", "*/pack-*"), ("folders", "*")],
)
async def test_a_host_that_fails_when_it_runs_again_does_not_deny_that_it_had_delivered(
    url: str, operation: str, key: str, blind: bool
) -> None:
    store = await tstore.open(url)
    with pytest.raises(DeadlineExceeded):
        await save_half(store, 0)
    again, faults = await open_faulty(url)
    faults.fail(operation, key, times=99)
    if blind:
        faults.fail("head", "*/part-*", times=99)
    with pytest.raises(CommitOutcomeUnknown, match="host 0 of transaction 'step/1' may have delivered") as caught:
        await save_half(again, 0)
    assert await save_half(store, 1) == await store.outcome(caught.value.transaction) == 1


@pytest.mark.parametrize(("operation", "key"), [("head", "archives/*"), ("writer", "*/pack-*"), ("folders", "*")])
async def test_a_host_that_fails_before_it_delivers_says_that_nothing_happened(
    url: str, operation: str, key: str
) -> None:
    store, faults = await open_faulty(url)
    faults.fail(operation, key, times=99)
    with pytest.raises(Unavailable):
        await save_half(store, 0)
    with pytest.raises(DeadlineExceeded):
        await save_half(await tstore.open(url), 1)


async def test_after_a_withdrawal_no_outcome_is_unknown(url: str) -> None:
    store, faults = await open_faulty(url)
    faults.postpone("create", "*/part-*")
    job = Checkpointer(store, host=0, hosts=2, attempt="a", timeout=0.05)
    with pytest.raises(
        Unavailable, match=r"step 1 is not saved: host 0 of 2 withdrew it.*save again on every host"
    ):
        await (await job.save(1, np.ones(3))).committed
    assert await faults.do_postponed() == [None]
    peer = Checkpointer(url, host=1, hosts=2, attempt="a", timeout=60)
    with pytest.raises(DeadlineExceeded, match="host 0 of 2 gave up"):
        await (await peer.save(1, np.ones(3))).committed
    assert await tstore.steps(store) == []


async def test_a_withdrawal_after_the_claim_of_a_commit_was_deleted_finds_the_commit(url: str) -> None:
    """A garbage collection deletes the claims of expired versions, perhaps while a host stands still."""
    store = await tstore.open(url)
    txs = await transactions(store, 2)
    assert await txs[0].deliver() is None
    assert await txs[1].deliver() == 1
    await store.log.storage.delete(claim_key(2))
    assert await withdraw(txs[0]) == 1
