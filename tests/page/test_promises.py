"""What holds for every view: no request writes, text is text, and no view holds up the server."""

from __future__ import annotations

import asyncio
import html
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest

import tstore
from tests.support.http_server import ADMIN, READ, client_of
from tstore.errors import NotFound
from tstore.service.page.navigation import VIEWS
from tstore.service.server import Server
from tstore.service.statistics.reading import Batch, Sample
from tstore.service.statistics.results import RESULTS

MARKUP = "<img src=x onerror='alert(1)'>\"><script>alert(1)</script>"
OVERRIDE = "\u202e"
HOSTILE = f"{MARKUP}{OVERRIDE}\a"
NAME = HOSTILE.replace("/", "").replace("\a", "")  # of an array: paths have no slashes in names, nor controls

ADDRESSES = [
    "",
    "?keep_last=1",
    "?keep_best=1:loss&keep_every=10",
    "hosts",
    "status",
    "version?at=2",
    "tree",
    "tree?group=params&sort=bytes",
    "tree?find=w",
    "compare",
    "compare?before=1&after=2",
    "tensor?path=params/w",
    "tensor?path=params/w&window=0:8,0:8&show=mean",
    "health",
]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def hostile(store: Path) -> None:
    """Add two versions whose every text is markup, and a host under way with such a name."""
    async with await tstore.open(store) as opened:
        for value in (1.0, 2.0):
            metadata = {"metrics": {HOSTILE: value}}
            tag = f"{MARKUP}{OVERRIDE} {value}"
            async with opened.transaction(f"{HOSTILE} {value}", tag, metadata=metadata) as tx:
                path = f"{NAME}/{NAME}"
                w = await (tx.create_array(path, (4, 4), "float32") if value == 1 else tx.array(path))
                await w.write(value)
    folder = store / "txn" / f"step.0.{0:032x}-of-00002"
    folder.mkdir()
    (folder / "alive-00000-of-00002").write_text(json.dumps({"name": HOSTILE, "time": time.time()}))


@pytest.mark.parametrize("address", ADDRESSES)
async def test_a_view_has_its_document_at_its_own_address(server: Server, address: str) -> None:
    async with client_of(server, READ) as client:
        document = await client("GET", f"/-/page/{address}", Accept="application/json")
        assert document.status == 200
        assert document.headers["Content-Type"].startswith("application/json")
        found = json.loads(document.body)
        assert isinstance(found, dict)
        if address.startswith("version"):  # for scripts only
            return
        page = await client("GET", f"/-/page/{address}", Accept="text/html")
        assert page.headers["Content-Type"].startswith("text/html")
        if address != "hosts":  # a part of the view Run
            text = html.unescape(page.body.decode())
            assert f'<pre tabindex="0">{found["command"]}</pre>' in text
            assert f'<pre tabindex="0">{found["python"]}</pre>' in text


def test_every_view_is_tried() -> None:
    assert {address.partition("?")[0] for address in ADDRESSES} == {view.name for view in VIEWS}


async def test_no_request_writes(server: Server, store: Path) -> None:
    await tstore.quantize(store, "e4m3", tag="small")
    before = files(store)
    async with client_of(server, ADMIN) as client:
        for accept in ("text/html", "application/json"):
            for address in ADDRESSES:
                assert (await client("GET", f"/-/page/{address}", Accept=accept)).status == 200
        page = (await client("GET", "/-/page/health", Accept="text/html")).body.decode()
        form = {"form_token": re.findall('value="([0-9a-f]{64})"', page)[0]}
        for action in ("health/start", "health/stop", "health/start", "login", "logout", "gc", "", "tree"):
            await client("POST", f"/-/page/{action}", form)
        for method in ("PUT", "DELETE", "PATCH"):
            for address in ADDRESSES:
                assert (await client(method, f"/-/page/{address}", b"{}")).status == 405
    assert files(store) == before


@pytest.mark.parametrize(
    ("view", "parameters"),
    [
        ("", {}),
        ("", {"keep_last": "1", "keep_tags": HOSTILE}),
        ("hosts", {}),
        ("status", {}),
        ("tree", {}),
        ("tree", {"group": NAME}),
        ("tree", {"find": NAME[:200]}),
        ("tree", {"find": HOSTILE, "at": HOSTILE, "group": HOSTILE}),
        ("tensor", {"path": f"{NAME}/{NAME}"}),
        ("tensor", {"path": HOSTILE}),
        ("tensor", {"path": "params/w", "window": HOSTILE}),
        ("compare", {"before": "3", "after": "4"}),
        ("compare", {"before": f"{MARKUP}{OVERRIDE} 1.0", "after": f"{MARKUP}{OVERRIDE} 2.0"}),
        ("compare", {"find": HOSTILE}),
        (HOSTILE, {}),
    ],
)
async def test_text_of_stores_and_addresses_is_text(
    server: Server, store: Path, view: str, parameters: Mapping[str, str]
) -> None:
    await hostile(store)
    async with client_of(server, READ) as client:
        query = urlencode(parameters)
        page = await client("GET", f"/-/page/{view}?{query}", Accept="text/html", Cookie=f"tstore-theme={MARKUP}")
    text = page.body.decode()
    assert "<img src=x" not in text
    assert "<script>" not in text
    shown = re.sub(' value="[^"]*"', "", text)  # fields of forms repeat what was asked for
    assert OVERRIDE not in shown
    assert "\a" not in shown


async def test_a_view_does_not_hold_the_event_loop_of_the_server(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendering, go_on = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> str:
        rendering.set()
        go_on.wait(30)
        return "drawn"

    monkeypatch.setattr("tstore.service.page.site.render", slow)
    async with client_of(server, READ) as client:
        view = asyncio.create_task(client("GET", "/-/page/", Accept="text/html"))
        assert await asyncio.to_thread(rendering.wait, 30)
        for path in ("/-/health", "/?list", "/tstore.json"):
            assert (await asyncio.wait_for(client("GET", path), 25)).status == 200
        assert not view.done()
        go_on.set()
        assert (await view).body == b"drawn"


async def test_few_long_responses_wait_for_slow_readers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = threading.Semaphore(0)

    def long(*_: object, **__: object) -> str:
        rendered.release()
        return "x" * (32 << 20)

    monkeypatch.setattr("tstore.service.page.site.render", long)
    url = urlsplit(server.url)
    head = (
        f"GET /-/page/ HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {READ}\r\nAccept: text/html\r\n\r\n"
    )
    slow = [await asyncio.open_connection(url.hostname, url.port) for _ in range(6)]
    for _, writer in slow:
        writer.write(head.encode())
    for _ in range(3):  # of four: one turn is for other clients
        assert await asyncio.to_thread(rendered.acquire, timeout=30)
    async with client_of(server, ADMIN) as other:
        assert (await other("GET", "/-/page/", Accept="text/html")).status == 200
    assert rendered.acquire(blocking=False)
    assert not rendered.acquire(blocking=False)
    for _, writer in slow:
        writer.transport.abort()


async def test_views_of_equal_chunks_share_what_was_computed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    RESULTS.clear()

    async def no_more(*_: object) -> AsyncIterator[Batch]:
        raise NotFound("chunks are read")
        yield ()

    async with client_of(server, READ) as client:

        async def problem(path: str, at: int) -> str | None:
            response = await client("GET", f"/-/page/tensor?path={path}&at={at}", Accept="application/json")
            found: str | None = json.loads(response.body)["problem"]
            return found

        assert await problem("params/b", 1) is None
        assert await problem("params/w", 1) is None
        monkeypatch.setattr(Sample, "batches", no_more)
        assert await problem("params/b", 2) is None  # it is the same in both steps
        assert await problem("params/w", 1) is None
        assert await problem("params/w", 2) == "chunks are read"
