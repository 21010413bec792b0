"""The documents of `--json`, which the guide `json.md` lists: the keys of each command, and those of errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore.sync as blocking
from tests.support.commands import Call
from tests.support.documents import Document

GUIDE = Document("examples/guides/json.md")

COMMANDS = [
    "log S",
    "ls S",
    "ls S --pending",
    "show S",
    "diff S 1 2",
    "stats S w",
    "tag S",
    "tag S good --step 1",
    "rm S --step 1 --dry-run",
    "quantize S --bits 5 --tag q",
    "report S --at q",
    "verify S",
    "repair S",
    "gc S --keep-last 1 --dry-run",
    "export S O/out.safetensors --step 2",
    "import O/out.safetensors O/new --step 0",
    "copy S O/copy",
    "finish S step/4",
    "follow S --count 1",
]

ELSEWHERE = {
    "bench",
    "demo",
    "probe",
    "serve",
    "view",
}  # they take long, or go on: their own tests read the documents

OPAQUE = ("metadata", "heartbeats", "tagged")  # whose keys are not the command's


def described(document: dict[str, Any]) -> str:
    """Return the keys of a document as the guide lists them."""
    return ", ".join(f"`{key}`{inner(value) if key not in OPAQUE else ''}" for key, value in document.items())


def inner(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f" (each: {described(value[0])})"
    return f" ({described(value)})" if isinstance(value, dict) and value else ""


def documented() -> dict[str, str]:
    """Return the keys of each command that the table of the guide lists."""
    return dict(re.findall(r"^\| `(\w+(?: [\w-]+)?)` \| (.*) \|$", GUIDE.text, re.M))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for step in (1, 2):
        values = np.random.default_rng(step).standard_normal((64, 4)).astype("f4")
        tree = {"w": values, "n": np.arange(9), "epoch": step}
        blocking.save(tmp_path / "s", tree, step, metrics={"loss": 1 / step})
    with blocking.open(tmp_path / "s") as opened:
        for host in (0, 1):
            part = opened.transaction(name="step/4", tag="step/4", host=host, hosts=2, attempt="a")
            part.create_array(f"w{host}", data=[host])
            if host == 0:
                part.deliver()
            else:
                part.abort()
    return tmp_path / "s"


def test_the_guide_lists_the_keys_of_every_command(
    store: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a store has its whole path in the document
    rows = {}
    for command in COMMANDS:
        words = command.replace("S", "s", 1).replace("O/", "").split()
        code, out, _ = call(*words, "--json")
        document = json.loads(out)
        assert code == (1 if words[0] == "finish" else 0), (command, document)
        if words[0] == "finish":
            assert "hosts [1] of 2" in document["error"]["message"]
        else:
            name = "tag NAME" if command.startswith("tag S ") else words[0] + " --pending" * ("--pending" in words)
            rows[name] = described(document)
            paths = {
                document[key] for key in ("store", "source", "destination") if isinstance(document.get(key), str)
            }
            assert paths <= {str(store), str(tmp_path / "new"), str(tmp_path / "copy")}
    table = documented()
    assert {name: table.get(name) for name in rows} == rows
    assert {name.split()[0] for name in table} == {command.split()[0] for command in COMMANDS} | ELSEWHERE


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        (["ls", "nowhere"], 1, "NotAStore"),
        (["ls", "s", "--step", "abc"], 2, "Misuse"),
        (["quantize", "s", "--bits", "0"], 2, "InvalidArgument"),
        (["lss", "s"], 2, "Misuse"),
    ],
)
def test_every_error_is_one_document(
    store: Path,
    tmp_path: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    code: int,
    kind: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, _ = call(*words, "--json")
    document = json.loads(out)
    assert (status, list(document), list(document["error"])) == (code, ["error"], ["type", "message"])
    assert document["error"]["type"] == kind
