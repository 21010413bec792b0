"""Without injected faults, the endpoint responds like fake-gcs-server.

Where fake-gcs-server is laxer than Google, the endpoint follows Google's documentation.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.support import gcs
from tests.support.gcs_endpoint import Endpoint, checks

BOUNDARY = "b0undary"


class Client:
    """Sends plain requests about one bucket, and returns the parts of the responses to compare."""

    def __init__(self, session: aiohttp.ClientSession, url: str, bucket: str) -> None:
        self.session = session
        self.url = url
        self.bucket = bucket

    async def ask(self, method: str, path: str, data: bytes | None = None, **headers: str) -> tuple[int, Any]:
        url = f"{self.url}/{path.replace('BUCKET', self.bucket)}"
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.request(method, url, data=data, headers=sent) as response:
            body = await response.read()
            if response.status >= 400 or method == "DELETE":  # the messages differ
                return response.status, None
            shown: Any = essence(json.loads(body)) if response.content_type == "application/json" else body
            return response.status, (
                shown,
                response.headers.get("Content-Range"),
                response.headers.get("X-Goog-Hash"),
            )

    async def upload(self, name: str, data: bytes, query: str = "", **metadata: object) -> tuple[int, Any]:
        given = json.dumps({"name": name, **metadata}).encode()
        body = (
            b"--%(b)s\r\nContent-Type: application/json\r\n\r\n%(given)s\r\n"
            b"--%(b)s\r\nContent-Type: application/octet-stream\r\n\r\n%(data)s\r\n--%(b)s--\r\n"
        ) % {b"b": BOUNDARY.encode(), b"given": given, b"data": data}
        path = f"upload/storage/v1/b/BUCKET/o?uploadType=multipart{query}"
        return await self.ask("POST", path, body, Content_Type=f"multipart/related; boundary={BOUNDARY}")


def essence(told: dict[str, Any]) -> Any:
    """Return the parts of a response that must be equal on both servers."""
    if told["kind"] == "storage#objects":
        page = "nextPageToken" in told
        return [essence(item) for item in told.get("items", [])], told.get("prefixes", []), page
    return {k: told.get(k) for k in ("kind", "name", "size", "crc32c", "md5Hash", "metadata")}


@pytest.fixture
async def both(emulator: str) -> AsyncIterator[list[Client]]:
    endpoint = Endpoint()
    async with endpoint.running(), aiohttp.ClientSession() as session:
        yield [
            Client(session, emulator, gcs.new_bucket(emulator)),
            Client(session, endpoint.url, endpoint.new_bucket()),
        ]


async def same(both: list[Client], *request: Any, **headers: str) -> int:
    one, other = [await client.ask(*request, **headers) for client in both]
    assert one == other, request
    return one[0]


async def uploaded(both: list[Client], *request: Any, **metadata: object) -> int:
    one, other = [await client.upload(*request, **metadata) for client in both]
    assert one == other, request
    return one[0]


async def test_uploads_and_their_preconditions(both: list[Client]) -> None:
    crc32c, md5 = checks(b"one\r\n--b")
    assert await uploaded(both, "k", b"one\r\n--b", "&ifGenerationMatch=0", metadata={"a": "b"}) == 200
    assert await uploaded(both, "k", b"two", "&ifGenerationMatch=0") == 412
    assert await uploaded(both, "k", b"one\r\n--b", crc32c=crc32c, md5Hash=md5) == 200
    assert await uploaded(both, "k", b"two", "&ifGenerationMatch=1") == 412
    assert await uploaded(both, "new", b"two", "&ifGenerationMatch=7") == 412
    assert await uploaded(both, "empty", b"") == 200
    assert await same(both, "GET", "storage/v1/b/BUCKET/o/k") == 200


@pytest.mark.parametrize(
    "range", ["", "bytes=0-3", "bytes=3-", "bytes=-4", "bytes=-40", "bytes=8-99", "bytes=10-"]
)
async def test_downloads(both: list[Client], range: str) -> None:
    await uploaded(both, "a/b c%é", b"0123456789")
    headers = {"Range": range} if range else {}
    status = await same(both, "GET", "download/storage/v1/b/BUCKET/o/a%2Fb%20c%25%C3%A9?alt=media", **headers)
    assert status == (416 if range == "bytes=10-" else 206 if range else 200)


async def test_missing_objects(both: list[Client]) -> None:
    for path in ("storage/v1/b/BUCKET/o/k", "download/storage/v1/b/BUCKET/o/k?alt=media", "storage/v1/b/none/o"):
        assert await same(both, "GET", path) == 404
    assert await same(both, "DELETE", "storage/v1/b/BUCKET/o/k") == 404
    assert await same(both, "GET", "storage/v1/b/none/o/k") == 404
    assert await same(both, "POST", "upload/storage/v1/b/none/o?uploadType=media&name=k", b"x") == 404


async def test_deletes(both: list[Client]) -> None:
    await uploaded(both, "k", b"1")
    assert [(await client.ask("DELETE", "storage/v1/b/BUCKET/o/k"))[0] for client in both] == [200, 204]
    assert await same(both, "GET", "storage/v1/b/BUCKET/o/k") == 404


async def test_listings(both: list[Client]) -> None:
    for name in ("a/1", "a/2", "a/b/3", "ab", "b/x", "b/y", "c", "é"):
        await uploaded(both, name, name.encode())
    for query in ("", "prefix=a", "prefix=a/", "delimiter=/", "prefix=a/&delimiter=/", "prefix=zz"):
        assert await same(both, "GET", f"storage/v1/b/BUCKET/o?{query}") == 200
    for query in ("maxResults=3", "prefix=a&maxResults=2", "maxResults=8"):
        assert await same(both, "GET", f"storage/v1/b/BUCKET/o?{query}") == 200


# ---- where fake-gcs-server is laxer than Google


@pytest.fixture
async def strict(both: list[Client]) -> Client:
    return both[1]


async def test_prefixes_count_towards_the_page_size(strict: Client) -> None:
    for name in ("a/1", "b/1", "c/1", "d"):
        await strict.upload(name, b"")
    _, (page, *_) = await strict.ask("GET", "storage/v1/b/BUCKET/o?maxResults=3&delimiter=/")
    assert page == ([], ["a/", "b/", "c/"], True)


async def test_checksums_are_verified(strict: Client) -> None:
    assert (await strict.upload("k", b"x", crc32c="AAAAAA=="))[0] == 400
    assert (await strict.upload("k", b"x", md5Hash="AAAAAA=="))[0] == 400
    assert (await strict.ask("GET", "storage/v1/b/BUCKET/o/k"))[0] == 404


@pytest.mark.parametrize("kind", ["media", "resumable"])
async def test_preconditions_hold_in_every_kind_of_upload(strict: Client, kind: str) -> None:
    async def create() -> int:
        path = f"upload/storage/v1/b/BUCKET/o?uploadType={kind}&name=k&ifGenerationMatch=0"
        if kind == "media":
            return (await strict.ask("POST", path, b"x"))[0]
        url = f"{strict.url}/{path.replace('BUCKET', strict.bucket)}"
        async with strict.session.post(url) as begun:
            where = begun.headers["Location"]
        async with strict.session.put(where, data=b"x") as ended:
            return ended.status

    assert [await create(), await create()] == [200, 412]


async def test_preconditions_hold_in_reads_and_deletes(strict: Client) -> None:
    await strict.upload("k", b"x")
    for method, path in [("GET", "storage/v1"), ("GET", "download/storage/v1"), ("DELETE", "storage/v1")]:
        assert (await strict.ask(method, f"{path}/b/BUCKET/o/k?ifGenerationMatch=1"))[0] == 412
        assert (await strict.ask(method, f"{path}/b/BUCKET/o/k?ifMetagenerationNotMatch=1"))[0] == 412
    assert (await strict.ask("DELETE", "storage/v1/b/BUCKET/o/k?ifMetagenerationMatch=1"))[0] == 204
