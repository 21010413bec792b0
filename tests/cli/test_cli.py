"""The command line: its output, its exit statuses, and errors of one sentence."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import exmy
import numpy as np
import pytest
import safetensors.numpy

import tstore
import tstore.sync as blocking
from tests.support import ports, processes
from tests.support.commands import Call, failed
from tests.support.processes import run_tstore, start_tstore
from tests.support.weights import real_weights, write_file
from tstore.cli import commands, main, reading
from tstore.cli.text import abbreviate, escape, format_ranges, format_size, wrap
from tstore.core.format.plain_text import pluralize
from tstore.errors import NotFound
from tstore.quantization.report import plot_report

MAIN = """
import sys
from tstore.cli import main
sys.exit(main())
"""

ROOTLESS = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
for capability in (0, 1, 2, 3):  # those by which root passes over permissions
    if libc.prctl(24, capability, 0, 0, 0) and os.getuid() == 0:
        sys.exit("can't drop capabilities")
header, sets = struct.pack("<Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
assert libc.capget(header, sets) == 0
words = [word & ~15 for word in struct.unpack("<6I", sets.raw)]
assert libc.capset(header, struct.pack("<6I", *words)) == 0
"""

LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"

ASCII = "import sys; sys.stdout.reconfigure(encoding='ascii')\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    values = np.random.default_rng(0).standard_normal((64, 100)).astype(np.float32)
    tensors = {"layer.w": values, "layer.b": values[0], "ids": np.arange(2000)}
    safetensors.numpy.save_file(tensors, tmp_path / "in.safetensors", {"who": "me"})
    return tmp_path / "in.safetensors"


@pytest.fixture
def store(tmp_path: Path, file: Path, call: Call) -> Path:
    assert call("import", file, tmp_path / "store", "--step", 4)[0] == 0
    return tmp_path / "store"


def prepared(preparation: str, *arguments: object) -> tuple[int, str, str]:
    """Run the command in a process that has prepared itself, and return its exit status and output."""
    process = processes.start(preparation + MAIN, *arguments)
    with processes.running(process):
        out, err = process.communicate(timeout=processes.DEADLINE)
    return process.returncode, out, err


def rootless(*arguments: object) -> tuple[int, str, str]:
    return prepared(ROOTLESS, *arguments)


# ---- the commands


def test_version_and_help(call: Call) -> None:
    assert call("--version") == (0, f"tstore {tstore.__version__}\n", "")
    code, out, _ = call("--help")
    assert code == 0
    commands = ("demo", "import", "export", "log", "ls", "quantize", "report", "verify")
    assert all(f"\n  {name} " in out for name in commands)
    for name in commands:
        code, out, err = call(name, "--help")
        assert (code, err) == (0, "")
        assert "--json" in out


def test_the_console_script_runs(store: Path) -> None:
    entry = Path(sys.executable).parent / "tstore"
    process = subprocess.run([entry, "verify", store], capture_output=True, text=True, timeout=250, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    assert "is intact" in process.stdout


def test_import(file: Path, tmp_path: Path, call: Call) -> None:
    code, out, err = call("import", file, tmp_path / "a", "--step", 4)
    assert (code, err) == (0, "")
    assert out == f"{tmp_path / 'a'}: imported 3 tensors, 42.0 kB from a safetensors file, as version 1 (step/4)\n"
    code, out, err = call("import", file, tmp_path / "b", "--step", 0, "--codec", "e4m3", "--json")
    assert (code, err) == (0, "")
    counts = {"kind": "a safetensors file", "tensors": 3, "bytes": 42000}
    expected = {"store": str(tmp_path / "b"), "version": 1, "tag": "step/0", "left_out": [], **counts}
    assert json.loads(out) == expected
    snapshot = blocking.open(tmp_path / "b", "r").snapshot()
    assert snapshot.array("layer.w").codecs[0]["configuration"]["format"] == "e4m3"
    assert snapshot.array("ids").codecs[0]["name"] == "bytes"


def test_export(file: Path, store: Path, tmp_path: Path, call: Call) -> None:
    code, out, err = call("export", store, tmp_path / "a.safetensors")
    assert (code, err) == (0, "")
    assert out == f"{tmp_path / 'a.safetensors'}: exported 3 tensors, 42.0 kB, of version 1\n"
    assert (tmp_path / "a.safetensors").read_bytes() == file.read_bytes()
    for which in (["--at", 1], ["--at", "step/4"], ["--step", 4]):
        code, out, err = call("export", store, tmp_path / "b.safetensors", *which, "--json")
        assert (code, err) == (0, "")
        assert json.loads(out)["version"] == 1
        assert (tmp_path / "b.safetensors").read_bytes() == file.read_bytes()
        (tmp_path / "b.safetensors").unlink()


def test_export_says_what_it_leaves_out(tmp_path: Path, call: Call) -> None:
    blocking.save(tmp_path / "store", {"x": np.zeros(3), "epoch": 3, "name": "run"}, 0)
    code, out, _ = call("export", tmp_path / "store", tmp_path / "out.safetensors")
    assert code == 0
    assert out.splitlines()[1] == "not exported: epoch, name"


def test_log(store: Path, call: Call) -> None:
    call("quantize", store, "--format", "e3m2", "--tag", "small")
    code, out, err = call("log", store)
    assert (code, err) == (0, "")
    head, _, newest, oldest = out.splitlines()
    assert head.split() == ["version", "tag", "time", "added", "message"]
    assert newest.split()[:5] == ["2", "small", "(copy", "of", "1)"]
    assert newest.endswith("quantized from version 1: e3m2")
    assert oldest.split()[:2] == ["1", "step/4"]
    assert oldest.endswith("imported from in.safetensors")
    code, out, err = call("log", store, "--json")
    assert (code, err) == (0, "")
    commits = json.loads(out)["commits"]
    assert [(c["version"], c["tag"], c["bytes_added"]) for c in commits][1] == (1, "step/4", 42000)
    assert commits[1]["metadata"] == {"step": 4}


def test_log_shows_the_first_line_of_a_message(tmp_path: Path, call: Call) -> None:
    messages = ["\n" * 60000, "\nthe subject\n\n" + "a line\n" * 1000, "word " * 1000, "x" * 5000, "as it is"]
    store = blocking.open(tmp_path / "s", "a")
    for number, message in enumerate(messages):
        with store.transaction(message=message, tag=f"t{number}"):
            pass
    out = call("log", tmp_path / "s")[1]
    assert len(out) < 1000
    shown = [line.partition(" B ")[2].strip() for line in out.splitlines()[2:]]
    assert shown == ["as it is", "x" * 100 + "…", ("word " * 20).rstrip() + "…", "the subject…", ""]
    assert [c["message"] for c in json.loads(call("log", tmp_path / "s", "--json")[1])["commits"]] == messages[
        ::-1
    ]


def test_log_lists_as_many_commits_as_asked_for(tmp_path: Path, call: Call) -> None:
    store = blocking.open(tmp_path / "s", "a")
    for _ in range(52):
        with store.transaction() as tx:
            tx.create_group(f"g{store.snapshot().version}")

    def versions(*options: str) -> list[int]:
        return [c["version"] for c in json.loads(call("log", tmp_path / "s", "--json", *options)[1])["commits"]]

    assert versions() == list(range(52, 2, -1))
    assert versions("--limit", "3") == [52, 51, 50]
    assert versions("--all") == versions("--limit", "52") == list(range(52, 0, -1))
    assert "There are older commits" in call("log", tmp_path / "s", "--limit", "51")[1]
    assert "older" not in call("log", tmp_path / "s", "--limit", "52")[1]
    assert call("log", tmp_path / "s", "--limit", "0")[0] == 2


def test_ls(store: Path, call: Call) -> None:
    code, out, err = call("ls", store)
    assert (code, err) == (0, "")
    head, _, *rows, total = out.splitlines()
    assert head.split() == ["path", "dtype", "shape", "chunks", "codec", "stored", "bits/value"]
    assert [row.split()[0] for row in rows] == ["ids", "layer.b", "layer.w"]
    assert rows[2].split() == ["layer.w", "float32", "64×100", "64×100", "bytes", "25.6", "kB", "32.00"]
    assert total.startswith("version 1 (step/4): 3 arrays, 8,500 values, 42.0 kB stored, 39.5")
    code, out, err = call("ls", store, "layer.w", "--json")
    assert (code, err) == (0, "")
    [row] = json.loads(out)["arrays"]
    assert (row["shape"], row["stored_bytes"], row["bits_per_value"]) == ([64, 100], 25600, 32)


def test_ls_of_a_group_and_of_versions(tmp_path: Path, call: Call) -> None:
    store = tmp_path / "store"
    blocking.save(store, {"params": {"a": np.zeros(2000), "b": np.zeros((), np.int32)}, "params2": np.zeros(3)}, 0)
    blocking.save(store, {"other": np.zeros(3)}, 1)
    assert [a["path"] for a in json.loads(call("ls", store, "--json")[1])["arrays"]] == ["other"]
    for at in ("1", "step/0"):
        out = call("ls", store, "params/", "--at", at, "--json")[1]
        assert [a["path"] for a in json.loads(out)["arrays"]] == ["params/a", "params/b"]
    assert "scalar" in call("ls", store, "--at", 1)[1]
    blocking.open(tmp_path / "empty", "x")
    code, out, _ = call("ls", tmp_path / "empty")
    assert (code, out) == (0, "version 0: 0 arrays, 0 values, 0 B stored\n")


def test_transactions_under_way_and_their_takeover(tmp_path: Path, call: Call) -> None:
    url = tmp_path / "s"
    with blocking.open(url) as store:
        for host, hosts, attempt in [(0, 3, "early"), (0, 1, "whole")]:
            tx = store.transaction(name="up/date", host=host, hosts=hosts, attempt=attempt)
            tx.create_array("w", (2,), "int8").write(1)
            if hosts > 1:
                with pytest.raises(tstore.errors.DeadlineExceeded):
                    tx.commit(timeout=0.05)
            else:
                tx.commit()
    code, out, _ = call("ls", url, "--pending")
    assert code == 0
    assert "1 of 3" in out
    assert "1, 2" in out
    assert "never" not in out  # the host that has delivered and ended has no heartbeat any more
    code, out, _ = call("ls", url, "--pending", "--json")
    [pending] = json.loads(out)["pending"]
    assert (pending["name"], pending["delivered"], pending["absent"]) == ("up-date", [0], [1, 2])
    failed(call("finish", url, pending["transaction"]), "[1, 2]", f"transaction '{pending['transaction']}' cannot")
    failed(call("finish", url, "up/date"), "[1, 2]", "transaction 'up/date' cannot be committed")
    failed(call("finish", url, "other"), "other", pending["transaction"])
    failed(call("finish", tmp_path / "none", "x"), "none")
    code, out, _ = call("finish", url, whole_id(url), "--json")
    assert (code, json.loads(out)["version"]) == (0, 1)
    assert "version 1" in call("finish", url, whole_id(url))[1]
    failed(call("ls", url, "w", "--pending"), "--pending", code=2)


def test_a_withdrawn_transaction_is_listed_as_such(tmp_path: Path, call: Call) -> None:
    url = tmp_path / "s"
    hosts = [blocking.Checkpointer(url, host=host, hosts=2, attempt="a", timeout=0.05) for host in range(2)]
    for host, reason in ((1, "did not deliver"), (0, "host 1 of 2 gave up")):
        with pytest.raises(tstore.errors.DeadlineExceeded, match=reason):
            hosts[host].save(7, {"w": np.ones(2)}).wait()
    code, out, _ = call("ls", url, "--pending")
    assert code == 0
    assert "2 of 2" in out
    assert "withdrawn by host 1" in out
    assert "tstore finish" not in out
    [pending] = json.loads(call("ls", url, "--pending", "--json")[1])["pending"]
    assert pending["withdrawn_by"] == 1
    failed(call("finish", url, "step/7"), "host 1 of 2 gave up", "save again on every host")


def whole_id(url: Path) -> str:
    """Return the id of the transaction that committed version 1."""
    [commit] = blocking.open(url, "r").history()
    return commit.transaction


def test_quantize(store: Path, tmp_path: Path, file: Path, call: Call) -> None:
    code, out, err = call("quantize", store, "--format", "e4m3")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("version 2 (step/4/e4m3), from version 1: ")
    [ids] = [line.split() for line in out.splitlines() if line.startswith("ids ")]
    assert ids[1:] == ["unchanged", "16.0", "kB", "16.0", "kB", "64.00"]
    code, out, err = call("quantize", store, "--format", "e3m2", "--at", 1, "--tag", "small", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["version"], report["tag"], report["source"]) == (3, "small", 1)
    assert 15 < report["total"]["sqnr_db"] < 40
    by_path = {a["path"]: a for a in report["arrays"]}
    assert by_path["ids"]["sqnr_db"] is None
    assert by_path["layer.w"]["bits_per_value"] == pytest.approx(6, abs=0.1)
    out = tmp_path / "out.safetensors"
    assert call("export", store, out, "--at", "small")[0] == 0
    exported, original = (safetensors.numpy.load_file(f) for f in (out, file))
    assert exported["layer.w"].dtype == np.float32
    assert 0 < np.abs(exported["layer.w"] - original["layer.w"]).max() < 0.3


def test_quantize_by_target_and_policy(store: Path, tmp_path: Path, call: Call) -> None:
    code, out, err = call("quantize", store, "--min-sqnr", 30, "--tag", "floor", "--json")
    assert (code, err) == (0, "")
    assert all(a["sqnr_db"] is None or a["sqnr_db"] >= 30 for a in json.loads(out)["arrays"])
    code, out, err = call("quantize", store, "--bits", 35, "--at", 1, "--axis", 0, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["total"]["bits_per_value"] <= 35
    policy, image = tmp_path / "policy.json", tmp_path / "plot.png"
    policy.write_text('{"layer.b": null, "**": {"format": "e3m2", "axis": 0}}')
    code, out, err = call("quantize", store, "--policy", policy, "--at", 1, "--tag", "p", "--plot", image)
    assert (code, err) == (0, "")
    assert image.read_bytes().startswith(b"\x89PNG")
    assert out.splitlines()[-1] == f"wrote {image}"
    image.unlink()
    again = call("report", store, "--at", "p", "--plot", image)
    assert again == (0, out, "")
    assert image.exists()
    policy.write_text('{"bits": 35, "formats": {"layer.b": null}, "scale": "max"}')
    assert call("quantize", store, "--policy", policy, "--at", 1, "--tag", "p2")[0] == 0
    assert json.loads(call("report", store, "--at", "p2", "--json")[1])["tag"] == "p2"


def test_quantize_without_options(tmp_path: Path, call: Call) -> None:
    tree = {"w": np.random.default_rng(0).standard_normal((40, 256), np.float32), "b": np.ones(256, np.float32)}
    blocking.save(tmp_path / "s", tree, 0)
    code, out, err = call("quantize", tmp_path / "s")
    assert (code, err) == (0, "")
    assert "one-dimensional; to encode it, add a rule with its name" in out
    assert "entropy" in out
    code, out, err = call("quantize", tmp_path / "s", "--block", "none", "--tag", "one", "--json")
    report = json.loads(out)
    assert {a["path"]: (a["format"], a["granularity"]) for a in report["arrays"]} == {
        "w": ("e2m5", "tensor"),
        "b": (None, ""),
    }
    assert (report["request"], report["plot"]) == ("bits=8.1, error=relative, coding=packed", None)
    [newest, before, _] = json.loads(call("log", tmp_path / "s", "--json")[1])["commits"]
    options = ("--bits", "4.25", "--block", "32", "--scale", "6bit")
    report = json.loads(call("quantize", tmp_path / "s", *options, "--json")[1])
    assert report["request"] == "bits=4.25, error=relative, coding=packed; block=32, scale=6bit"
    assert newest["message"] == "quantized from version 1: bits=8.1, error=relative, coding=packed"
    assert before["message"] == "quantized from version 1: bits=8, error=relative, coding=entropy"


def test_the_help_of_quantize_shows_a_policy_that_works(tmp_path: Path, call: Call) -> None:
    out = call("quantize", "--help")[1]
    assert "SQNR is the signal-to-quantization-noise ratio" in out
    assert "SQNR is the signal-to-quantization-noise ratio" in " ".join(call("report", "--help")[1].split())
    examples = [line.strip() for line in out.splitlines() if line.strip().startswith("{")]
    assert len(examples) == 3
    tree = {name: np.ones((rows, 64), np.float32) for name, rows in (("embed", 64), ("head", 8), ("w", 999))}
    blocking.save(tmp_path / "s", tree, 0)
    for i, text in enumerate(examples):
        (tmp_path / "policy.json").write_text(text)
        arguments = ("--policy", tmp_path / "policy.json", "--at", 1, "--tag", f"p{i}")
        assert call("quantize", tmp_path / "s", *arguments)[0] == 0


def test_a_plot_tells_twenty_formats_apart(tmp_path: Path) -> None:
    tree = {f"w{i}": np.random.default_rng(i).standard_normal((8, 64), np.float32) for i in range(21)}
    names = [f.name for bits in (7, 8, 9) for f in exmy.formats(bits)][:21]
    blocking.save(tmp_path / "s", tree, 0)
    report = blocking.quantize(tmp_path / "s", dict(zip(tree, names, strict=True)), tag="q")
    plot_report(report, tmp_path / "p.svg")
    point = r'PathCollection_\d+">\s*<defs>\s*<path id="\w+" d="([^"]*)" style="stroke: (#\w+)'
    points = re.findall(point, (tmp_path / "p.svg").read_text())
    assert len(set(points)) >= 21
    assert len({color for _, color in points}) == 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["policy.json is not JSON"]),
        ("[]", ["policy.json: expected an object"]),
        ("{}", ["policy.json: expected an object"]),
        ('{"bits": 5, "colour": 1}', ["policy.json: unknown keys colour; expected some of formats, min_sqnr"]),
        ('{"bits": "5"}', ["bits='5': expected a number"]),
        ('{"layer.w": "e9m9"}', ["layer.w", "e9m9"]),
        ('{"formats": 5}', ["formats=5: expected an eXmY format"]),
        ('{"layer.w": 5}', ["the rule 'layer.w': 5: expected an eXmY format"]),
        ('{"layer.w": {"format": "e3m2", "block": 5}}', ["layer.w", "block is 5"]),
        ('{"bits": 1}', ["bits=1 can't be met: the least possible is"]),
    ],
)
def test_a_bad_policy(store: Path, tmp_path: Path, call: Call, text: str, words: list[str]) -> None:
    (tmp_path / "policy.json").write_text(text)
    failed(call("quantize", store, "--policy", tmp_path / "policy.json"), *words, code=2)
    assert len(json.loads(call("log", store, "--json")[1])["commits"]) == 1


def test_a_pattern_without_a_match_names_near_paths(store: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "policy.json").write_text('{"layr.w": "e3m2"}')
    code, out, err = call("quantize", store, "--policy", tmp_path / "policy.json")
    assert (code, out) == (2, "")
    assert err.splitlines()[1] == "  'layr.w'; similar paths: layer.w, layer.b"


@pytest.mark.parametrize(
    ("image", "words"), [("p.xyz", "suffixes"), ("nowhere/p.png", "not a folder"), ("p", "png")]
)
def test_a_plot_that_can_t_be_written_is_refused_before_the_work(
    store: Path, tmp_path: Path, call: Call, image: str, words: str
) -> None:
    failed(call("quantize", store, "--format", "e4m3", "--plot", tmp_path / image), image, words, code=2)
    assert len(json.loads(call("log", store, "--json")[1])["commits"]) == 1


def test_a_diff_names_scalars_with_their_values(tmp_path: Path, call: Call) -> None:
    blocking.save(tmp_path / "s", {"w": np.ones(3), "epoch": 100, "lr": 0.1}, 1)
    blocking.save(tmp_path / "s", {"w": np.ones(3), "epoch": 200, "name": "run"}, 2)
    document = json.loads(call("diff", tmp_path / "s", 1, 2, "--json")[1])
    assert document["scalars"] == [
        {"path": "epoch", "before": "100", "after": "200"},
        {"path": "lr", "before": "0.1", "after": None},
        {"path": "name", "before": None, "after": "'run'"},
    ]
    counts = "version 1 → version 2: 0 arrays added, 0 removed, 0 changed"
    changes = f"{counts}; epoch 100 → 200, lr 0.1 → absent, name absent → 'run'"
    assert call("diff", tmp_path / "s", 1, 2) == (0, f"{changes}\n", "")
    with blocking.open(tmp_path / "s") as store, store.transaction() as tx:
        tx.create_group("", {"mine": 1})
    assert "; groups changed: /\n" in call("diff", tmp_path / "s", 1, 3)[1]


def test_a_diff_of_a_quantized_copy_has_no_group(store: Path, call: Call) -> None:
    assert call("quantize", store, "--tag", "q")[0] == 0
    assert "groups" not in call("diff", store, "step/4", "q")[1]


def test_a_version_without_a_report_is_named(store: Path, call: Call) -> None:
    failed(call("report", store), "has no report", "make one with tstore.quantize")


def test_verify(store: Path, call: Call) -> None:
    code, out, err = call("verify", store)
    assert (code, err) == (0, "")
    assert out == f"{store} is intact: 1 version, 3 arrays, 3 chunks, 42.0 kB read and verified\n"
    code, out, err = call("verify", store, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) | {"store": ""} == {
        "store": "",
        "ok": True,
        "versions": 1,
        "arrays": 3,
        "chunks": 3,
        "bytes": 42000,
        "faults": [],
        "foreign": [],
        "unchecked": [],
    }
    for number in range(7):
        (store / f"foreign{number}").touch()
    code, out, err = call("verify", store)
    assert (code, err, len(out.splitlines())) == (0, "", 2)
    shown = ", ".join(f"foreign{number}" for number in range(5))
    assert out.startswith(f"{store} contains files that do not belong to the store: {shown} and 2 more\n")


def test_gc(store: Path, file: Path, call: Call) -> None:
    for step in (5, 6):
        call("import", file, store, "--step", step)
    code, out, _ = call("gc", store, "--keep-last", 2, "--dry-run")
    assert code == 0
    assert "would remove version 1 (tags: step/4)\n" in out
    assert ": would remove 1 version, " in out
    assert json.loads(call("verify", store, "--json")[1])["versions"] == 3
    code, out, _ = call("gc", store, "--keep-tag", "step/5", "--json")
    assert code == 0
    report = json.loads(out)
    assert (report["versions"], report["version"], report["dry_run"]) == ([1], 4, False)
    assert "(expired)" in call("log", store)[1]
    failed(call("ls", store, "--at", 1), "version 1 was removed by the garbage collection recorded as version 4")
    failed(call("gc", store, "--keep-best", "1:loss"), "no step has the metric 'loss'")
    assert call("gc", store)[0] == 0
    assert call("verify", store)[0] == 0


@pytest.mark.parametrize(
    "option",
    [
        *[["--keep-best", best] for best in ("loss", "0:loss", "\N{SUPERSCRIPT TWO}:loss")],
        *[[name, days] for name in ("--keep-days", "--abandoned-days") for days in ("-1", "nan", "inf", "1e300")],
        ["--keep-last", "0"],
    ],
)
def test_gc_misused(store: Path, call: Call, option: list[str]) -> None:
    failed(call("gc", store, *option), option[0], code=2)


def test_the_keep_options(tmp_path: Path, call: Call) -> None:
    for step in range(6):
        blocking.save(tmp_path / "s", {"x": step}, step, metrics={"loss": -step, "accuracy": step})
    options = ["--keep-best", "1:accuracy:max", "--keep-best", "2:loss:max", "--keep-every", 3]
    assert call("gc", tmp_path / "s", *options)[0] == 0
    assert blocking.steps(tmp_path / "s") == [0, 1, 3, 5]
    assert call("gc", tmp_path / "s", "--keep-days", 1)[0] == 0
    assert blocking.steps(tmp_path / "s") == [0, 1, 3, 5]


def test_the_real_weights(tmp_path: Path, call: Call) -> None:
    store, out = tmp_path / "store", tmp_path / "out.safetensors"
    assert call("import", real_weights(), store, "--step", 0)[0] == 0
    listed = json.loads(call("ls", store, "--json")[1])
    assert listed["total"]["arrays"] == len(listed["arrays"]) > 100
    assert {a["dtype"] for a in listed["arrays"]} == {"float32", "int64"}
    assert json.loads(call("log", store, "--json")[1])["commits"][0]["tag"] == "step/0"
    assert call("verify", store)[0] == 0
    assert call("export", store, out)[0] == 0
    assert out.read_bytes() == real_weights().read_bytes()


# ---- damage


def test_each_fault_is_one_line(store: Path, call: Call) -> None:
    [pack] = store.glob("txn/*/pack-*")
    data = bytearray(pack.read_bytes())
    data[0] ^= 1
    data[-1] ^= 128
    pack.write_bytes(data)
    code, out, err = call("verify", store)
    assert (code, err) == (1, "")
    *faults, total = out.splitlines()
    assert len(faults) == 2
    assert all("version 1: " in line and "chunk (0" in line for line in faults)
    assert total.startswith(f"{store} has 2 faults: 1 version, 3 arrays, ")
    code, out, err = call("verify", store, "--json")
    assert (code, err) == (1, "")
    report = json.loads(out)
    assert not report["ok"]
    assert len(report["faults"]) == 2


@pytest.mark.parametrize("harm", ["flipped", "cut", "empty", "gone"])
@pytest.mark.parametrize("what", ["txn/*/pack-*", "commits/*"])
def test_damage_of_any_kind_is_detected(store: Path, call: Call, what: str, harm: str) -> None:
    call("quantize", store, "--format", "e4m3")
    path = sorted(store.glob(what), key=lambda p: (p.stat().st_mtime_ns, p.name))[0]
    data = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes({"flipped": bytes([data[0] ^ 1]) + data[1:], "cut": data[:-1], "empty": b""}[harm])
    code, out, err = call("verify", store)
    assert code == 1
    assert (out + err).count("\n") >= 1
    if what != "commits/*" or harm != "gone":  # where the first record is gone, nothing is known of the store
        assert err == ""


def test_a_damaged_tensor_is_not_exported(store: Path, tmp_path: Path, call: Call) -> None:
    [pack] = store.glob("txn/*/pack-*")
    pack.write_bytes(pack.read_bytes()[:-1])
    failed(call("export", store, tmp_path / "out"), "layer.w", "chunk")
    assert not (tmp_path / "out").exists()


def test_a_damaged_marker(store: Path, call: Call) -> None:
    (store / "tstore.json").write_bytes(b"{")
    for command in ("ls", "log", "verify"):
        failed(call(command, store), "tstore.json", "does not parse")


# ---- missing stores and objects


def test_a_folder_of_other_files_is_not_made_a_store(tmp_path: Path, file: Path, call: Call) -> None:
    failed(call("import", file, tmp_path, "--step", 0), str(tmp_path), "other files")
    assert os.listdir(tmp_path) == ["in.safetensors"]


def test_unknown_versions_tags_steps_and_paths(store: Path, tmp_path: Path, call: Call) -> None:
    failed(call("ls", store, "--at", "big"), "no tag 'big'", "step/4")
    failed(call("ls", store, "--at", 7), "no version 7", "newest is 1")
    failed(call("ls", store, "layer"), "no array or group 'layer'", "layer.w", "pass 'layer*'")
    failed(call("export", store, tmp_path / "out", "--step", 5), "no step 5; its steps are: 4")
    failed(call("export", store, tmp_path / "out", "--at", "big"), "no tag 'big'")
    failed(call("quantize", store, "--format", "e4m3", "--at", 9), "no version 9")
    assert not (tmp_path / "out").exists()


def test_invalid_files_are_not_imported(tmp_path: Path, call: Call) -> None:
    failed(call("import", tmp_path / "none", tmp_path / "store", "--step", 0), str(tmp_path / "none"))
    failed(call("import", tmp_path, tmp_path / "store", "--step", 0), str(tmp_path), code=2)
    lying = write_file(tmp_path / "lying", {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234")
    failed(call("import", lying, tmp_path / "store", "--step", 0), str(lying), "expected", "found")
    assert os.listdir(tmp_path) == ["lying"]


def test_taken_names_are_refused(store: Path, file: Path, call: Call) -> None:
    before = file.read_bytes()
    failed(call("import", file, store, "--step", 4), "step 4 is already saved", f"tstore rm {store} --step 4")
    failed(call("export", store, file), "exists")
    assert call("quantize", store, "--format", "e4m3", "--tag", "small")[0] == 0
    failed(call("quantize", store, "--format", "e4m3", "--tag", "small"), "'small' already names version 2")
    failed(call("quantize", store, "--format", "e4m3", "--tag", "step/4"), "--tag 'step/4' names a step", code=2)
    assert file.read_bytes() == before
    assert call("verify", store)[0] == 0


def test_nan_is_not_quantized(tmp_path: Path, call: Call) -> None:
    blocking.save(
        tmp_path / "store", {"fine": np.zeros((3, 1000)), "w": np.array([[1, np.nan, np.inf]] * 1000)}, 0
    )
    code, out, err = call("quantize", tmp_path / "store", "--format", "e4m3")
    assert (code, err) == (0, "")
    assert "\nnot quantized (2000 of 3000 values are NaN or infinite): w\n" in out


def test_errors_as_json(tmp_path: Path, call: Call) -> None:
    code, out, err = call("log", tmp_path, "--json")
    assert code == 1
    error = json.loads(out)["error"]
    assert error["type"] == "NotAStore"
    assert err == f"tstore: {error['message']}\n"
    code, out, _ = call("ls", "--json")
    assert code == 2
    assert json.loads(out)["error"]["type"] == "Misuse"


# ---- misuse


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], ["No such command 'nonsense'; see tstore --help"]),
        (["restore"], ["Did you mean 'export'? See tstore --help"]),
        (["import", "a", "store", "0"], ["the last argument is the store; pass", "as --step 0"]),
        (["lss"], ["Did you mean 'ls'? See tstore --help"]),
        (["quantize", "a", "--min-sqnr", "30", "--error", "relative"], ["--error", "--bits"]),
        (["ls"], ["Missing argument 'STORE'", "tstore ls --help"]),
        (["import", "model.safetensors", "--step", "1"], ["Missing argument 'STORE'", "tstore import --help"]),
        (["import"], ["Missing argument 'STORE'", "SOURCES"]),
        (["ls", "a", "b", "c"], ["unexpected extra argument"]),
        (["ls", "a", "--sideways"], ["--sideways"]),
        (["import", "a", "b", "--step", "-1"], ["--step"]),
        (
            ["import", "a", "b", "--step", "one"],
            ["--step", "'one' is not a whole number; pass one such as 100; see"],
        ),
        (["gc", "a", "--keep-days", "few"], ["'few' is not a number; pass one such as 5.5; see"]),
        (["import", "a", "b", "--step", "1", "--codec", "e9m9"], ["--codec", "e9m9"]),
        (["quantize", "a", "--bits", "5", "--min-sqnr", "30"], ["--format", "--min-sqnr", "mutually exclusive"]),
        (["quantize", "a", "--block", "33"], ["--block", "'16', '32', '64', '128', '256', 'none'"]),
        (["quantize", "a", "--bits", "few"], ["--bits", "few"]),
        (["quantize", "a", "--policy", "nowhere.json"], ["--policy", "nowhere.json"]),
        (["quantize", "a", "--format", "int8"], ["--format", "int8"]),
        *(
            ([*command, "--at", "1", "--step", "1"], ["--at and --step"])
            for command in (["export", "a", "b"], ["copy", "a", "b"], ["quantize", "a"], ["report", "a"])
        ),
        *(([name, "a", "--at", "1", "--step", "1"], ["--at and --step"]) for name in ("ls", "show", "tag")),
        (["ls", "a", "--step", "-1"], ["--step"]),
        (["rm", "a"], ["--step"]),
        (["tag", "a", "--move"], ["NAME", "tstore tag --help"]),
        (["tag", "a", "--step", "1"], ["NAME"]),
        (["tag", "a", "best", "--drop", "--at", "1"], ["--drop"]),
        (["show", "a", "--depth", "0"], ["--depth"]),
        (["demo", "--size", "0"], ["--size"]),
    ],
)
def test_misuse(call: Call, arguments: list[str], words: list[str]) -> None:
    failed(call(*arguments), *words, code=2)


def test_no_command_prints_the_help(call: Call) -> None:
    code, out, err = call()
    assert (code, out) == (2, "")
    assert "Commands:" in err


# ---- errors of the system


@pytest.fixture
def read_only(store: Path) -> Iterator[Path]:
    folders = [store, *(p for p in store.rglob("*") if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    yield store
    for folder in folders:
        folder.chmod(0o755)


def test_a_read_only_store_can_be_read(read_only: Path, file: Path, tmp_path: Path) -> None:
    assert rootless("verify", read_only)[0] == 0
    assert rootless("export", read_only, tmp_path / "out")[0] == 0
    before = sorted(read_only.rglob("*"))
    failed(rootless("quantize", read_only, "--format", "e4m3"), str(read_only), "permission")
    failed(rootless("import", file, read_only, "--step", 5), str(read_only), "permission")
    assert sorted(read_only.rglob("*")) == before


def test_a_read_only_folder(read_only: Path, file: Path, tmp_path: Path) -> None:
    failed(rootless("export", read_only, read_only / "out"), "permission")
    (tmp_path / "read-only").mkdir(0o555)
    failed(rootless("import", file, tmp_path / "read-only" / "new", "--step", 0), "permission")


def test_a_full_disk(store: Path, tmp_path: Path, call: Call) -> None:
    safetensors.numpy.save_file({"big": np.ones((1000, 1000))}, tmp_path / "big")
    before = call("log", store, "--json")
    failed(prepared(LIMITED, "import", tmp_path / "big", store, "--step", 5), "free space")
    assert call("log", store, "--json") == before
    assert call("verify", store)[0] == 0
    assert call("import", tmp_path / "big", store, "--step", 5)[0] == 0
    failed(prepared(LIMITED, "export", store, tmp_path / "out"), "free space")
    assert not (tmp_path / "out").exists()
    code, out, err = prepared(LIMITED, "probe", tmp_path / "probed")
    assert (code, err) == (1, "")
    assert "\nfails" not in out
    assert "unknown: 2; free space" in out.splitlines()[-1]


# ---- output


def on_terminal(width: int, *arguments: object) -> list[str]:
    """Return the lines that a command prints on a terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with start_tstore(*arguments, stdout=theirs, stderr=subprocess.PIPE, env=environment) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the other end was closed
            while part := os.read(ours, 100_000):
                shown += part
        os.close(ours)
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(60) == 0
    return shown.decode().replace("\r\n", "\n").splitlines()


LONG = "model/encoder/layer/{}/attention/self/query/kernel"


@pytest.fixture
def long_paths(tmp_path: Path) -> Path:
    store, values = tmp_path / "s", np.random.default_rng(0).standard_normal((128, 64), np.float32)
    layers = [{"attention": {"self": {"query": {"kernel": values + layer}}}} for layer in range(3)]
    blocking.save(store, {"model": {"encoder": {"layer": layers}}}, 0)
    blocking.quantize(store, "e4m3", message="eight bits are plenty for a model of so few layers")
    return store


@pytest.mark.parametrize("width", [60, 200])
@pytest.mark.parametrize(
    ("command", "first_to_go"),
    [("ls", ["chunks", "dtype"]), ("report", ["coding", "before"]), ("log", ["added"])],
)
def test_a_table_fits_the_terminal(
    long_paths: Path, call: Call, width: int, command: str, first_to_go: list[str]
) -> None:
    lines = on_terminal(width, command, long_paths)
    [rule] = [number for number, line in enumerate(lines) if line.startswith("──")]
    known = call(command, long_paths)[1].splitlines()[0].split("  ")
    heads = [head.strip() for head in lines[rule - 1].split("  ") if head.strip()]
    assert set(heads) <= {head.strip() for head in known}  # none is cut
    table = list(itertools.takewhile(lambda line: not line.startswith(("(not", "version ")), lines))
    assert all(len(line) <= width for line in table), table
    left_out = [head.strip() for head in known if head.strip() and head.strip() not in heads]
    if width == 200:
        assert left_out == []
    elif width == 60:
        assert set(first_to_go) <= set(left_out)
        assert f"(not shown in 60 columns: {', '.join(left_out)}; --json has all)" in lines
    paths = [line.split("  ")[0].strip() for line in table[rule + 1 :]]
    if command != "log":
        assert "".join(paths) == "".join(LONG.format(layer) for layer in range(3))
        assert all(path.endswith(("/", "kernel")) for path in paths)  # cut at separators alone
        assert len(paths) <= 6


def test_a_table_that_is_piped_has_all_columns_in_one_line_each(long_paths: Path) -> None:
    head, _, *rows, _ = run_tstore("ls", long_paths, env={**os.environ, "COLUMNS": "40"}).stdout.splitlines()
    assert head.split() == ["path", "dtype", "shape", "chunks", "codec", "stored", "bits/value"]
    assert [row.split()[0] for row in rows] == [LONG.format(layer) for layer in range(3)]


def test_text_is_wrapped_between_words() -> None:
    assert wrap("about 0.106 s each, of 12", 8) == ["about", "0.106 s", "each, of", "12"]
    assert wrap("a/long/path and more", 7) == ["a/long/", "path", "and", "more"]
    assert wrap("seamless", 3) == ["sea", "mle", "ss"]
    assert wrap("", 8) == [""]


@pytest.mark.parametrize("width", [60, 80])
def test_the_help_fits_the_terminal(width: int, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for name in ("", *commands.cli.commands):
        out = call(*name.split(), "--help")[1]
        assert all(len(line) <= width for line in out.splitlines()), out
        assert "..." not in out.replace("[COMMAND] [ARGS]...", "")  # no sentence is cut
        assert out.isascii()
    listed = call("--help")[1].partition("Commands:\n")[2]
    assert len(listed.splitlines()) == len(commands.cli.commands)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_paths(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_TSTORE_COMPLETE", f"{shell}_complete")
    arguments = ["ls", "import", "import a", "export s", "copy a", "bench", "probe", "serve s --tls-key"]
    for words in [*arguments, "quantize s --policy", "report s --plot", "demo --store", "demo --model"]:
        monkeypatch.setenv("COMP_WORDS", f"tstore {words} ")
        monkeypatch.setenv("COMP_CWORD", "" if shell == "fish" else str(1 + len(words.split())))
        with pytest.raises(SystemExit) as ended:
            main([])
        out, err = capsys.readouterr()
        assert (ended.value.code, err) == (0, "")
        assert re.split(r"[,\n]", out)[0] == "file", words  # the shell then completes file names itself


def test_characters_missing_in_the_encoding_are_replaced(store: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "tstore", "ls", store]
    listed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "64x100" in listed.stdout
    assert "-----" in listed.stdout
    assert prepared(ASCII, "quantize", store, "--format", "e4m3")[0] == 0
    assert "version 1 -> version 2: " in prepared(ASCII, "diff", store, 1, 2)[1]
    for name in ("report", "log"):
        code, out, err = prepared(ASCII, name, store)
        assert code == 0
        assert "\\" not in out + err
        assert out.isascii()


def test_one_of_anything_is_not_plural(tmp_path: Path, call: Call) -> None:
    store = tmp_path / "s"
    blocking.save(store, {"w": np.ones(1)}, 0)
    out = [call(name, store)[1] for name in ("ls", "log", "verify", "gc")]
    out += [call("copy", store, tmp_path / "copy")[1], call("copy", store, tmp_path / "copy")[1]]
    out += [
        call("export", store, tmp_path / "out.safetensors")[1],
        call("import", tmp_path / "out.safetensors", tmp_path / "t", "--step", 0)[1],
    ]
    blocking.save(store, {"w": np.ones(2)}, 1)
    out += [call("diff", store, 1, 2)[1], call("gc", store, "--keep-last", 1)[1]]
    with blocking.open(store) as opened, pytest.raises(tstore.errors.DeadlineExceeded):
        opened.transaction(name="t", host=0, hosts=2, attempt="a").commit(timeout=0.01)
    out.append(call("ls", store, "--pending")[1])
    assert all(re.search(r"\b1 [a-z]", text) for text in out[:1] + out[2:3])
    assert not [text for text in out if re.search(r"(?<![.\d])1 (?!is|has|was)[a-z]+s\b", text)], out


def test_many_names_are_shortened() -> None:
    assert format_ranges([1, 2, 3, 4, 7, 8, 10]) == ["1-4", "7", "8", "10"]
    assert format_ranges([]) == []
    assert abbreviate(["a", "b"], 2) == "a, b"
    assert abbreviate([str(n) for n in range(1000)], 3) == "0, 1, 2 and 997 more"
    assert [pluralize(n, "version") for n in (0, 1, 2, 10_000)] == [
        "0 versions",
        "1 version",
        "2 versions",
        "10,000 versions",
    ]
    assert [format_size(n) for n in (0, 999, 1000, 999_949, 999_950, 2e15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "999.9 kB",
        "1.0 MB",
        "2000.0 TB",
    ]


def test_a_refused_connection_is_reported_soon(call: Call) -> None:
    with ports.refusing() as address:
        for command in ("ls", f"http://{address}/s"), ("quantize", f"http://{address}/s", "--format", "e4m3"):
            started = time.monotonic()
            failed(call(*command), "Connection refused", "check the address")
            assert time.monotonic() - started < 9  # `first_deadline` is 10 s


def test_a_closed_pipe_ends_the_command_silently(tmp_path: Path) -> None:
    blocking.save(tmp_path / "store", {f"array {i:05}": np.zeros((), np.int8) for i in range(3000)}, 0)
    for options in ([], ["--json"]):
        arguments = ["ls", tmp_path / "store", *options]
        with start_tstore(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline()
            process.stdout.close()
            assert process.stderr.read() == b""
            assert process.wait(30) == 141


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_output_is_an_error(store: Path, options: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = run_tstore("ls", store, *options, stdout=full)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "can't be written to standard output: No space left on device" in done.stderr


@pytest.mark.parametrize("arguments", [["serve", "--create", "--port", "0", "STORE"], ["demo", "--size", "1"]])
def test_a_full_output_of_a_long_command_is_an_error(tmp_path: Path, arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = run_tstore(*(tmp_path / "s" if a == "STORE" else a for a in arguments), stdout=full)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("tstore: standard output can't be written: No space left")


@pytest.mark.parametrize("arguments", [["--help"], ["log", "--help"], ["--version"]])
def test_help_into_a_closed_pipe_ends_as_any_command(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run_tstore(*arguments, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_matter(store: Path, tmp_path: Path, closed: str) -> None:
    command = [sys.executable, "-m", "tstore", "verify", str(store)]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command], capture_output=True, timeout=250, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert (b"is intact" in done.stdout) == (closed == "2>&-")


def test_progress_is_shown_only_on_a_terminal(store: Path) -> None:
    ours, theirs = pty.openpty()
    process = run_tstore("verify", store, "--json", stderr=theirs)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert process.returncode == 0
    assert json.loads(process.stdout)["ok"]
    assert f"verifying {store}" in shown.replace("\r\n", "")


def test_control_characters_are_escaped(tmp_path: Path, call: Call) -> None:
    safetensors.numpy.save_file({"a\x1b[31m\n[bold]x": np.zeros(3)}, tmp_path / "in")
    call("import", tmp_path / "in", tmp_path / "store", "--step", 0)
    code, out, _ = call("ls", tmp_path / "store")
    assert code == 0
    assert "\x1b" not in out
    assert "[bold]x" in out
    assert escape("a\x1b[0m\x9b\nü") == "a\\x1b[0m\\x9b\nü"


def test_an_internal_error_is_one_sentence_too(store: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(reading, "listing", broken)
    failed(call("ls", store), "ZeroDivisionError", "TSTORE_TRACEBACK=1")
    monkeypatch.setenv("TSTORE_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        call("ls", store)


def test_an_undecodable_name_is_an_ordinary_error(store: Path, call: Call) -> None:
    failed(call("ls", os.fsdecode(os.fsencode(store) + b"\xff")), "not a tstore store")


# ---- arguments that are wrong


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("quantize STORE --bits 0", "--bits 0: expected"),
        ("quantize STORE --bits nan", "--bits nan: expected"),
        ("quantize STORE --min-sqnr nan", "--min-sqnr nan: expected"),
        ("quantize STORE --tag ''", "--tag '': expected"),
        ("quantize STORE --tag 5", "--tag '5': expected"),
        ("quantize STORE --at 0", "has no arrays to quantize; pass another version or tag as --at"),
        ("export STORE OUT --at 0", "is empty; pass another version or tag as --at"),
        ("export STORE -", "'-' is not standard output"),
        ("copy STORE STORE/x", "is inside the store to copy"),
        ("import FILE STORE --step 99999999999999999999999", "expected an integer of up to 18 digits"),
        ("ls STORE --at", "see tstore ls --help"),
        ("ls STORE --at " + "9" * 5000, "a version has at most 20 digits"),
        ("gc STORE --keep-best " + "9" * 5000 + ":loss", "expected N:METRIC"),
        ("ls http://x:99999/", "http://x:99999: the host or port is invalid"),
        ("ls http://[::1/", "http://[::1: the host or port is invalid"),
        ("ls http://user:pa/ss@host/", "http://…: the host or port is invalid"),
        ("ls http://", "http://: no host"),
        ("ls " + "x" * 5000, "has 5,000 characters"),
        ("ls " + "http://" + "x" * 5000, "http://… has 5,007 characters"),
    ],
)
def test_an_argument_that_is_wrong_is_misuse(
    store: Path, file: Path, tmp_path: Path, call: Call, command: str, words: str
) -> None:
    values = {"STORE": store, "FILE": file, "OUT": tmp_path / "out", "STORE/x": store / "x", "''": ""}
    error = failed(call(*(values.get(word, word) for word in command.split())), words, code=2)
    assert len(error) < 500
    assert not (tmp_path / "out").exists()


def test_a_failure_names_options_rather_than_arguments(store: Path, call: Call) -> None:
    assert call("quantize", store, "--tag", "small")[0] == 0
    failed(call("quantize", store, "--tag", "small"), "already names version 2; pass another one as --tag\n")
    failed(call("gc", store, "--keep-tag", "none"), "--keep-tag: no living version has the tag 'none'")


def test_a_pipe_is_not_imported(file: Path, tmp_path: Path) -> None:
    with open(file, "rb") as source, subprocess.Popen(["cat"], stdin=source, stdout=subprocess.PIPE) as cat:
        process = run_tstore("import", "/dev/stdin", tmp_path / "store", "--step", 0, stdin=cat.stdout)
    failed((process.returncode, process.stdout, process.stderr), "is a pipe or a device", code=2)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["ls", "--help"]])
def test_help_that_can_t_be_written_is_one_sentence(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        process = run_tstore(*arguments, stdout=full)
    failed((process.returncode, "", process.stderr), "standard output can't be written: No space left")


def test_copies_of_a_voided_version(call: Call, tmp_path: Path) -> None:
    store = tmp_path / "s"
    blocking.save(store, {"w": np.arange(3000, dtype="f4")}, 1)
    for tag in ("q", "r"):
        blocking.quantize(store, "e4m3", tag=tag)
    assert call("repair", store, "--void-intact", 1)[0] == 0
    assert call("repair", store, "--void", 1) == (0, "already void: 1; nothing was committed\n", "")
    rows = call("log", store)[1]
    assert "q (copy of 1, which is voided)" in rows
    assert "r (copy of 1, which is voided)" in rows
    assert "repair: voided version 1" in rows
    with pytest.raises(NotFound, match=r"version 4, the newest that is not a copy, is empty; pass at="):
        blocking.restore(store)
    failed(call("export", store, tmp_path / "out.safetensors"), "the newest that is not a copy, is empty")
    assert set(blocking.restore(store, at="q")) == {"w"}
