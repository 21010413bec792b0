"""`tstore tag` and `tstore rm`: what they change, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tstore.sync as blocking
from tests.support.commands import Call, failed


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        blocking.save(tmp_path / "store", tree(step), step, metrics={"loss": 1 / step})
    return tmp_path / "store"


def tree(step: int) -> dict[str, object]:
    return {"w": np.full((50, 60), float(step)), "b": np.full(5, step), "n": step}


def tags(store: Path) -> dict[str, int]:
    return blocking.open(store, "r").tags()


def value(store: Path, at: int | str | None = None) -> object:
    restored = blocking.restore(store, at=at)
    assert restored["w"].tolist() == [[float(restored["n"])] * 60] * 50
    return restored["n"]


def test_tags_are_set_listed_moved_and_dropped(store: Path, call: Call) -> None:
    code, out, err = call("tag", store, "best", "--step", 1)
    assert (code, out, err) == (0, "best now names version 1 (recorded as version 4)\n", "")
    assert (value(store, "best"), value(store)) == (1, 3)  # the newest step is still the default
    rows = [line.split() for line in call("tag", store)[1].splitlines()]
    named = {"step/1": 1, "best": 1, "step/2": 2, "step/3": 3}
    assert [rows[0], *rows[2:]] == [["tag", "version"], *([tag, str(v)] for tag, v in named.items())]
    failed(call("tag", store, "best"), "'best' already names version 1", "move this one with --move")
    document = json.loads(call("tag", store, "best", "-f", "--at", 2, "--json")[1])
    assert {k: document[k] for k in ("tag", "target", "version", "dropped")} == {
        "tag": "best",
        "target": 2,
        "version": 5,
        "dropped": None,
    }
    assert value(store, "best") == 2
    assert call("tag", store, "last")[1] == "last now names version 3 (recorded as version 6)\n"  # the newest step
    assert "best names 2" in call("log", store)[1]
    assert call("tag", store, "best", "-d")[1] == "best was dropped from version 2 (recorded as version 7)\n"
    failed(call("tag", store, "best", "--drop"), "no tag 'best' to drop", "last")
    listed = json.loads(call("tag", store, "--json")[1])["tags"]
    assert listed[-1] == {"tag": "last", "version": 3}
    with blocking.open(store, "r") as opened:
        assert [c.bytes_added for c in opened.history()][:4] == [0, 0, 0, 0]
        assert opened.verify().ok


def test_a_tag_keeps_its_version(store: Path, call: Call) -> None:
    assert call("tag", store, "best", "--step", 1)[0] == 0
    assert call("gc", store, "--keep-last", 1, "--keep-tag", "best")[0] == 0
    assert tags(store) == {"step/1": 1, "best": 1, "step/3": 3}
    assert (value(store, "best"), value(store)) == (1, 3)
    for second in (("--step", 2), ("--at", 2)):
        failed(call("tag", store, "first", *second), "removed by the garbage collection")
    assert call("verify", store)[0] == 0


def test_a_tag_of_a_quantized_copy_keeps_its_report(store: Path, call: Call) -> None:
    assert call("quantize", store, "--tag", "small")[0] == 0
    assert call("tag", store, "tiny", "--at", "small")[0] == 0
    out = call("report", store, "--at", "tiny", "--json")[1]
    assert json.loads(out)["source"] == 3
    assert tags(store)["tiny"] == tags(store)["small"] == 4
    assert value(store) == 3


def test_steps_are_what_save_made(store: Path, call: Call) -> None:
    before = tags(store)
    failed(call("tag", store, "step/9"), "'step/9' names a step", "'best/9'", code=2)
    failed(call("tag", store, "step/3", "--move", "--at", 1), "only save makes steps", code=2)
    failed(call("tag", store, "step/3", "--drop"), "tstore rm --step 3", code=2)
    failed(call("tag", store, "step/new"), "a number", code=2)
    failed(call("tag", store, "7"), "not a number", code=2)
    failed(call("quantize", store, "--tag", "step/9"), "names a step", code=2)
    assert tags(store) == before


def test_versions_of_transactions_are_tagged(store: Path, tmp_path: Path, call: Call) -> None:
    with blocking.open(store) as opened, opened.transaction() as tx:
        tx.array("b").write(7)
    assert call("tag", store, "edited", "--at", 4) == (
        0,
        "edited now names version 4 (recorded as version 5)\n",
        "",
    )
    assert call("tag", store, "best", "--step", 1) == (0, "best now names version 1 (recorded as version 6)\n", "")
    with blocking.open(store, "r") as opened:
        assert opened.snapshot("edited").array("b").read().tolist() == [7] * 5
        assert opened.snapshot().array("b").read().tolist() == [7] * 5
    with blocking.open(tmp_path / "arrays", "x") as opened:
        failed(call("tag", tmp_path / "arrays", "x"), "no commit to tag")
        with opened.transaction() as tx:
            tx.create_array("a", (2,), "int8").write(1)
    assert call("tag", tmp_path / "arrays", "x") == (0, "x now names version 1 (recorded as version 2)\n", "")
    assert tags(tmp_path / "arrays") == {"x": 1}


def test_a_step_is_removed_by_a_commit(store: Path, call: Call) -> None:
    out = call("rm", store, "--step", 2, "--dry-run")[1]
    assert out == f"{store}: would remove step 2 (version 2, which added 24.0 kB)\n"
    assert blocking.steps(store) == [1, 2, 3]
    code, out, err = call("rm", store, "--step", 2)
    assert (code, err) == (0, "")
    assert "removed step 2 (version 2, which added 24.0 kB), recorded as version 4\n" in out
    assert f"tstore gc {store} --keep-last 5\n" in out
    assert blocking.steps(store) == [1, 3]
    assert value(store, 2) == 2
    failed(call("rm", store, "--step", 2), "no step 2; its steps are: 1, 3")
    failed(call("rm", store, "--step", 2, "--dry-run"), "no step 2")
    document = json.loads(call("rm", store, "--step", 3, "--json")[1])
    assert {k: v for k, v in document.items() if k not in ("store", "removed")} == {"version": 5, "dry_run": False}
    [removed] = document["removed"]
    assert (removed["step"], removed["version"]) == (3, 3)
    assert value(store) == 1  # the newest step
    assert blocking.save(store, tree(2), 2) == 6
    assert call("gc", store, "--keep-last", 2)[0] == 0
    failed(call("ls", store, "--at", 3), "removed by the garbage collection")
    assert (blocking.steps(store), value(store)) == ([1, 2], 2)
    assert call("verify", store)[0] == 0


def test_all_later_steps_are_removed_by_one_commit(store: Path, call: Call) -> None:
    failed(call("rm", store, "--step", 1, "--after", 1), "exactly one of --step N and --after N", code=2)
    failed(call("rm", store, "--step", 2, "--step", 1), "exactly one of", code=2)
    failed(call("rm", store, "--after", 7), "no step 7; its steps are: 1, 2, 3")
    removed = "step 2 (version 2, which added 24.0 kB), step 3 (version 3, which added 24.0 kB)"
    assert call("rm", store, "--after", 1, "--dry-run")[1] == f"{store}: would remove {removed}\n"
    assert blocking.steps(store) == [1, 2, 3]
    assert f"{store}: removed {removed}, recorded as version 4\n" in call("rm", store, "--after", 1)[1]
    assert (blocking.steps(store), value(store), value(store, 3)) == ([1], 1, 3)
    assert call("rm", store, "--after", 1) == (0, f"{store}: there are no later steps\n", "")
    assert blocking.open(store, "r").snapshot().version == 4


def test_the_removal_of_many_steps_is_a_short_row(tmp_path: Path, call: Call) -> None:
    with blocking.Checkpointer(tmp_path / "s") as checkpoints:
        for step in range(30):
            checkpoints.save(step, {"value": step})
    outputs = [call("rm", tmp_path / "s", "--after", 0, *dry_run)[1] for dry_run in (["--dry-run"], [])]
    outputs.append(call("log", tmp_path / "s")[1])
    assert all(len(line) < 450 for out in outputs for line in out.splitlines())
    assert all("and 21 more" in out for out in outputs[:2])
    assert "step/4 dropped and 25 more" in outputs[2]
    [removal, *_] = json.loads(call("log", tmp_path / "s", "--json")[1])["commits"]
    assert removal["dropped"] == [f"step/{step}" for step in range(1, 30)]
