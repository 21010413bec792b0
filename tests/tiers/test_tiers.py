"""Tiers: what a job goes on from after hosts were killed, disks wiped and bytes flipped; real processes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import shutil
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore as tstore_async
import tstore.sync as tstore
from tests.support import processes
from tstore.checkpoint.checkpoint import Checkpoint
from tstore.core.copying.copy import CopyReport, copy_to
from tstore.core.store import Store
from tstore.errors import Corrupt, DeadlineExceeded, InvalidArgument, NotFound, StorageFull, Unavailable
from tstore.tiers.holders import METADATA
from tstore.tiers.local import LocalTier

HOST = """
    import json, os, sys, time
    import numpy as np
    import tstore.sync as tstore
    from tstore.sharding import Mesh, P

    folder, attempt, (host, hosts) = sys.argv[1], sys.argv[4], map(int, sys.argv[2:4])
    options = {"local": f"{folder}/local{host}", **json.loads(sys.argv[5])}
    mesh, spec = Mesh({"x": hosts}), P("x")

    def tree(step):
        w = np.arange(12 * 500.0).reshape(12, 500) + step
        return {"w": tstore.Shards.of(w, mesh, spec, host), "b": np.full(3, step), "frozen": np.arange(9.0)}

    tiers = tstore.Tiers(durable=f"{folder}/durable", address="127.0.0.1", **options)
    checkpoints = tstore.Checkpointer(tiers, host=host, hosts=hosts, attempt=attempt, timeout=60)
    target = {**tree(0), "w": tstore.Shards.wanted((12, 500), "float64", mesh, spec, host=host)}

    def restore():
        state = checkpoints.restore_latest(target)
        if state is None:
            return None
        [step] = set(state["b"].tolist())
        for (index, part), (_, expected) in zip(state["w"].parts, tree(step)["w"].parts, strict=True):
            assert np.array_equal(part, expected), step  # never a mixture
        assert step == checkpoints.latest()
        return step

    def copied(step):
        end = time.monotonic() + 60
        while not [s for s in checkpoints.tiers() if s.tier == "copy" and s.step == step]:
            assert time.monotonic() < end, checkpoints.tiers()
            time.sleep(0.02)

    for text in sys.stdin:
        order, *arguments = json.loads(text)
        result = None
        try:
            if order == "restore":
                result = restore()
            elif order == "save":
                checkpoints.save(arguments[0], tree(arguments[0])).wait()
            elif order == "copied":
                copied(arguments[0])
            elif order == "rollback":
                checkpoints.rollback(arguments[0])
            elif order == "tiers":
                result = [[s.step, s.tier, s.host] for s in checkpoints.tiers()]
            elif order == "close":
                checkpoints.close()
        except tstore.errors.TStoreError as error:
            result = type(error).__name__
        print(json.dumps(result), flush=True)
"""


class Job:
    """The processes of one start of a job, which all get the same orders."""

    def __init__(self, folder: Path, attempt: str, hosts: int, **options: Any) -> None:
        arguments = [(folder, host, hosts, attempt, json.dumps(options)) for host in range(hosts)]
        self.hosts = [processes.start(HOST, *each) for each in arguments]

    def all(self, *order: Any) -> Any:
        """Give an order to all hosts at once, and return the result that they share."""
        self.tell(*order)
        results = [json.loads(processes.line(host)) for host in self.hosts]
        assert all(result == results[0] for result in results), results
        return results[0]

    def save(self, *steps: int, copied: bool = False) -> None:
        """Save steps on all hosts, and wait until they are copied, if asked."""
        for step in steps:
            assert self.all("save", step) is None
        if copied:
            assert self.all("copied", steps[-1]) is None

    def tell(self, *order: Any) -> None:
        """Give an order to all hosts at once."""
        for host in self.hosts:
            assert host.stdin is not None
            host.stdin.write(json.dumps(order) + "\n")
            host.stdin.flush()

    def kill(self) -> None:
        """Kill all hosts."""
        for host in self.hosts:
            host.kill()
            host.communicate(timeout=processes.DEADLINE)


@contextlib.contextmanager
def job(folder: Path, attempt: str, hosts: int = 3, **options: Any) -> Iterator[Job]:
    """Start a job, and kill it at the end."""
    started = Job(folder, attempt, hosts, **options)
    try:
        yield started
    finally:
        started.kill()


def packs(folder: Path, host: int, copies: bool = False) -> list[Path]:
    """Return the packs in the local store of a host, or in the copies that it has of others, oldest first."""
    found = [p for p in folder.glob(f"local{host}/*/*/txn/*/pack-*") if ("-at-" in str(p)) == copies]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@contextlib.asynccontextmanager
async def two_hosts(folder: Path, **options: Any) -> AsyncIterator[list[tstore_async.Checkpointer]]:
    """Both hosts of a job in this process; at the end they push nothing."""
    hosts = [
        tstore_async.Checkpointer(
            tstore_async.Tiers(folder / f"local{host}", folder / "durable", address="127.0.0.1", **options),
            host=host,
            hosts=2,
            attempt="a",
            timeout=5,
        )
        for host in range(2)
    ]
    try:
        yield hosts
    finally:
        for host in hosts:
            await host.__aexit__(KeyboardInterrupt, None, None)


def test_a_job_of_one_host_goes_on_from_its_local_store(tmp_path: Path) -> None:
    tiers = tstore.Tiers(tmp_path / "local", tmp_path / "durable", every=10, durable_every=50)
    resumed = []
    for _ in range(3):
        checkpoints = tstore.Checkpointer(tiers)  # never closed, as after a crash
        state = checkpoints.restore_latest({"w": np.zeros(4)})
        resumed.append(None if state is None else state["w"][0])
        first = 1 + (checkpoints.latest() or 0)
        for step in range(first, first + 40):
            if checkpoints.should_save(step):
                checkpoints.save(step, {"w": np.full(4, float(step))})
        checkpoints.wait()
    assert resumed == [None, 40, 80]
    assert [step.step for step in checkpoints.steps()][-3:] == [100, 110, 120]
    checkpoints.close()
    durable = tstore.steps(tmp_path / "durable")
    assert durable[-1] == 120
    assert 50 in durable
    assert tstore.open(tmp_path / "durable", "r").verify().ok


def test_all_hosts_killed_and_then_fewer_go_on(tmp_path: Path) -> None:
    with job(tmp_path, "a") as first:
        assert first.all("restore") is None
        first.save(10, 20, 30)
    with job(tmp_path, "a") as again:
        assert again.all("restore") == "Inconsistent"  # each start needs another attempt
    with job(tmp_path, "b") as second:
        assert second.all("restore") == 30
        second.save(40)
        assert second.all("close") is None
    assert tstore.steps(tmp_path / "durable") == [40]
    w = tstore.restore(tmp_path / "durable", only="w")["w"]
    assert np.array_equal(w, np.arange(6000.0).reshape(12, 500) + 40)
    with job(tmp_path, "c", hosts=2, local=str(tmp_path / "local0")) as third:  # shared, and the others are gone
        assert third.all("restore") == 40  # from the durable store
        third.save(50)
    with job(tmp_path, "d", hosts=4, local=str(tmp_path / "local0")) as fourth:
        assert fourth.all("restore") == 50
    assert tstore.steps(tmp_path / "durable") == [40]


def test_a_wiped_host_is_restored_from_the_copy_on_another(tmp_path: Path) -> None:
    with job(tmp_path, "a", peers=1) as first:
        assert first.all("restore") is None
        first.save(10, 20, 30, copied=True)
    shutil.rmtree(tmp_path / "local1")
    with job(tmp_path, "b", peers=1) as second:
        assert second.all("restore") == 30
        second.save(40, 50, copied=True)
        assert second.all("restore") == 50  # all hosts agree again, while they run
    flip(packs(tmp_path, 2)[-1])
    with job(tmp_path, "c", peers=1) as third:
        assert third.all("restore") == 50  # the copy of the damaged part is whole


@pytest.mark.parametrize("damage", ["flipped", "truncated", "deleted"])
def test_a_step_that_nobody_holds_whole_is_passed_over(tmp_path: Path, damage: str) -> None:
    with job(tmp_path, "a") as first:
        first.all("restore")
        first.save(10, 20, 30)
    newest = packs(tmp_path, 1)[-1]
    match damage:
        case "flipped":
            flip(newest)
        case "truncated":
            newest.write_bytes(newest.read_bytes()[:-1])
        case _:
            newest.unlink()
    with job(tmp_path, "b") as second:
        assert second.all("restore") == 20


def test_what_a_decision_gave_up_never_comes_back(tmp_path: Path) -> None:
    with job(tmp_path, "a") as first:
        first.all("restore")
        first.save(10, 20, 30)
    shutil.move(tmp_path / "local2", tmp_path / "away")
    shutil.copytree(tmp_path / "away", tmp_path / "local2")
    flip(packs(tmp_path, 2)[-1])
    with job(tmp_path, "b") as second:
        assert second.all("restore") == 20
        second.save(21)
    shutil.rmtree(tmp_path / "local2" / "x", ignore_errors=True)
    for folder in (tmp_path / "away").glob("*/*-00002"):  # the disk of a host that slept comes back whole
        shutil.copytree(folder, tmp_path / "local2" / folder.parent.name / folder.name, dirs_exist_ok=True)
    with job(tmp_path, "c") as third:
        assert third.all("restore") == 21  # not 30, which is whole again, but was given up


def test_a_rollback_is_a_decision(tmp_path: Path) -> None:
    with job(tmp_path, "a", durable_every=10) as first:
        first.all("restore")
        first.save(10, 20, 30)
        assert first.all("rollback", 25) == "NotFound"
        assert first.all("rollback", 20) is None
        assert first.all("restore") == 20
        first.save(21)
        assert first.all("close") is None
    assert tstore.steps(tmp_path / "durable")[-1] == 21


def test_an_absent_host_is_named(tmp_path: Path) -> None:
    tiers = tstore.Tiers(tmp_path / "local", tmp_path / "durable", address="127.0.0.1")
    with (
        pytest.raises(DeadlineExceeded, match=r"hosts \[1, 2\] of 3"),
        tstore.Checkpointer(tiers, host=0, hosts=3, attempt="a", timeout=0.2) as checkpoints,
    ):
        checkpoints.restore_latest()


def test_two_jobs_share_local_storage(tmp_path: Path) -> None:
    for name in "xy":
        tiers = tstore.Tiers(tmp_path / "local", tmp_path / name)
        checkpoints = tstore.Checkpointer(tiers)
        assert checkpoints.restore_latest() is None
        checkpoints.save(1, {"w": np.full(4, ord(name))}).wait()
    for name in "xy":
        with tstore.Checkpointer(tstore.Tiers(tmp_path / "local", tmp_path / name)) as checkpoints:
            assert checkpoints.restore_latest()["w"][0] == ord(name)


def test_arguments(tmp_path: Path) -> None:
    inside = {"durable": tmp_path / "a" / "b"}
    for arguments in ({"peers": -1}, {"keep": 1}, {"every": 0}, {"local": "gs://x/y"}, inside):
        with pytest.raises(InvalidArgument):
            tstore.Tiers(**{"local": tmp_path / "a", "durable": tmp_path / "d", **arguments})
    tiers = tstore.Tiers(tmp_path / "a", tmp_path / "d", peers=2)
    with pytest.raises(InvalidArgument, match="only 1 others"):
        tstore.Checkpointer(tiers, hosts=2, attempt="a")
    with tstore.Checkpointer(tstore.Tiers(tmp_path / "a", tmp_path / "d")) as checkpoints:
        checkpoints.save(5, {"w": np.ones(3)}).wait()
        with pytest.raises(InvalidArgument, match="before step 5"):
            checkpoints.save(4, {"w": np.ones(3)})
        with pytest.raises(NotFound):
            checkpoints.restore(3)
        assert [(step.step, step.tier) for step in checkpoints.tiers()] == [(5, "local")]


def test_without_room_locally_a_job_saves_to_the_durable_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()  # no folder can be made in it
    with tstore.Checkpointer(tstore.Tiers(tmp_path / "file", tmp_path / "durable")) as checkpoints:
        checkpoints.save(1, {"w": np.ones(3)}).wait()
        assert checkpoints.restore_latest()["w"][0] == 1
    assert "can't be used" in caplog.text
    with tstore.Checkpointer(tstore.Tiers(tmp_path / "local", tmp_path / "durable")) as checkpoints:
        assert checkpoints.restore_latest()["w"][0] == 1
        checkpoints.save(2, {"w": np.full(3, 2)}).wait()

        async def full(*_: object) -> None:
            raise StorageFull("no space left")

        with monkeypatch.context() as patch:
            patch.setattr("tstore.tiers.local.LocalTier.save", full)
            checkpoints.save(3, {"w": np.full(3, 3)}).wait()
        assert "step 3 is not saved to the local store, but to the durable one" in caplog.text
        assert [checkpoints.restore(step)["w"][0] for step in (2, 3)] == [2, 3]
        assert [(step.step, step.tier) for step in checkpoints.tiers()] == [
            (1, "durable"),
            (2, "local"),
            (3, "durable"),
        ]


async def test_a_host_that_left_a_step_out_takes_part_in_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LocalTier.save

    async def full(tier: LocalTier, checkpoint: Checkpoint, *arguments: Any) -> Any:
        if checkpoint.host == 1:
            raise StorageFull("no space left")
        return await original(tier, checkpoint, *arguments)

    monkeypatch.setattr(LocalTier, "save", full)
    async with two_hosts(tmp_path) as hosts:
        for _ in range(2):
            assert await asyncio.gather(*(host.restore_latest() for host in hosts)) == [None, None]
            await asyncio.gather(*(host.save(1, {"w": np.ones(4)}) for host in hosts))


async def test_copying_goes_on_after_an_unforeseen_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: Counter[str] = Counter()
    again = threading.Semaphore(0)

    async def fails_once(source: Store, target: Any) -> CopyReport:
        tries[source.url] += 1
        if tries[source.url] == 1:
            raise ZeroDivisionError("boom")
        again.release()
        return await copy_to(source, target)

    monkeypatch.setattr("tstore.tiers.peers.copy_to", fails_once)
    async with two_hosts(tmp_path, peers=1) as hosts:
        await asyncio.gather(*(host.restore_latest() for host in hosts))
        await asyncio.gather(*(host.save(1, {"w": np.ones(4)}) for host in hosts))
        for _ in hosts:
            assert await asyncio.to_thread(again.acquire, timeout=30)
    assert "it tries again: boom" in caplog.text


def test_steps_go_to_the_durable_store_once_the_local_one_is_wiped(tmp_path: Path) -> None:
    with tstore.Checkpointer(
        tstore.Tiers(tmp_path / "local", tmp_path / "durable", durable_every=2)
    ) as checkpoints:
        checkpoints.restore_latest()
        for step in range(1, 5):
            checkpoints.save(step, {"w": np.full(4, step)}).wait()
            if step == 2:
                shutil.rmtree(tmp_path / "local")
    assert tstore.steps(tmp_path / "durable")[-1] == 4


def test_the_decided_step_is_no_longer_listed_when_newer_ones_have_superseded_it(tmp_path: Path) -> None:
    tiers = tstore.Tiers(tmp_path / "local", tmp_path / "durable")
    first = tstore.Checkpointer(tiers)
    first.save(1, {"w": np.ones(4)}).wait()
    [place] = (tmp_path / "local").glob("*/place")
    place.write_bytes(b"\xff")  # damage to it costs nothing
    with tstore.Checkpointer(tiers) as second:
        for step in range(2, 7):
            second.save(step, {"w": np.full(4, step)}).wait()
        second.save(7, {"w": np.full(4, 7)}).wait()  # after the deletion that follows the save of 4
        assert [step.step for step in second.steps()][-3:] == [5, 6, 7]


@pytest.mark.parametrize(("verb", "error"), [("collect", Unavailable), ("transaction", OSError)])
def test_what_fails_beside_or_in_a_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, error: type[Exception]
) -> None:
    original = getattr(Store, verb)

    def fails(store: Store, *args: Any, **options: Any) -> Any:
        if store.url.endswith("durable"):
            raise error("boom")
        return original(store, *args, **options)

    checkpoints = tstore.Checkpointer(tstore.Tiers(tmp_path / "local", tmp_path / "durable"), keep=2)
    checkpoints.save(1, {"w": np.ones(4)}).wait()
    monkeypatch.setattr(Store, verb, fails)
    if error is OSError:

        async def full(*_: object) -> None:
            raise StorageFull("no space left")

        monkeypatch.setattr(LocalTier, "save", full)
        save = checkpoints.save(2, {"w": np.ones(4)})
        with pytest.raises(OSError, match="boom"):
            save.wait(10)
        with pytest.raises(OSError, match="boom"):
            checkpoints.close()
    else:
        checkpoints.close()  # the step is in the durable store
        assert tstore.steps(tmp_path / "durable") == [1]


def test_a_job_goes_on_from_a_step_saved_without_tiers_whatever_its_metadata(tmp_path: Path) -> None:
    for step, value in enumerate(("gold", {"step": "x"}, 7)):
        with tstore.open(tmp_path / "durable", "a") as store:
            with store.transaction(tag=f"step/{step}", metadata={METADATA: value}) as tx:
                tx.create_array(f"w{step}", (4,), "float32").write(1)
        with tstore.Checkpointer(tstore.Tiers(tmp_path / "local", tmp_path / "durable")) as checkpoints:
            assert checkpoints.latest() == step


def test_a_job_forgets_the_steps_that_newer_ones_have_superseded(tmp_path: Path) -> None:
    first = 1_000_000  # no other test has such steps
    with tstore.Checkpointer(tstore.Tiers(tmp_path / "local", tmp_path / "durable", keep=2)) as checkpoints:
        for step in range(first, first + 9):
            checkpoints.save(step, {"w": np.ones(4)}).wait()
        checkpoints.wait()
        gc.collect()
        checkpoint_objects = [each for each in gc.get_objects() if type(each) is Checkpoint]
        known = {each.step for each in checkpoint_objects if each.step >= first}
        assert len(known) <= 3
        assert [step.step for step in checkpoints.steps()][-2:] == [first + 7, first + 8]


def test_what_the_loss_of_a_damaged_decision_costs_is_told(tmp_path: Path) -> None:
    tiers = tstore.Tiers(tmp_path / "local", tmp_path / "durable")
    with tstore.Checkpointer(tiers) as checkpoints:
        checkpoints.save(1, {"w": np.ones(4)}).wait()
    [decision] = (tmp_path / "durable" / "tiers" / "decisions").iterdir()
    flip(decision)
    told = r"does not match its checksum.* given up count again"
    with pytest.raises(Corrupt, match=told), tstore.Checkpointer(tiers) as checkpoints:
        checkpoints.latest()
    decision.unlink()
    with tstore.Checkpointer(tiers) as checkpoints:
        assert checkpoints.latest() == 1
