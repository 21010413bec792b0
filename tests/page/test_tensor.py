"""The documents of the views Tensor and Compare: the library's numbers, bounded, for any parameters and store."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np
import pytest

import tstore
from tests.support.http_server import READ, WRITE, Client, client_of, everybody
from tstore.core.format.tree.tree import RESERVED_ATTRIBUTE
from tstore.service.page import Site
from tstore.service.server import Limits, Server
from tstore.service.statistics.heat_map import heat_map
from tstore.service.statistics.results import RESULTS

VALUES = np.random.default_rng(0).standard_normal((3000, 1000)).astype("f4")


@pytest.fixture
async def store(tmp_path: Path) -> Path:
    """Steps 1 and 2, a quantized copy of step 2, and a version with odd arrays, tagged "odd"."""
    url = tmp_path / "store"
    await tstore.save(url, {"w": VALUES, "same": np.zeros(5), "n": np.arange(9)}, 1)
    await tstore.save(url, {"w": VALUES * 1.5, "same": np.zeros(5), "n": np.arange(9)}, 2)
    await tstore.quantize(url, "e4m3", tag="small")
    async with await tstore.open(url) as opened, opened.transaction(tag="odd") as tx:
        for path, values in ODD.items():
            await (await tx.create_array(path, values.shape, values.dtype)).write(values)
        await tx.create_array("huge", (1 << 38, 1 << 18), "float32", (1024, 1024), sparse=True)
        await tx.create_array("unwritten", (10,), "float32")
    return url


ODD = {
    "nan": np.full((5, 5), np.nan),
    "1e308": np.array([[1e308, -1e308], [np.inf, 5e-324]]),
    "scalar": np.array(3.5, "f4"),
    "empty": np.zeros((0, 7)),
    "hollow": np.zeros((3, 0, 4, 5)),
    "text": np.array(["a", "b"]),
    "4d": np.arange(2 * 3 * 4 * 5, dtype="f4").reshape(2, 3, 4, 5),
    "bool": np.eye(9, dtype=bool),
    "complex": np.array([1 + 2j, 3]),
    "n" * 4000: np.ones((2, 2)),
    "<script>alert(1)<script>": np.ones(3),
}


async def shown(client: Client, view: str, **parameters: Any) -> dict[str, Any]:
    """Return the document of a view, after its page was rendered too."""
    url = f"/-/page/{view}?{urlencode(parameters)}"
    page = await client("GET", url, Accept="text/html")
    assert page.status == 200, page.body
    assert b"<script>alert" not in page.body
    response = await client("GET", url, Accept="application/json")
    document: dict[str, Any] = json.loads(response.body)
    return document


async def test_the_numbers_are_those_of_the_library(server: Server, store: Path) -> None:
    RESULTS.clear()
    async with client_of(server, READ) as client:
        document = await shown(client, "tensor", path="w", at="step/2", window="10:500,0:900", show="mean")
    RESULTS.clear()
    array = await (await (await tstore.open(store, "r")).snapshot("step/2")).array("w")
    assert document["summary"] == (await tstore.summarize(array)).document()
    cells = await heat_map(array[10:500, 0:900], cells=(96, 128), budget=32 << 20)
    assert document["heat_map"] == cells.document()
    assert document["loss"] is None
    assert not document["summary"]["coverage"]["complete"]
    address = server.url
    assert document["command"] == f"tstore stats {address} w --at step/2"
    assert "tstore.heat_map(array[10:500, 0:900], cells=(96, 128))" in document["python"]


async def test_a_quantized_array_has_its_loss(server: Server, store: Path) -> None:
    async with client_of(server, READ) as client:
        document = await shown(client, "tensor", path="w", at="small")
        assert document["loss"] == (await tstore.quantization_loss(store, "w", "small")).document()
        assert document["summary"]["range"]["name"] == "e4m3"
        assert (await shown(client, "tensor", path="n", at="small"))["loss"] is None


FORGED_ROWS: list[dict[str, Any]] = [
    {"values": "x"},
    {"values": -1},
    {"bytes_after": [1]},
    {"bytes_after": 1e308},
    {"signal": "x"},
    {"signal": -1.0},
    {"noise": -1.0},
    {"largest_error": [1]},
    {"clipped": "x"},
    {"clipped": None},
    {"clipped": 1e308},
    {"granularity": ["row"]},
    {"coding": 5},
    {"format": "<b>"},
    {"exponents": ["x", {"a": 1}]},
]
FORGED_REPORTS: list[dict[str, Any]] = [
    {"source": "small"},
    {"source": None},
    {"source": 99},
    {"tag": ["x"]},
    {"request": 5},
    {"arrays": None},
    {"arrays": {"a": 1}},
    {"arrays": [[1]]},
]


async def forge(store: Path, report: dict[str, Any], row: dict[str, Any]) -> int:
    """Commit a version with another report of the quantization, and return its version."""
    async with await tstore.open(store) as opened:
        reserved = (await opened.snapshot("small")).reserved_attributes()
        rows = [{**r, **row} if r["path"] == "w" else r for r in reserved["quantization"]["arrays"]]
        forged = {**reserved["quantization"], "arrays": rows, **report}
        async with opened.transaction() as tx:
            await tx.create_group("", {RESERVED_ATTRIBUTE: {**reserved, "quantization": forged}})
        assert tx.version is not None
        return tx.version


@pytest.mark.parametrize("row", FORGED_ROWS, ids=repr)
async def test_a_forged_row_of_a_report_is_named(server: Server, store: Path, row: dict[str, Any]) -> None:
    await check_forged(server, await forge(store, {}, row))


@pytest.mark.parametrize("report", FORGED_REPORTS, ids=repr)
async def test_a_forged_report_is_named(server: Server, store: Path, report: dict[str, Any]) -> None:
    await check_forged(server, await forge(store, report, {}))


async def check_forged(server: Server, version: int) -> None:
    async with client_of(server, READ) as client:
        document = await shown(client, "tensor", path="w", at=version)
        assert document["loss"] is None
        assert document["problem"]
        assert document["summary"]["coverage"]["values"] == VALUES.size
        assert (await client("GET", f"/-/page/version?at={version}")).status == 200


async def test_the_loss_has_the_row_of_its_own_report(server: Server, store: Path) -> None:
    async with client_of(server, READ) as client:
        for clipped in (0.25, 0.75):
            document = await shown(client, "tensor", path="w", at=await forge(store, {}, {"clipped": clipped}))
            assert document["loss"]["clipped"] == clipped


async def test_a_source_of_text_is_named(server: Server, store: Path) -> None:
    async with await tstore.open(store) as opened, opened.transaction() as tx:
        await tx.delete("w")
        await (await tx.create_array("w", VALUES.shape, "<U1", VALUES.shape)).write("a")
    assert tx.version is not None
    async with await tstore.open(store) as opened, opened.transaction() as again:
        await again.delete("w")
        await (await again.create_array("w", VALUES.shape, "float32")).write(1)
    async with client_of(server, READ) as client:
        document = await shown(client, "tensor", path="w", at=await forge(store, {"source": tx.version}, {}))
        assert "not numbers" in document["problem"]


@pytest.mark.parametrize("path", [*ODD, "huge", "unwritten"], ids=lambda path: path[:20])
async def test_odd_arrays_have_a_page(server: Server, path: str) -> None:
    async with client_of(server, READ) as client:
        document = await shown(client, "tensor", path=path, at="odd")
    problems = {"text": "not numbers", "unwritten": "never written"}
    if path in problems:
        assert problems[path] in document["problem"]
        return
    assert document["problem"] is None
    assert document["summary"]["coverage"]["bytes_read"] <= 8 << 20
    if path == "4d":
        assert document["index"] == [0, 0]
        assert document["heat_map"]["means"] == ODD["4d"][0, 0].tolist()


async def test_a_window_and_an_index_choose_the_matrix(server: Server) -> None:
    async with client_of(server, READ) as client:
        document = await shown(client, "tensor", path="4d", at="odd", index="1,2", window="1:3,0:5", show="mean")
    assert document["heat_map"]["means"] == ODD["4d"][1, 2, 1:3, 0:5].tolist()
    parts = [zoom["window"] for zoom in document["zooms"] if zoom["box"]]
    assert parts[0] == [1, 2, 0, 1]
    assert parts[-1] == [2, 3, 3, 5]
    assert sum((b - a) * (d - c) for a, b, c, d in parts) == 10
    assert document["zooms"][-1] == {"window": [0, 4, 0, 5], "box": None}


@pytest.mark.parametrize(
    ("view", "parameters", "message"),
    [
        ("tensor", {"path": "4d", "at": "odd", "index": "2,0"}, "index='2,0'"),
        ("tensor", {"path": "4d", "at": "odd", "index": "0"}, "expected 2 positions"),
        ("tensor", {"path": "4d", "at": "odd", "index": "-1,0"}, "expected positions such as"),
        ("tensor", {"path": "w", "window": "5:5,0:9"}, "window='5:5,0:9'"),
        ("tensor", {"path": "w", "window": "0:9999,0:9"}, "within 3000 and 1000"),
        ("tensor", {"path": "w", "window": "a"}, "expected rows and columns"),
        ("tensor", {"path": "w", "budget": "all"}, "budget='all'"),
        ("tensor", {"path": "w", "budget": "1000000001"}, "the page reads at most"),
        ("tensor", {"path": "w", "show": "max"}, "show='max'"),
        ("tensor", {"path": "v"}, "no array 'v'"),
        ("tensor", {}, "path: expected the path of an array"),
        ("compare", {"only": "x"}, "expected changed, added, removed"),
        ("compare", {"after": "nothing"}, "nothing"),
        ("compare", {"before": "nothing"}, "nothing"),
        ("compare", {"sort": "x"}, "sort='x'"),
        ("compare", {"budget": "9999999999"}, "the page reads at most"),
    ],
)
async def test_bad_parameters_are_named(
    server: Server, view: str, parameters: dict[str, str], message: str
) -> None:
    async with client_of(server, READ) as client:
        response = await client("GET", f"/-/page/{view}?{urlencode(parameters)}", Accept="application/json")
    assert 400 <= response.status < 500
    assert message in json.loads(response.body)["error"]


async def test_compare_lists_what_changed_most_first(server: Server, store: Path) -> None:
    async with client_of(server, READ) as client:
        document = await shown(client, "compare", after="step/2")
        diff = await (await tstore.open(store, "r")).diff(1, 2, budget=50_000_000)
        assert (document["before"], document["after"]) == (1, 2)
        assert document["rows"] == json.loads(json.dumps([row.document() for row in diff.by_change]))
        [row] = document["rows"]
        assert (row["path"], row["relative_norm"]) == ("w", pytest.approx(0.5))
        assert document["command"] == f"tstore diff {server.url} 1 step/2 --budget 50000000"
        copy = await shown(client, "compare", after="small", budget=100_000)
        assert (copy["before"], copy["after"]) == (2, 3)
        assert 0 < copy["values_compared"] <= 12_500
        assert copy["values"] == VALUES.size
        odd = await shown(client, "compare", only="added", find="4", sort="name")
        assert [row["path"] for row in odd["rows"]] == ["4d"]
        assert odd["counts"]["added"] == len(ODD) + 2
        first = await shown(client, "compare", after="1")
        assert first["before"] is None
        assert "no version before 1" in first["problem"]
        turned = await shown(client, "compare", before="odd", after="step/1")
        assert turned["counts"]["removed"] == len(ODD) + 2


async def test_a_client_whose_views_take_long_leaves_turns_for_others(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = 0

    async def endless(*_: object, **__: object) -> None:
        nonlocal computed
        computed += 1
        await asyncio.Event().wait()

    monkeypatch.setattr("tstore.service.page.tensor.summarize", endless)
    async with client_of(server, READ) as greedy, client_of(server, WRITE) as other:
        views = [asyncio.create_task(greedy("GET", f"/-/page/tensor?path=w&budget={1000 + i}")) for i in range(6)]
        for _ in range(3):
            assert (await other("GET", "/-/page/tree")).status == 200
        assert computed <= 3
        for view in views:
            view.cancel()
        await asyncio.wait(views)
        assert (await greedy("GET", "/-/page/tree")).status == 200


async def test_views_leave_requests_for_those_who_save(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("tstore.service.page.tensor.summarize", endless)
    async with (
        Server(store, access=everybody(), page=Site(), limits=Limits(requests=32)) as server,
        client_of(server, READ) as greedy,
        client_of(server, WRITE) as host,
    ):
        views = [asyncio.create_task(greedy("GET", "/-/page/tensor?path=w")) for _ in range(60)]
        refused, _ = await asyncio.wait(views, return_when=asyncio.FIRST_COMPLETED)
        assert {view.result().status for view in refused} == {503}
        for path in ("/tstore.json", "/-/page/tree"):
            assert (await host("GET", path)).status == 200
        for view in views:
            view.cancel()
        await asyncio.wait(views)


async def test_the_computation_ends_when_the_client_leaves(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def endless(*_: object, **__: object) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    monkeypatch.setattr("tstore.service.page.tensor.summarize", endless)
    async with Server(store, access=everybody(), page=Site()) as server:
        address = urlsplit(server.url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        request = (
            f"GET /-/page/tensor?path=w HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {READ}\r\n\r\n"
        )
        writer.write(request.encode())
        assert await asyncio.to_thread(started.wait, 30)
        assert not cancelled.is_set()
        writer.close()
        assert await asyncio.to_thread(cancelled.wait, 30)
    assert caplog.messages == []
