"""The command and the Python that every view offers to copy print the numbers that the view shows."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

import tstore
from tests.support.http_server import READ, client_of
from tstore.cli import main
from tstore.core.tags import set_tag
from tstore.service.page import Site
from tstore.service.server import Access, Server
from tstore.service.statistics.results import RESULTS


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """A server of three steps, of which the tag "good" names the second, a copy, and a host under way."""
    store = tmp_path / "store"
    for step in (10, 20, 30):
        w = np.random.default_rng(step).normal(size=(900, 400))
        tree = {"w": w, "layers": {str(i): np.full(9, i * step) for i in range(step // 10)}}
        await tstore.save(store, tree, step=step, metrics={"loss": 1 / step})
    async with await tstore.open(store) as opened:
        await set_tag(opened, "good", "step/20")
    await tstore.quantize(store, {"w": "e4m3"}, at="step/20", tag="small")
    under_way = store / "txn" / f"step.0.{0:032x}-of-00002"
    under_way.mkdir(parents=True)
    (under_way / "alive-00001-of-00002").write_text(json.dumps({"name": "step/40", "time": time.time()}))
    async with Server(store, access=Access({READ: "read"}), page=Site(str(store))) as server:
        yield server


async def shown(server: Server, view: str, **parameters: Any) -> dict[str, Any]:
    async with client_of(server, READ) as client:
        response = await client("GET", f"/-/page/{view}?{urlencode(parameters)}", Accept="application/json")
    assert response.status == 200, response.body
    RESULTS.clear()
    document: dict[str, Any] = json.loads(response.body)
    return document


async def printed(document: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what the command of a document prints with --json."""
    words = shlex.split(document["command"])
    capsys.readouterr()
    assert await asyncio.to_thread(main, [*words[1:], "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


async def from_python(document: dict[str, Any]) -> list[Any]:
    """Return the values that the Python of a document prints."""
    values: list[Any] = []
    await asyncio.to_thread(exec, document["python"], {"print": values.append})
    return values


@pytest.mark.parametrize(
    ("rules", "removed"),
    [
        ({"keep_last": 2}, [1]),
        ({"keep_last": 1, "keep_every": 20}, [1]),
        ({"keep_best": "1:loss:max"}, [2]),
        ({"keep_last": 1, "keep_tags": "good"}, [1]),
        ({"keep_last": 1, "keep_tags": "good, step/10"}, []),
        ({"keep_last": 1, "keep_days": 3}, []),
        ({"keep_last": 1, "keep_copies": 0}, [1, 2]),
    ],
)
async def test_retention(
    server: Server, capsys: pytest.CaptureFixture[str], rules: dict[str, Any], removed: list[int]
) -> None:
    document = await shown(server, "", **rules)
    assert [version for version in document["removed"]["versions"] if version <= 3] == removed
    report = await printed(document, capsys)
    [from_store] = await from_python(document)
    for name in ("versions", "objects", "bytes", "abandoned"):
        assert report[name] == document["removed"][name]
        assert json.loads(json.dumps(getattr(from_store, name))) == document["removed"][name]


async def test_the_run(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    document = await shown(server, "")
    shown_bytes = {
        row["version"]: row["bytes_added"]
        for row in [*document["others"], *(c for r in document["rows"] for c in (r, *r["copies"]))]
    }
    log = await printed(document, capsys)
    assert {commit["version"]: commit["bytes_added"] for commit in log["commits"]} == shown_bytes
    assert {commit.version: commit.bytes_added for commit in await from_python(document)} == shown_bytes


async def test_the_hosts(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    document = await shown(server, "hosts")
    [transaction] = document["pending"]
    assert transaction["hosts"] == 2
    assert [t["transaction"] for t in (await printed(document, capsys))["pending"]] == [transaction["transaction"]]
    [pending] = await from_python(document)
    assert [t.transaction for t in pending] == [transaction["transaction"]]


async def test_the_status(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    document = await shown(server, "status")
    log = await printed(document, capsys)
    assert sum(commit["bytes_added"] for commit in log["commits"]) == document["status"]["bytes_added"]
    newest, [pending] = await from_python(document)
    assert newest.version == document["version"]
    assert pending.transaction == document["pending"][0]["transaction"]


@pytest.mark.parametrize(
    "parameters", [{}, {"at": "step/10"}, {"at": "step/20", "group": "layers"}, {"at": "2", "find": "layers/**"}]
)
async def test_the_tree(server: Server, capsys: pytest.CaptureFixture[str], parameters: dict[str, str]) -> None:
    document = await shown(server, "tree", **parameters)
    arrays = (await printed(document, capsys))["arrays"]
    assert len(arrays) == document["total"]["arrays"]
    assert sum(array["stored_bytes"] for array in arrays) == document["total"]["stored_bytes"]
    [paths] = await from_python(document)
    assert sorted(paths) == sorted(array["path"] for array in arrays)


@pytest.mark.parametrize(
    "parameters",
    [{}, {"at": "step/10"}, {"at": "2", "budget": 900_000}, {"at": "small", "window": "100:300,0:40"}],
)
async def test_a_tensor(server: Server, capsys: pytest.CaptureFixture[str], parameters: dict[str, Any]) -> None:
    document = await shown(server, "tensor", path="w", **parameters)
    summary = document["summary"]
    assert summary["coverage"]["complete"] == ("budget" not in parameters)
    statistics = await printed(document, capsys)
    assert {name: statistics[name] for name in summary} == summary
    table, rms = await from_python(document)
    assert f"{summary['coverage']['values_read']:,}" in table or summary["coverage"]["complete"]
    assert f"{summary['rms']:.3g}"[:4] in table
    np.testing.assert_allclose(rms, document["heat_map"]["rms"])


@pytest.mark.parametrize(
    "parameters",
    [{}, {"before": "step/10", "after": "step/20"}, {"after": "small"}, {"after": "step/30", "budget": 900_000}],
)
async def test_a_comparison(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], parameters: dict[str, Any]
) -> None:
    document = await shown(server, "compare", **parameters)
    assert document["rows"] or not parameters  # the head only set a tag
    difference = await printed(document, capsys)
    assert (difference["before"], difference["after"]) == (document["before"], document["after"])
    assert sorted(difference["arrays"], key=str) == sorted(document["rows"], key=str)
    async with await tstore.open(tmp_path / "store", "r") as store:
        expected = await store.diff(document["before"], document["after"], budget=document["budget"])
    assert await from_python(document) == [expected.table()]


async def test_the_health(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    document = await shown(server, "health")
    report = await printed(document, capsys)
    assert (report["ok"], report["versions"]) == (True, 5)
    [from_store] = await from_python(document)
    assert (from_store.ok, from_store.chunks) == (True, report["chunks"])
