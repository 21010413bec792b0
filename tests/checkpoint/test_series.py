"""What becomes of the saves of a Checkpointer: reports, errors that do not stop a job, and damaged steps."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
import tstore.sync as blocking
from tests.support.thresholds import Thresholds
from tstore.core.runtime.event_loops import BACKGROUND
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.remote import as_remote
from tstore.core.storage.retry import RetryPolicy
from tstore.errors import (
    Corrupt,
    DeadlineExceeded,
    InvalidArgument,
    Misuse,
    NotFound,
    StorageFull,
    StructureMismatch,
    Unavailable,
)
from tstore.lab.conformance.faults import Faults, Gate, open_faulty
from tstore.sync import Checkpointer, Continuous, EverySteps, Keep, SaveReport

STATE = {"frozen": np.arange(90_000.0), "trained": np.zeros(10_000)}
SIZE = {name: values.nbytes for name, values in STATE.items()}


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4()}"


def release(gate: Gate) -> None:
    """Let a save in the background proceed, on whose event loop the gate is."""

    async def release_here() -> None:
        gate.release()

    BACKGROUND.run(release_here())


# ---- reports


@pytest.mark.parametrize("staging", ["memory", "turns", "reference"])
def test_each_save_is_reported_with_what_it_took_and_wrote(
    url: str, staging: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reports: list[SaveReport] = []
    with caplog.at_level(logging.INFO, "tstore.checkpoint"):
        with Checkpointer(url, staging=staging, on_saved=reports.append) as checkpoints:
            for step in (10, 20, 30):
                checkpoints.save(step, STATE | {"trained": STATE["trained"] + step}).wait()
    assert [(r.step, r.version) for r in reports] == [(10, 1), (20, 2), (30, 3)]
    assert [(r.bytes_new, r.bytes_shared) for r in reports] == [
        (sum(SIZE.values()), 0),
        (SIZE["trained"], SIZE["frozen"]),
        (SIZE["trained"], SIZE["frozen"]),
    ]
    for report in reports:
        assert 0 <= report.seconds_staged <= report.seconds_blocked <= report.seconds_committed
        assert report.retries == 0
    assert [record.getMessage() for record in caplog.records] == [f"{url}: {report}" for report in reports]
    assert dataclasses.asdict(reports[1])["bytes_shared"] == SIZE["frozen"]


class Noticed:
    """An array that tells when a save reads it."""

    shape, dtype = (3,), np.dtype("f8")

    def __init__(self) -> None:
        self.read = threading.Event()

    def __array__(self, *_: object, **__: object) -> Any:
        self.read.set()
        return np.zeros(3)


def test_the_turn_of_a_save_that_waits_counts_as_blocked(url: str) -> None:
    store, faults = asyncio.run(open_faulty(url))
    reports: list[SaveReport] = []
    values = Noticed()
    with Checkpointer(store, on_saved=reports.append) as checkpoints, futures.ThreadPoolExecutor(1) as thread:
        gate = faults.hold("create", "commits/*")
        first = checkpoints.save(1, STATE)
        second = thread.submit(checkpoints.save, 2, {"w": values})
        assert values.read.wait(60)
        called = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            first.wait(0.02)
        waited = time.monotonic() - called
        release(gate)
        second.result().wait()
    assert reports[0].seconds_committed >= waited
    assert reports[1].seconds_blocked - reports[1].seconds_staged >= waited


async def test_requests_that_are_repeated_are_counted() -> None:
    faults = Faults(MemoryStorage(uuid.uuid4().hex))
    store = await tstore.open(as_remote(faults, RetryPolicy(0.001, 0.002)))
    reports: list[SaveReport] = []
    async with tstore.Checkpointer(store, on_saved=reports.append) as checkpoints:
        for step in (1, 2):
            if step == 2:
                faults.fail("create", "txn/*", times=2)
                faults.fail("create", "commits/*")
            await checkpoints.save(step, STATE | {"trained": STATE["trained"] + step})
            await checkpoints.wait()
    assert [report.retries for report in reports] == [0, 3]
    await store.close()


def test_the_chunks_of_a_step_that_is_lost_are_not_reported_as_shared(tmp_path: Path) -> None:
    reports: list[SaveReport] = []
    with Checkpointer(tmp_path / "s", on_saved=reports.append) as checkpoints:
        checkpoints.save(1, STATE).wait()
        [pack] = (tmp_path / "s").glob("txn/*/pack-*")
        pack.unlink()
        checkpoints.save(2, STATE).wait()
    assert (reports[1].bytes_new, reports[1].bytes_shared) == (sum(SIZE.values()), 0)


def test_an_error_of_the_callback_is_told_at_the_next_call_and_costs_no_step(url: str) -> None:
    def lost(_: SaveReport) -> None:
        raise ConnectionError("the tracker is away")

    checkpoints = Checkpointer(url, keep=1, on_saved=lost)
    checkpoints.save(1, STATE).wait()
    with pytest.raises(ConnectionError, match="the tracker is away"):
        checkpoints.wait()
    checkpoints.save(2, STATE).wait()
    with pytest.raises(ConnectionError, match="the tracker is away"):
        checkpoints.close()
    assert blocking.steps(url) == [2]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_callback_that_exits_does_not_end_the_saves(url: str, error: type[BaseException]) -> None:
    def leave(_: SaveReport) -> None:
        raise error

    checkpoints = Checkpointer(url, on_saved=leave)
    checkpoints.save(1, STATE)
    with pytest.raises(Misuse, match=f"on_saved failed for step 1, which is saved: {error.__name__}"):
        checkpoints.close()
    assert blocking.steps(url) == [1]


# ---- errors that do not stop the job


@pytest.mark.parametrize("staging", ["memory", "turns", "reference"])
@pytest.mark.parametrize("error", [StorageFull, Unavailable, OSError])
def test_a_full_bucket_does_not_stop_a_job_that_only_warns(
    url: str, staging: Any, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    store, faults = asyncio.run(open_faulty(url))
    unsaved: list[list[int]] = []
    with Checkpointer(store, staging=staging, on_error="warn") as checkpoints:
        for step in range(1, 6):
            if step in (2, 3):
                faults.fail("append", error=error)
            assert checkpoints.should_save(step)
            checkpoints.save(step, STATE | {"trained": STATE["trained"] + step})
            checkpoints.wait()
            unsaved.append([*checkpoints.unsaved])
            assert all(isinstance(e, error) for e in checkpoints.unsaved.values())
        assert checkpoints.restore_latest()["trained"][0] == 5
    assert unsaved == [[], [2], [2, 3], [], []]
    assert blocking.steps(url) == [1, 4, 5]
    for step, record in zip((2, 3), caplog.records, strict=True):
        assert f"step {step} is not saved; the job goes on: {error.__name__}: " in record.getMessage()


def test_closing_tells_which_steps_are_not_saved(url: str) -> None:
    store, faults = asyncio.run(open_faulty(url))
    checkpoints = Checkpointer(store, on_error="warn")
    checkpoints.save(1, STATE)
    checkpoints.wait()
    faults.fail("create", "commits/*", times=100, error=StorageFull)
    for step in (2, 3):
        save = checkpoints.save(step, {"w": np.full(9, step)})
        with pytest.raises(StorageFull):
            save.wait()  # who asks is told
    assert checkpoints.latest() == 1
    assert checkpoints.should_save(3)  # it is due again
    with pytest.raises(Unavailable, match="step 2, 3 is not saved, nor any after it: StorageFull: "):
        checkpoints.close()
    checkpoints.close()
    assert blocking.steps(url) == [1]


def test_a_rollback_gives_up_the_later_steps_that_are_not_saved(url: str) -> None:
    store, faults = asyncio.run(open_faulty(url))
    with Checkpointer(store, on_error="warn") as checkpoints:
        checkpoints.save(1, STATE)
        checkpoints.wait()
        faults.fail("create", "commits/*", times=100, error=StorageFull)
        checkpoints.save(9, STATE)
        checkpoints.wait()
        faults.clear_rules()
        checkpoints.rollback(1)
        checkpoints.save(5, STATE)
        checkpoints.wait()
        assert checkpoints.unsaved == {}


def test_a_collection_or_callback_that_fails_does_not_stop_a_job_that_only_warns(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(_: SaveReport) -> None:
        raise ConnectionError("the tracker is away")

    store, faults = asyncio.run(open_faulty(url))
    with Checkpointer(store, keep=1, on_error="warn", on_saved=lost) as checkpoints:
        checkpoints.save(1, STATE)
        checkpoints.wait()
        faults.fail("create", "commits/*", nth=2, times=9, error=StorageFull)  # of the collection
        checkpoints.save(2, STATE)
        checkpoints.wait()
        assert checkpoints.unsaved == {}
    messages = [record.getMessage() for record in caplog.records]
    assert ["on_saved failed for step 1" in messages[0], "on_saved failed for step 2" in messages[1]] == [True] * 2
    assert messages[2].startswith("the garbage collection after version 2 failed: StorageFull: ")


def test_a_wrong_call_is_an_error_also_for_a_job_that_only_warns(url: str) -> None:
    store, faults = asyncio.run(open_faulty(url))
    with Checkpointer(store, on_error="warn", in_flight="refuse") as checkpoints:
        gate = faults.hold("create", "commits/*")
        checkpoints.save(5, STATE)
        with pytest.raises(Misuse, match="a save is under way"):
            checkpoints.save(6, STATE)
        release(gate)
        checkpoints.wait()
        with pytest.raises(InvalidArgument, match="step 4 comes before step 5"):
            checkpoints.save(4, STATE)
        with pytest.raises(InvalidArgument, match="expected"):
            checkpoints.save(7, {"w": object()})
    with pytest.raises(InvalidArgument, match="on_error='ignore': expected 'raise' or 'warn'"):
        Checkpointer(url, on_error="ignore")  # type: ignore[arg-type]


# ---- the next save when the last is done


def test_a_continuous_job_saves_when_the_last_save_is_done(url: str) -> None:
    store, faults = asyncio.run(open_faulty(url))
    with Checkpointer(store, every=EverySteps(2) & Continuous()) as checkpoints:
        assert [step for step in range(4) if checkpoints.should_save(step)] == [0, 2]
        gate = faults.hold("create", "commits/*")
        save = checkpoints.save(2, STATE)
        assert not any(checkpoints.should_save(step) for step in range(3, 9))
        release(gate)
        save.wait()
        assert [step for step in range(9, 13) if checkpoints.should_save(step)] == [10, 12]
        faults.fail("append")
        with pytest.raises(Unavailable):
            checkpoints.save(12, {"w": np.arange(9000)}).wait()
        assert checkpoints.should_save(12)  # the last save is done, and has failed


def test_hosts_agree_whether_any_of_them_is_still_saving(url: str) -> None:
    with pytest.raises(InvalidArgument, match="agree="):
        Checkpointer(url, every=Continuous(), hosts=2, attempt="a")
    asked, other_is_busy = [], [True, False]

    def agree(busy: bool) -> bool:
        asked.append(busy)
        return busy or other_is_busy[len(asked) - 1]

    with Checkpointer(url, every=Continuous(), hosts=2, attempt="a", agree=agree) as checkpoints:
        assert [checkpoints.should_save(step) for step in (1, 2)] == [False, True]
    assert asked == [False, False]


# ---- damaged steps

Damage = Callable[[Path], None]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lose(path: Path) -> None:
    path.unlink()


def saved(url: Path, steps: range) -> dict[int, list[Path]]:
    """Save steps, none of which shares data with another; return the new objects of each below txn/."""
    objects: dict[int, list[Path]] = {}
    with Checkpointer(url) as checkpoints:
        for step in steps:
            before = set(url.glob("txn/*/*"))
            checkpoints.save(step, {f"w{n}": np.full(3000, step + n) for n in range(40)} | {"step": step})
            checkpoints.wait()
            objects[step] = sorted(set(url.glob("txn/*/*")) - before)
    return objects


@pytest.mark.parametrize("damage", [flip, lose])
@pytest.mark.parametrize("kind", ["pack-", "manifest-"])
def test_a_job_falls_back_over_damaged_steps_and_goes_on(
    tmp_path: Path, damage: Damage, kind: str, thresholds: Thresholds, caplog: pytest.LogCaptureFixture
) -> None:
    thresholds(INLINE_MANIFEST_BYTES=100)
    url = tmp_path / "s"
    objects = saved(url, range(1, 5))
    for step, prefix in ((3, kind), (4, "pack-")):
        damage(next(path for path in objects[step] if path.name.startswith(prefix)))
    with Checkpointer(url, keep=Keep(last=2)) as checkpoints:
        with pytest.raises(Corrupt, match=r"step 4, the newest.*call rollback\(3\)"):
            checkpoints.restore_latest()
        restored = checkpoints.restore_latest(fallback=True)
        assert (restored["step"], restored["w7"][0]) == (2, 9)
        assert checkpoints.latest() == 2
        assert [s.step for s in checkpoints.steps()] == [1, 2]
        checkpoints.save(3, {"w7": np.ones(3000)})
    assert blocking.steps(url) == [2, 3]
    assert [record.getMessage().split(":")[1] for record in caplog.records] == [
        " step 4 is damaged, so step 3 is tried",
        " step 3 is damaged, so step 2 is tried",
    ]
    with blocking.open(url) as store:
        assert store.verify().ok


def test_nothing_is_left_to_fall_back_to(tmp_path: Path) -> None:
    url = tmp_path / "s"
    with Checkpointer(url) as checkpoints:
        assert checkpoints.restore_latest(fallback=True) is None
    for paths in saved(url, range(2)).values():
        flip(paths[0])
    with Checkpointer(url) as checkpoints:
        with pytest.raises(Corrupt, match=r"step 0: .*no step is left to fall back to"):
            checkpoints.restore_latest(fallback=True)
    assert blocking.steps(url) == [0, 1]


def test_only_damage_makes_a_job_fall_back(tmp_path: Path) -> None:
    url = tmp_path / "s"
    saved(url, range(2))
    with Checkpointer(url) as checkpoints:
        with pytest.raises(StructureMismatch, match="renamed"):
            checkpoints.restore_latest({"renamed": np.zeros(3000)}, fallback=True)
        with pytest.raises(NotFound, match="no array matches"):
            checkpoints.restore_latest(only="renamed", fallback=True)
        assert checkpoints.latest() == 1


def test_a_step_that_is_mapped_is_verified_before_it_counts_as_undamaged(tmp_path: Path) -> None:
    objects = saved(tmp_path / "s", range(1, 3))
    flip(next(path for path in objects[2] if path.name.startswith("pack-")))
    with Checkpointer(tmp_path / "s") as checkpoints:
        mapped = checkpoints.restore_latest(fallback=True, map=True)
        assert not mapped.copied
        assert (mapped["w0"][0], checkpoints.latest()) == (1, 1)


def test_a_fallback_does_not_keep_values_of_the_damaged_step(tmp_path: Path) -> None:
    objects = saved(tmp_path / "s", range(1, 3))
    flip(next(path for path in objects[2] if path.name.startswith("pack-")))
    with Checkpointer(tmp_path / "s") as checkpoints:
        with pytest.raises(InvalidArgument, match=r"missing='keep': .* could keep values of the damaged one"):
            checkpoints.restore_latest(fallback=True, missing="keep")
        assert checkpoints.latest() == 2


def test_hosts_fall_back_together_if_one_of_them_finds_damage(tmp_path: Path) -> None:
    url = tmp_path / "s"
    objects = saved(url, range(1, 4))
    flip(next(path for path in objects[3] if path.name.startswith("pack-")))
    meeting, said = threading.Barrier(2), [False, False]

    def restored(host: int) -> Any:
        def agree(decision: bool) -> bool:
            said[host] = decision
            meeting.wait(60)
            decided = any(said)
            meeting.wait(60)
            return decided

        job = Checkpointer(url, host=host, hosts=2, attempt="a", agree=agree, timeout=60)
        with job:
            # only the first reads what is damaged
            return job.restore_latest(only="w*" if host == 0 else "step", fallback=True), job.latest()

    with futures.ThreadPoolExecutor(2) as hosts:
        (first, newest), (second, other_newest) = hosts.map(restored, range(2))
    assert (first["w0"][0], second["step"], newest, other_newest) == (2, 2, 2, 2)
    with Checkpointer(url, host=0, hosts=2, attempt="a") as alone:
        with pytest.raises(
            InvalidArgument, match="fallback=True: 2 hosts could restore different steps; pass agree"
        ):
            alone.restore_latest(fallback=True)
