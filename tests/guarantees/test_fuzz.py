"""A short run of the fuzzer finds nothing; with a fault in the product, it finds that."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import tstore
from tests.fuzz import __main__ as fuzz
from tests.fuzz.journal import Acknowledged, Attempt, Copying, CopyMade, Create, Delete, Replay, Write
from tests.fuzz.odd import CALLS, VALUES, odd_call
from tests.fuzz.timeline import Mismatch, Timeline
from tests.support.mutation import Edit

FOUND: dict[str, Edit] = {
    "a tag keeps nothing": Edit(
        "tstore.core.format.tree.retention:Keep.select", "not named.isdisjoint(entry.tags)", "False"
    ),
    "values of the wrong place": Edit(
        "tstore.core.array:Array.read",
        "return read.finished()",
        "return np.flip(read.finished())",
    ),
}


@pytest.mark.parametrize(
    "options",
    [
        ["--storage", "memory", "--archive-every", "4"],
        ["--storage", "memory", "--tasks", "1", "--rounds", "40", "--operations", "3"],
        ["--storage", "local"],
    ],
)
def test_a_short_run_finds_nothing(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = fuzz.main(["--seconds", "1", "--seed", "1", "--operations", "25", "--odd", "0", *options])
    told = capsys.readouterr().out
    assert code == 0, told
    assert "operations: begin" in told


def test_a_run_with_killed_processes_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--seconds",
        "1",
        "--seed",
        "2",
        "--processes",
        "2",
        "--rounds",
        "4",
        "--operations",
        "15",
        "--odd",
        "0",
    ]
    code = fuzz.main(options)
    assert code == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", FOUND)
def test_a_fault_is_detected(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    FOUND[name].apply(monkeypatch)
    assert fuzz.main(["--seconds", "100", "--seed", "8", "--tasks", "1", "--storage", "memory", "--odd", "0"]) == 1
    assert "seed 8, episode" in capsys.readouterr().out


def test_a_run_without_other_processes_is_reproducible(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for _ in range(2):
        fuzz.main(["--episode", "3", "--seed", "5", "--storage", "memory", "--rounds", "2"])
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]


async def test_the_model_names_the_difference(tmp_path: Path) -> None:
    async with await tstore.open(tmp_path / "store") as store:
        async with store.transaction("m1") as tx:
            await (await tx.create_array("a", (4,), "int64", (4,))).write(np.arange(4))
        written = Write("a", ((0, 4, 1),), (4,), "int64", 1)
        create = Create("a", (4,), (4,), "int64", False)
        timeline = Timeline()
        await timeline.learn(store, [Attempt("m1", (create, written)), Acknowledged("m1", 1, 0.0)])
        with pytest.raises(Mismatch, match="the values of a"):
            await timeline.check(store, random.Random(0), thorough=True)
        with pytest.raises(Mismatch, match="no worker began"):
            await Timeline().learn(store, [])
        with pytest.raises(Mismatch, match="was acknowledged as version 2"):
            await Timeline().learn(store, [Attempt("m1", (create,)), Acknowledged("m1", 2, 0.0)])


async def test_the_model_accepts_a_copy_that_was_killed(tmp_path: Path) -> None:
    """Its version was never reported; a reported one, and the values, must be those of the copy."""
    url, timeline = str(tmp_path / "copy"), Timeline()
    async with await tstore.open(tmp_path / "store") as store:
        for number in range(3):
            async with store.transaction(f"m{number}"):
                pass
        await timeline.learn(store, [Attempt(f"m{number}", ()) for number in range(3)])
        assert await timeline.copied(url, [Copying(url)], None) is None
        await tstore.copy(store, url)
    copy = await timeline.copied(url, [Copying(url), CopyMade(url, 1), Copying(url)], timeline.fork(1))
    assert copy is not None
    assert copy.newest == 3
    async with await tstore.open(url, "r") as copied:
        await copy.check(copied, random.Random(0), thorough=True)
        wrong = await timeline.copied(url, [Copying(url), CopyMade(url, 2)], None)
        assert wrong is not None
        with pytest.raises(Mismatch, match="the head is version 3, not 2"):
            await wrong.check(copied, random.Random(0), thorough=True)


async def test_the_model_notices_a_repair_that_voids_nothing(tmp_path: Path) -> None:
    async with await tstore.open(tmp_path / "store") as store:
        for number in range(1, 4):
            async with store.transaction(f"m{number}", tag=f"t{number}") as tx:
                await tx.create_array(f"a{number}", (4,), "int64", (4,), sparse=True)
        attempts = [
            Attempt(f"m{n}", (Create(f"a{n}", (4,), (4,), "int64", True),), (f"t{n}",)) for n in range(1, 4)
        ]
        timeline = Timeline()
        await timeline.learn(store, attempts)
        repaired = timeline.fork(3)
        repaired.void(2)
        with pytest.raises(Mismatch, match="the head is version 3, not 1"):
            await repaired.check(store, random.Random(0), thorough=True)
        await store.repair(void_intact=[2, 3])
    async with await tstore.open(tmp_path / "store") as store:
        await repaired.learn(store, [])
        await repaired.check(store, random.Random(0), thorough=True)
        await timeline.learn(store, [])
        with pytest.raises(Mismatch, match="the tags are"):
            await timeline.check(store, random.Random(0), thorough=True)


async def test_a_version_voided_after_a_copy_has_the_tree_of_the_head(tmp_path: Path) -> None:
    async with await tstore.open(tmp_path / "store") as store:
        async with store.transaction("m1") as tx:
            await tx.create_array("a", (4,), "float32", (4,), sparse=True)
        async with store.transaction("m2") as tx:
            await tx.delete("a")
        await tstore.quantize(store, "e4m3", at=1, tag="q", message="m3")
        async with store.transaction("m4"):
            pass
        timeline = Timeline()
        create = Create("a", (4,), (4,), "float32", True)
        changes = [Attempt("m1", (create,)), Attempt("m2", (Delete("a"),))]
        await timeline.learn(store, [*changes, Attempt("m3", (Replay(1),), ("q",)), Attempt("m4", ())])
        await store.repair(void_intact=[4])
        timeline.void(4)
    async with await tstore.open(tmp_path / "store") as store:
        assert [(await store.snapshot(version)).paths() for version in (2, 3, 4)] == [[], ["a"], []]
        await timeline.learn(store, [])
        await timeline.check(store, random.Random(0), thorough=True)


@pytest.mark.parametrize("seed", range(3))
async def test_no_odd_argument_bricks_a_store(seed: int) -> None:
    choice = random.Random(seed)
    faults = [(await odd_call(f"memory://odd-{seed}-{i}", choice))[1] for i in range(40)]
    assert [f for f in faults if f is not None and f.kind.startswith("bricked")] == []


def test_there_are_odd_arguments_for_every_call() -> None:
    assert len(CALLS) * len(VALUES) > 2000
