"""`tstore show`, and the patterns and steps that it shares with other commands."""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import tstore.sync as blocking
from tests.support.commands import Call, failed
from tests.support.counted_reads import count_reads
from tests.support.thresholds import Thresholds
from tstore.cli.results import Tree
from tstore.cli.tree import show_tree
from tstore.core.format.patterns import compile_patterns
from tstore.core.maintenance.contents import DetailedArray, DetailedListing, DetailedTotal


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store with steps 1 and 2, in which the layers are the same."""
    random = np.random.default_rng(0)
    layers = [{"w": random.standard_normal((64, 64)), "b": np.full(500, float(i))} for i in range(11)]
    for step in (1, 2):
        params = {"layers": layers, "head": {"kernel": np.full((40, 50), step, np.float32)}}
        blocking.save(tmp_path / "store", {"params": params, "step": step, "lr": 0.5}, step)
    return tmp_path / "store"


def cells(out: str) -> list[list[str]]:
    """Return the cells of the rows of a table, without empty ones and the indentation."""
    rows = [line.split("  ") for line in out.splitlines()[2:-1]]
    return [[cell.strip() for cell in row if cell.strip()] for row in rows]


def test_scalars_beside_arrays_that_were_added_later(store: Path, call: Call) -> None:
    with blocking.open(store) as opened, opened.transaction() as tx:
        tx.create_array("ema/w", (2,), "float32").write(0.0)
    rows = cells(call("show", store)[1])
    assert [row for row in rows if row[0] in ("lr", "step")] == [["lr", "float", "0.5"], ["step", "int", "2"]]


def test_the_tree_of_a_version(store: Path, call: Call) -> None:
    code, out, err = call("show", store)
    assert (code, err) == (0, "")
    head, *_, total = out.splitlines()
    assert head.split() == ["path", "dtype", "shape", "chunks", "codec", "values", "stored", "shared"]
    rows = cells(out)
    assert rows[:2] == [["lr", "float", "0.5"], [*["params/", "float32, float64", "23 arrays"], *rows[1][3:]]]
    assert rows[2] == ["head/kernel", "float32", "40×50", "1 of 40×50", "bytes", "8.0 kB", "8.0 kB"]
    assert rows[3] == ["layers/", "float64", "22 arrays", "bytes", "404.4 kB", "404.4 kB", "all"]
    assert [row[0] for row in rows if row[0].rstrip("/").isdigit()] == [f"{i}/" for i in range(11)]
    assert rows[-1] == ["step", "int", "2"]
    assert "\n      b " in out  # at the fourth level
    assert total.startswith(
        "version 2 (step/2): 23 arrays, 412.4 kB of values, 412.4 kB stored, 404.4 kB of it shared"
    )
    document = json.loads(call("show", store, "--json", "--step", 1)[1])
    assert document["scalars"][0] == {"path": "step", "dtype": "int", "value": "1"}
    assert (document["version"], document["total"]["shared_bytes"], len(document["arrays"])) == (1, 0, 23)
    assert document["arrays"][0] == {
        "path": "params/head/kernel",
        "dtype": "float32",
        "shape": [40, 50],
        "chunks": [40, 50],
        "codec": "bytes",
        "stored_bytes": 8000,
        "bits_per_value": 32.0,
        "chunk_count": 1,
        "value_bytes": 8000,
        "shared_bytes": 0,
    }


def test_levels(store: Path, call: Call) -> None:
    out = call("show", store, "--depth", 2)[1]
    assert [row[0] for row in cells(out)[:-1]] == ["lr", "params/", "head/kernel", "layers/", "step"]
    assert (
        out.splitlines()[-2] == "(groups of level 2 are summarized; pass a PATH, a pattern, or --depth 3 for more)"
    )
    out = call("show", store, "params/layers/10", "--depth", 1)[1]  # a group alone in others is of the first level
    assert [row[0] for row in cells(out)[:-1]] == ["params/layers/10/"]
    assert [row[0] for row in cells(call("show", store, "params/layers/10/w")[1])] == ["params/layers/10/w"]


@pytest.mark.parametrize("path", ["schedule", "schedule/", "schedule/last_lr", "schedule/last_lr/0", "sch*/**"])
def test_scalars_are_selected_as_arrays_are(tmp_path: Path, call: Call, path: str) -> None:
    tree = {"w": np.ones(3), "schedule": {"last_lr": [0.25]}, "step": 1}
    blocking.save(tmp_path / "store", tree, 1)
    code, out, _ = call("show", tmp_path / "store", path)
    assert (code, cells(out)) == (0, [["schedule/last_lr/0", "float", "0.25"]])


@pytest.fixture
def many(tmp_path: Path, thresholds: Thresholds) -> Path:
    """Return a store with 3,000 arrays and as many scalars in 300 groups, whose metadata is in short pages."""
    thresholds(PAGE_BYTES=4000, SHORT_MANIFEST=4000)
    tree = {f"g{g:03}": {f"a{a}": np.full(4, a) for a in range(10)} | {"lr": g / 2} for g in range(300)}
    blocking.save(tmp_path / "many", tree, 1)
    return tmp_path / "many"


@pytest.mark.parametrize(
    "path", ["g123", "/g123/", "g123/a7", "g123/lr", "g12?/lr", "g123/*", "g12*/**", "*23/a1"]
)
def test_a_part_is_shown_as_the_whole_is(many: Path, call: Call, path: str) -> None:
    whole, part = (json.loads(call("show", many, *args, "--json")[1]) for args in ((), (path,)))
    matches = compile_patterns(path if set(path) & {"*", "?"} else f"{path.strip('/')}/**")
    for key in ("arrays", "scalars"):
        assert part[key] == [item for item in whole[key] if matches(item["path"])]
    assert part["arrays"] or part["scalars"]


@pytest.mark.parametrize("path", ["g123", "g12?/a7", "g123/lr"])
def test_a_part_costs_what_the_part_costs(
    many: Path, call: Call, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    structure = 130_000  # of the whole tree; it is an attribute of the root group
    sizes = count_reads(monkeypatch)
    assert call("show", many, path)[0] == 0
    assert sum(sizes) < structure + 5 * 4000
    sizes.clear()
    assert call("show", many)[0] == 0
    assert sum(sizes) > structure + 200_000


def test_a_part_of_what_no_save_wrote_costs_what_the_part_costs(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds
) -> None:
    thresholds(PAGE_BYTES=4000, SHORT_MANIFEST=4000)
    with blocking.open(tmp_path / "store") as opened, opened.transaction() as tx:
        for number in range(1000):
            tx.create_array(f"n{number:03}", (4,), "int64").write(number)
    for command, path, count in (("ls", "n12*", 10), ("show", "n12*", 10), ("show", "n123", 1)):
        sizes = count_reads(monkeypatch)
        assert len(json.loads(call(command, tmp_path / "store", path, "--json")[1])["arrays"]) == count
        assert sum(sizes) < 20_000
        monkeypatch.undo()
        thresholds(PAGE_BYTES=4000, SHORT_MANIFEST=4000)


def test_patterns(store: Path, tmp_path: Path, call: Call) -> None:
    for command in ("ls", "show"):
        document = json.loads(call(command, store, "params/**/w", "--json")[1])
        assert [a["path"] for a in document["arrays"]] == sorted(f"params/layers/{i}/w" for i in range(11))
        assert document["total"]["arrays"] == 11
        failed(call(command, store, "params/*"), "pass 'params/*/**'")
        failed(call(command, store, "nothing/*"), "no array or group 'nothing/*'", "top-level paths are: params")
    failed(call("ls", store, "lr"), "no array or group 'lr'; its top-level paths are: params")
    failed(call("show", store, "rl"), "no array or group 'rl'; its top-level paths are: params, step, lr")
    blocking.save(tmp_path / "odd", {"w*": {"a": np.ones(3)}, "w2": np.ones(3)}, 1)
    document = json.loads(call("ls", tmp_path / "odd", "w*", "--json")[1])
    assert [a["path"] for a in document["arrays"]] == ["w2"]
    with blocking.open(tmp_path / "odd").transaction() as tx:
        tx.create_array("w?", (2,), "int8").write(1)
    document = json.loads(call("ls", tmp_path / "odd", "w?", "--json")[1])
    assert [a["path"] for a in document["arrays"]] == ["w?"]  # the path itself comes before the pattern


def test_a_step_in_place_of_a_version(store: Path, tmp_path: Path, call: Call) -> None:
    failed(call("ls", store, "--step", 7), "no step 7; its steps are: 1, 2")
    failed(call("ls", store, "--at", "step/7"), "no step 7")
    assert "version 1 (step/1)" in call("ls", store, "--step", 1)[1]
    assert json.loads(call("copy", store, tmp_path / "copy", "--step", 1, "--json")[1])["at"] == "step/1"
    document = json.loads(call("quantize", store, "--step", 1, "--format", "e4m3", "--json")[1])
    assert (document["source"], document["tag"]) == (1, "step/1/e4m3")
    failed(call("report", store, "--step", 1), "has no report")
    [row] = cells(call("show", store, "params/head", "--at", "step/1/e4m3")[1])
    assert row[-3].startswith("e4m3")
    assert row[-2:] == ["8.0 kB", "2.0 kB"]


def test_the_number_of_a_step_is_not_that_of_a_version(tmp_path: Path, call: Call) -> None:
    blocking.save(tmp_path / "s", {"w": np.ones(2)}, 100)
    hint = "no version 100; its newest is 1; to select step 100, pass 'step/100'"
    failed(call("show", tmp_path / "s", "--at", 100), hint)
    failed(call("diff", tmp_path / "s", 100, 1), hint)
    failed(call("show", tmp_path / "s", "--at", 99), "no version 99; its newest is 1")


def tree_of(paths: list[str], depth: int | None) -> Tree:
    arrays = [DetailedArray(path, "int32", (), (), "bytes", 4, 32.0, 1, 4, 0) for path in paths]
    total = DetailedTotal(len(paths), len(paths), 4 * len(paths), 32.0, 4 * len(paths), 0)
    return Tree("store", depth, DetailedListing(1, [], arrays, total), [])


@pytest.mark.parametrize(
    ("paths", "last"),
    [
        ([f"{i}/{name}/kernel" for i in range(3_333) for name in "abc"], "(3,233 more rows; pass"),
        ([f"blocks/{i}/{name}" for i in range(3_333) for name in "abc"], "(groups of level 1 are summarized"),
        ([f"blocks.{i}.w" for i in range(10_000)], "(9,900 more rows; pass a PATH"),
        (["a", "/".join("b" * 200), "/".join("b" * 100) + "/c"], None),
    ],
)
def test_ten_thousand_leaves_are_readable(
    paths: list[str], last: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    show_tree(tree_of(paths, None))
    lines = capsys.readouterr().out.splitlines()
    assert 4 <= len(lines) <= 105
    if last is not None:
        assert lines[-2].startswith(last)


def test_numbers_of_any_length_are_sorted(tmp_path: Path, call: Call) -> None:
    paths = ["9" * 4000, "10" * 2000, "layers/010", "layers/2", "0"]
    with blocking.open(tmp_path / "store") as opened, opened.transaction() as tx:
        for path in paths:
            tx.create_array(path, (2,), "int32").write(1)
    shown = [row[0] for row in cells(call("show", tmp_path / "store")[1])]
    assert shown == ["0", paths[1], paths[0], "layers/", "2", "010"]


def test_long_paths_take_no_more_memory_than_their_text(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [f"{i}/" + "/".join(["n" * 200] * 100) + f"/{name}" for i in range(10) for name in "ab"]
    tree = tree_of(paths, 1)
    tracemalloc.start()
    show_tree(tree)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert len(capsys.readouterr().out.splitlines()) == 14


def test_the_tree_fits_a_narrow_terminal(store: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    out = call("show", store)[1]
    table, _, rest = out.partition("(not shown")
    assert max(map(len, table.splitlines())) <= 60
    assert rest.startswith(" in 60 columns: dtype, chunks, ")


def test_an_empty_store_and_one_without_a_saved_tree(tmp_path: Path, call: Call) -> None:
    with blocking.open(tmp_path / "store", "x") as opened:
        assert call("show", tmp_path / "store")[1] == "version 0: 0 arrays, 0 B of values, 0 B stored\n"
        for _ in range(2):
            with opened.transaction() as tx:
                name = f"g/{len(tx.paths())}"
                tx.create_array(name, (3000,), "int32").write(1)
    assert [row[0] for row in cells(call("show", tmp_path / "store")[1])] == ["g/", "0", "1"]
    assert cells(call("show", tmp_path / "store")[1])[0][-1] == "12.0 kB"  # the first commit wrote g/0
