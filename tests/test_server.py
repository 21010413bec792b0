"""A store over HTTP: what each request is answered, by a real server and over real sockets."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from tstore.server import Server

CREATE = {"If-None-Match": "*"}
MARKER = b'{"format": 1, "uuid": "00000000-0000-4000-8000-000000000000"}'
PACK = "/txn/abc/pack-0-0"


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: Any


class Client:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def __call__(self, method: str, path: str, data: Any = None, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        data = io.BytesIO(data) if isinstance(data, bytes) else data
        async with self.session.request(method, path, data=data, headers=named) as response:
            return Answer(response.status, await response.read(), response.headers)

    async def create(self, path: str, data: Any, **headers: str) -> Answer:
        return await self("PUT", path, data, If_None_Match="*", **headers)


@pytest.fixture(params=["folder", "memory"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server]:
    async with Server(tmp_path / "store" if request.param == "folder" else f"memory://{tmp_path}") as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(server.url) as session:
        yield Client(session)


async def test_an_object_is_created_once_and_read_in_parts(client: Client) -> None:
    body = bytes(range(256)) * (20 << 10)  # 5 MiB, longer than a piece
    assert (await client("GET", PACK)).status == (await client("HEAD", PACK)).status == 404
    assert (await client.create(PACK, body)).status == 201
    assert (await client.create(PACK, b"other")).status == 412
    whole = await client("GET", PACK)
    assert (whole.status, whole.body) == (200, body)
    assert whole.headers["Server"].startswith("tstore/")
    head = await client("HEAD", PACK)
    assert head.headers["Content-Length"] == str(len(body))
    assert head.headers["ETag"] == whole.headers["ETag"]
    assert float(head.headers["X-TStore-Age"]) < 60
    for asked, part in [
        ("bytes=0-0", slice(0, 1)),
        ("bytes=5-1000", slice(5, 1001)),
        (f"bytes={len(body) - 3}-", slice(-3, None)),
        ("bytes=-4", slice(-4, None)),
        (f"bytes=-{len(body) + 9}", slice(0, None)),
        (f"bytes=7-{len(body) + 9}", slice(7, None)),
    ]:
        answer = await client("GET", PACK, Range=asked)
        assert (answer.status, answer.body) == (206, body[part])
        start, stop, _ = part.indices(len(body))
        assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(body)}"
    for asked in (f"bytes={len(body)}-", "bytes=9-3", "bytes=-0"):
        answer = await client("GET", PACK, Range=asked)
        assert (answer.status, answer.headers["Content-Range"]) == (416, f"bytes */{len(body)}")
    for asked in ("bytes=0-1,5-6", "lines=0-1", "bytes=a-b", "bytes=-"):
        assert (await client("GET", PACK, Range=asked)).status == 200


async def test_conditions_of_a_read(client: Client) -> None:
    await client.create(PACK, b"abc")
    etag = (await client("GET", PACK)).headers["ETag"]
    assert not etag.startswith("W/")
    assert (await client("GET", PACK, If_None_Match=etag)).status == 304
    assert (await client("GET", PACK, If_None_Match='"other"')).status == 200
    assert (await client("GET", PACK, If_Match='"other"')).status == 412
    assert (await client("GET", PACK, If_Match=etag, Range="bytes=1-")).body == b"bc"
    assert (await client("GET", PACK, If_Range=etag, Range="bytes=1-")).status == 206
    assert (await client("GET", PACK, If_Range='"other"', Range="bytes=1-")).body == b"abc"


async def test_only_a_hint_or_a_heartbeat_is_replaced(client: Client) -> None:
    for path in ("/latest", "/txn/abc/alive-00000-of-00002"):
        etags = set()
        for text in (b"1", b"2"):
            assert (await client("PUT", path, text)).status == 204
            answer = await client("GET", path)
            assert answer.body == text
            etags.add(answer.headers["ETag"])
        assert len(etags) == 2
    for path in ("/tstore.json", PACK, "/commits/00000000000000000001"):
        assert (await client("PUT", path, MARKER)).status == 428
        assert (await client("GET", path)).status == 404
    assert (await client("PUT", PACK, b"x", If_None_Match='"abc"')).status == 400


async def test_one_of_many_racing_creates_wins(client: Client) -> None:
    bodies = [b"%d" % i * 300_000 for i in range(20)]
    answers = await asyncio.gather(*[client.create(PACK, body) for body in bodies])
    [winner] = [body for body, answer in zip(bodies, answers, strict=True) if answer.status == 201]
    assert sorted({answer.status for answer in answers}) == [201, 412]
    assert (await client("GET", PACK)).body == winner


async def test_a_list_comes_in_pages(client: Client) -> None:
    names = [f"txn/{t}/pack-{i}" for t in ("a", "a-b", "b") for i in range(5)]
    for name in [*names, "latest"]:
        await client.create(f"/{name}", b"12345")

    async def listed(query: str) -> tuple[list[str], list[str], int]:
        entries, folders, pages, after = [], [], 0, ""
        while after is not None:
            answer = await client.session.get(f"/?list{query}&after={after}")
            document = await answer.json()
            entries += document["entries"]
            folders += document["folders"]
            after, pages = document["next"], pages + 1
        assert all(e["size"] == 5 for e in entries)
        return [e["key"] for e in entries], folders, pages

    everything = sorted([*names, "latest"])
    assert await listed("") == (everything, [], 1)
    for limit in (1, 2, 7):
        assert await listed(f"&limit={limit}") == (everything, [], -(-len(everything) // limit))
    assert await listed("&prefix=txn/a/") == (names[:5], [], 1)
    assert await listed("&prefix=txn/a/pack-3&delimiter=/") == ([names[3]], [], 1)
    assert await listed("&delimiter=/") == (["latest"], ["txn/"], 1)
    for limit in (1, 2, 100):
        keys, folders, _ = await listed(f"&prefix=txn/&delimiter=/&limit={limit}")
        assert (keys, folders) == ([], ["txn/a-b/", "txn/a/", "txn/b/"])
    assert await listed("&prefix=gone/") == ([], [], 1)
    for query in ("&prefix=../", "&limit=0", "&limit=x", "&delimiter=-", "&what=1", "&prefix=%ff", "&list"):
        assert (await client("GET", f"/?list{query}")).status == 400
    assert (await client("GET", "/")).status == 404


async def test_what_is_removed_is_gone(client: Client) -> None:
    await client.create(PACK, b"abc")
    for _ in range(2):
        assert (await client("DELETE", PACK)).status == 204
    assert (await client("GET", PACK)).status == 404
    await client.create("/tstore.json", MARKER)
    assert (await client("DELETE", "/tstore.json")).status == 403
    assert (await client("GET", "/tstore.json")).body == MARKER


async def test_health_and_methods(client: Client) -> None:
    assert (await client("GET", "/-/health")).status == 200
    for method in ("POST", "OPTIONS", "TRACE", "PATCH"):
        assert (await client(method, PACK)).status == 405
