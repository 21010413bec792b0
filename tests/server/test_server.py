"""A store over HTTP: the responses to each request, from a real server over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import trustme
import xxhash

import tstore
from tests.support.http_server import ADMIN, MARKER, PACK, READ, WRITE, Client, client_of, everybody, serving, wire
from tstore.cli import main
from tstore.core.format.frame import seal
from tstore.core.format.objects.encoding import encode
from tstore.core.format.objects.records import Record, Root
from tstore.core.format.objects.references import Manifest
from tstore.core.storage.limits import BODY_RATE, IDLE_SECONDS
from tstore.core.storage.objects import Durability
from tstore.errors import Denied, InvalidArgument, NotAStore, Unavailable
from tstore.lab.simulation.virtual import VirtualLoop
from tstore.service.server import Access, Certificate, JsonLines, Limits, Server, logging_to
from tstore.service.server.quotas import LIMITS, PIECE
from tstore.service.server.responses import Refused
from tstore.service.server.transfers import Transfers

NO_CHUNKS = Manifest((), (), (), (), b"", b"", b"", b"", b"", b"", b"", b"")


def commit(version: int) -> str:
    return f"/commits/{version:020d}"


def record(base: int = 0, **more: object) -> bytes:
    return encode(Record("abc", base, 1.0, **more))  # type: ignore[arg-type]


def forged(made: Record) -> bytes:
    """Return a record that `encode` refuses."""
    return seal(b"R", 1, msgspec.msgpack.encode(made))


@pytest.fixture(params=["folder", "memory", "another server"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server]:
    async with contextlib.AsyncExitStack() as stack:
        place, options = f"memory://{tmp_path}", None
        if request.param != "memory":
            place = str(tmp_path / "store")
        if request.param == "another server":
            behind = await stack.enter_async_context(Server(place, access=everybody()))
            place, options = behind.url, {"token": ADMIN}
        yield await stack.enter_async_context(Server(place, access=everybody(), storage_options=options))


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with client_of(server, WRITE) as client:
        yield client


async def test_an_object_is_created_once_and_read_by_ranges(client: Client) -> None:
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
        response = await client("GET", PACK, Range=asked)
        assert (response.status, response.body) == (206, body[part])
        start, stop, _ = part.indices(len(body))
        assert response.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(body)}"
    for asked in (f"bytes={len(body)}-", "bytes=9-3", "bytes=-0"):
        response = await client("GET", PACK, Range=asked)
        assert (response.status, response.headers["Content-Range"]) == (416, f"bytes */{len(body)}")
    for asked in ("bytes=0-1,5-6", "lines=0-1", "bytes=a-b", "bytes=-"):
        assert (await client("GET", PACK, Range=asked)).status == 200


async def test_an_empty_object(client: Client) -> None:
    assert (await client.create(PACK, b"")).status == 201
    assert (await client("GET", PACK))[:2] == (200, b"")
    assert (await client("GET", PACK, Range="bytes=0-")).status == 416


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
    beats = [b'{"name": "a", "time": %d}' % n for n in range(2)]
    for path, bodies in (("/latest", [b"1", b"2"]), ("/txn/abc/alive-00000-of-00002", beats)):
        etags = set()
        for body in bodies:
            assert (await client("PUT", path, body)).status == 204
            response = await client("GET", path)
            assert response.body == body
            etags.add(response.headers["ETag"])
        assert len(etags) == 2
    for path in ("/tstore.json", PACK, commit(1)):
        assert (await client("PUT", path, MARKER)).status == 428
        assert (await client("GET", path)).status == 404
    assert (await client("PUT", PACK, b"x", If_None_Match='"abc"')).status == 400


async def test_one_of_many_racing_creates_wins(client: Client) -> None:
    bodies = [b"%d" % i * 300_000 for i in range(20)]
    responses = await asyncio.gather(*[client.create(PACK, body) for body in bodies])
    [winner] = [body for body, response in zip(bodies, responses, strict=True) if response.status == 201]
    assert sorted({response.status for response in responses}) == [201, 412]
    assert (await client("GET", PACK)).body == winner


async def test_a_body_is_checked_against_its_checksum(client: Client) -> None:
    assert (await client.create(PACK, b"abd", X_TStore_XXH3=xxhash.xxh3_128_hexdigest(b"abc"))).status == 409
    assert (await client("GET", PACK)).status == 404
    assert (await client.create(PACK, b"abc", X_TStore_XXH3=xxhash.xxh3_128_hexdigest(b"abc"))).status == 201


async def test_a_refused_body_gets_no_100_continue(server: Server, client: Client) -> None:
    await client.create(PACK, b"abc")
    for path, token, status in (
        (PACK, WRITE, 412),
        ("/txn/abc/pack-1", READ, 403),
        ("/txn/abc/pack-1", WRITE, 201),
    ):
        async with wire(server) as raw:
            await raw.send(
                f"PUT {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nIf-None-Match: *\r\n"
                "Content-Length: 3\r\nExpect: 100-continue\r\n\r\n".encode()
            )
            if status == 201:
                assert await raw.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
                await raw.send(b"abc")
            assert (await raw.response())[0] == status


async def test_a_body_in_chunks(client: Client) -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"x" * 100_000

    response = await client.create(PACK, body())
    chunked = {201: b"x" * 500_000, 411: None}  # storage in memory requires a Content-Length
    assert response.status in chunked
    assert response.status == 411 or (await client("GET", PACK)).body == chunked[201]


async def test_a_long_pack_needs_local_storage() -> None:
    async with Server("memory://a-long-pack") as server, wire(server) as raw:
        await raw.send(b"PUT %s HTTP/1.1\r\nHost: 127.0.0.1\r\nIf-None-Match: *\r\n" % PACK.encode())
        await raw.send(b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % (1 << 30))
        assert await raw.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"


async def test_metadata_that_would_break_the_store_is_refused(client: Client) -> None:
    whole = record()
    for body in (
        b"",
        b"nonsense",
        whole[:-1],
        whole[:20] + bytes([whole[20] ^ 1]) + whole[21:],
        encode(NO_CHUNKS),
        record(base=1),
        record(collected=9),
        forged(Record("", 0, 1.0)),
        forged(Record("../x", 0, 1.0)),
        forged(Record("abc", 0, float("nan"))),
        forged(Record("abc", 0, 1.0, manifests=(msgspec.structs.replace(NO_CHUNKS, packs=("a",)),))),
        forged(Record("abc", 0, 1.0, manifests=(msgspec.structs.replace(NO_CHUNKS, number=b"1"),))),
    ):
        response = await client.create(commit(1), body)
        assert response.status == 422, response
        assert json.loads(response.body)["error"].startswith("commits/0000")
    assert (await client.create(commit(2), record())).status == 422  # there is no version 1
    assert (await client.create(commit(1), whole)).status == 201
    assert (await client.create(commit(1), record(message="other"))).status == 412
    assert (await client("GET", commit(1))).body == whole
    assert (await client.create(commit(2), encode(Record("abd", 1, 1.0)))).status == 201
    for path, body in (
        ("/tstore.json", b"{}"),
        ("/tstore.json", MARKER[:-1] + b',"checksum":"0"}'),
        ("/tstore.json", b'{"format":2}'),
        ("/latest", b"../1"),
        ("/roots/00000000000000000001", whole),
        ("/txn/abc/manifest-1", whole),
        ("/txn/abc/part-00000-of-00002", whole),
        ("/txn/abc/alive-0", b"[1]"),
        ("/txn/abc/alive-0", b"[" * 3000),
        ("/txn/abc/alive-0", b'{"x":' + b"[" * 4000),
        ("/txn/abc/merging-0-00000-of-00002", b"x"),
        ("/txn/abc/merging-0-00000-of-00002", b""),
        ("/txn/abc/merging-0-00000-of-00002", b"withdrawn by "),
        ("/txn/abc/merging-0-00000-of-00002", b"withdrawn by 1 "),
    ):
        assert (await client.create(path, body)).status == 422, path
        assert (await client("GET", path)).status == 404
    for level, body in enumerate((b"0", b"99999", b"withdrawn by 1")):
        assert (await client.create(f"/txn/abc/merging-{level}-00000-of-00002", body)).status == 201


async def test_a_root_of_another_record_is_refused(client: Client) -> None:
    for version in range(1, 65):
        data = encode(Record(f"t{version}", 0, 1.0))
        assert (await client.create(commit(version), data)).status == 201
    key = "/roots/00000000000000000064"
    response = await client.create(key, encode(Root(64, bytes(16), {}, NO_CHUNKS)))
    assert response.status == 422
    assert "the root of another record" in json.loads(response.body)["error"]
    assert (await client.create(key, encode(Root(64, data[-16:], {"t": 1}, NO_CHUNKS)))).status == 422
    assert (await client.create(key, encode(Root(64, data[-16:], {}, NO_CHUNKS)))).status == 201


async def test_only_object_names_of_a_store_are_served(tmp_path: Path) -> None:
    (tmp_path / "tstore.json").write_bytes(MARKER)
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "x").write_text("secret")
    (tmp_path / "txn" / "empty").mkdir(parents=True)
    async with Server(tmp_path, access=everybody()) as server, client_of(server, ADMIN) as client:
        for path in ("/secret.txt", "/commits/x", "/commits", "/txn", "/txn/abc/x", "/commits/1"):
            assert (await client("GET", path)).status == 404
            assert (await client.create(path, b"x")).status == 403
            assert (await client("DELETE", path)).status == 403
        listed = json.loads((await client("GET", "/?list")).body)
        assert [e["key"] for e in listed["entries"]] == ["tstore.json"]
        assert json.loads((await client("GET", "/?list&prefix=txn/&delimiter=/")).body)["folders"] == []
    async with Server(tmp_path, access=everybody(), names="any") as server, client_of(server, ADMIN) as client:
        assert (await client("GET", "/secret.txt")).body == b"secret"
        for name in ("odd name", "Ünïcode", "per%cent", "q?u#e", "a+b&c=d"):
            path = f"/x/{''.join(f'%{b:02X}' for b in name.encode())}"
            assert (await client.create(path, name.encode())).status == 201
            assert (await client("GET", path)).body == name.encode()
            assert (tmp_path / "x" / name).exists()
            assert (await client("DELETE", path)).status == 204


async def test_a_list_comes_in_pages(client: Client) -> None:
    names = [f"txn/{t}/pack-{i}" for t in ("a", "a-b", "b") for i in range(5)]
    for name in [*names, "latest"]:
        await client.create(f"/{name}", b"12345")

    async def listed(query: str) -> tuple[list[str], list[str], int]:
        keys: list[str] = []
        folders: list[str] = []
        after: str | None = ""
        pages = 0
        while after is not None:
            document = json.loads((await client("GET", f"/?list{query}&after={after}")).body)
            assert all(e["size"] == 5 for e in document["entries"])
            keys += [e["key"] for e in document["entries"]]
            folders += document["folders"]
            after, pages = document["next"], pages + 1
        return keys, folders, pages

    everything = sorted([*names, "latest"])
    assert await listed("") == (everything, [], 1)
    for limit in (1, 2, 7):
        assert await listed(f"&limit={limit}") == (everything, [], -(-len(everything) // limit))
    assert await listed("&prefix=txn/a/") == (names[:5], [], 1)
    assert await listed("&prefix=txn/a/pack-3&delimiter=/") == ([names[3]], [], 1)
    assert await listed("&delimiter=/") == (["latest"], ["txn/"], 1)
    for limit in (1, 2, 100):
        objects, folders, _ = await listed(f"&prefix=txn/&delimiter=/&limit={limit}")
        assert (objects, folders) == ([], ["txn/a-b/", "txn/a/", "txn/b/"])
    assert await listed("&prefix=gone/") == ([], [], 1)
    for query in ("&prefix=../", "&limit=0", "&limit=x", "&delimiter=-", "&what=1", "&prefix=%ff", "&list"):
        assert (await client("GET", f"/?list{query}")).status == 400
    assert (await client("GET", "/")).status == 404


async def test_a_long_list_without_folders_is_computed_once() -> None:
    """Its pages come from one listing; a new list sees new objects."""
    names = [f"txn/t{i:04}/pack-0" for i in range(1500)]
    async with Server("memory://a-long-list") as server, client_of(server) as client:
        storage = server._served.storage
        for name in names:
            await storage.create(name, b"x", Durability.NONE)
        calls: list[str] = []
        real = storage.list

        async def counted(prefix: str) -> list[str]:
            calls.append(prefix)
            return await real(prefix)

        storage.list = counted  # type: ignore[method-assign]

        async def listed(query: str) -> list[str]:
            names: list[str] = []
            after: str | None = ""
            while after is not None:
                document = json.loads((await client("GET", f"/?list{query}&limit=100&after={after}")).body)
                names += [e["key"] for e in document["entries"]] + document["folders"]
                after = document["next"]
            return names

        assert await listed("") == names
        assert await listed("&prefix=txn/&delimiter=/") == [name[:-6] for name in names]
        assert calls == ["", "txn/"]
        await client.create("/txn/t9/pack-0", b"x")
        await storage.delete(names[-1])
        assert await listed("") == [*names[:-1], "txn/t9/pack-0"]
        assert calls == ["", "txn/", ""]


async def test_only_condemned_objects_are_removed(tmp_path: Path) -> None:
    place = tmp_path / "store"
    await tstore.save(place, {"w": np.arange(300_000)}, 1)
    await tstore.save(place, {"w": np.arange(300_000) + 1}, 2)
    old, new = sorted(place.glob("txn/*/pack-*"), key=os.path.getmtime)
    async with Server(place, access=everybody()) as server, client_of(server, WRITE) as client:
        admin = client.with_token(ADMIN)
        paths = [f"/{p.relative_to(place)}" for p in (old, new)]
        for path in paths:
            assert (await client("DELETE", path)).status == 403
            assert (await admin("DELETE", path)).status == 403
        for path in ("/tstore.json", commit(1), "/latest"):
            assert (await admin("DELETE", path)).status == 403
        data = old.read_bytes()
        store = await tstore.open(place)
        await store.collect(tstore.Keep(last=1))
        old.parent.mkdir()
        old.write_bytes(data)  # as left by a gc that died before it had deleted everything
        assert (await client("DELETE", paths[0])).status == 403
        for _ in range(2):
            assert (await admin("DELETE", paths[0])).status == 204
        assert not old.parent.exists()
        assert (await admin("DELETE", paths[1])).status == 403
        beat = "/txn/abc/alive-00000-of-00002"
        await client("PUT", beat, b'{"name": "a", "time": 1.0}')
        assert (await client("DELETE", beat)).status == 204
        assert (await client("GET", beat)).status == 404


async def test_scopes(server: Server, client: Client) -> None:
    await client.create(PACK, b"abc")
    for token, expected in (
        (None, [401, 401, 401, 401]),
        ("writer-0123456780", [401, 401, 401, 401]),
        (f"{WRITE}=", [401, 401, 401, 401]),
        ("", [401, 401, 401, 401]),
        (READ, [200, 200, 403, 403]),
        (WRITE, [200, 200, 204, 403]),
        (ADMIN, [200, 200, 204, 204]),
    ):
        asking = client.with_token(token)
        responses = [
            await asking("GET", PACK),
            await asking("GET", "/?list"),
            await asking("PUT", "/latest", b"1"),
            await asking("DELETE", "/txn/abc/pack-gone"),
        ]
        assert [a.status for a in responses] == expected
        assert all("WWW-Authenticate" in a.headers for a in responses if a.status in (401, 403))
        assert (await asking("GET", "/-/health")).status == 200
    basic = await client.with_token(None)("GET", PACK, Authorization=f"Basic {READ}")
    assert basic.status == 401


async def test_a_read_only_server_refuses_writes(tmp_path: Path) -> None:
    with pytest.raises(NotAStore, match=r"tstore\.json"):
        await Server(tmp_path, mode="r").__aenter__()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(NotAStore, match="other files"):
        await Server(tmp_path).__aenter__()
    (tmp_path / "tstore.json").write_bytes(MARKER)
    async with Server(tmp_path, mode="r", access=everybody()) as server, client_of(server, ADMIN) as client:
        assert (await client("GET", "/tstore.json")).body == MARKER
        assert (await client("PUT", "/latest", b"1")).status == 403
        assert (await client("DELETE", PACK)).status == 403
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "tstore.json"]


async def test_anonymous_reads_are_allowed_if_enabled(tmp_path: Path) -> None:
    access = Access({WRITE: "write"}, anonymous="read")
    async with Server(tmp_path, access=access) as server, client_of(server) as client:
        assert (await client("GET", "/latest")).status == 404
        assert (await client("PUT", "/latest", b"1")).status == 403
        assert (await client.with_token(WRITE)("PUT", "/latest", b"1")).status == 204


MALFORMED_HOSTS = (
    "127.0.0.1:80@evil.example",
    "localhost@evil.example",
    "evil.example@127.0.0.1",
    "127.0.0.1:80:80",
    "127.0.0.1:8o",
    "127.0.0.1/evil.example",
    "127.0.0.1, evil.example",
    "[127.0.0.1",
    "[::1]evil.example",
    "[::1%@evil.example]",
)


async def test_a_malformed_host_is_refused_whatever_the_token(tmp_path: Path) -> None:
    async with Server(tmp_path, access=everybody()) as server, client_of(server, READ) as client:
        for host in MALFORMED_HOSTS:
            assert (await client("GET", "/latest", Host=host)).status == 400
        for host in ("any.example", "any_name:80", "[fe80::1%eth0]:80", "127.0.0.1:"):
            assert (await client("GET", "/latest", Host=host)).status == 404


async def test_without_tokens_other_host_names_are_refused(tmp_path: Path) -> None:
    """A browser sends the name of a page that resolves to this machine in the Host header (DNS rebinding)."""
    async with Server(tmp_path) as server, client_of(server) as client:
        for host in ("127.0.0.1", "127.0.0.1:80", "localhost:1", "[::1]:8080", "[::1]"):
            assert (await client("GET", "/latest", Host=host)).status == 404
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", *MALFORMED_HOSTS):
            assert (await client("GET", "/latest", Host=host)).status in (400, 403)
        assert (await client("DELETE", PACK)).status == 403


async def test_tokens_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# of the cluster\n\nread {READ}\nwrite  {WRITE}\n")
    for mode in (0o644, 0o640, 0o604, 0o660, 0o601):
        file.chmod(mode)
        with pytest.raises(InvalidArgument, match=f"mode {mode:04o}.*chmod 600.*Kubernetes.*defaultMode: 0400"):
            Access.read(file)
    file.chmod(0o600)
    access = Access.read(file)
    assert access.token_count == 2
    assert READ not in repr(access)
    file.write_bytes(b"\xef\xbb\xbfread " + READ.encode() + b"\r\n")  # some editors write a byte order mark
    assert Access.read(file).token_count == 1
    for text, said in ((f"{WRITE} write", "scope"), (f"none {WRITE}", "scope read, write or admin")):
        with pytest.raises(InvalidArgument, match=said):
            Access.parse(text, "tokens")
    with pytest.raises(InvalidArgument, match="line 2: the same token has another scope above"):
        Access.parse(f"read {WRITE}\nwrite {WRITE}", "tokens")
    for text in (
        f"write {WRITE} more",
        WRITE,
        f"owner {WRITE}",
        "write short",
        f"read {WRITE}\nwrite {WRITE}",
        "#\n",
    ):
        with pytest.raises(InvalidArgument) as caught:
            Access.parse(text, "tokens")
        assert WRITE not in str(caught.value)
    with pytest.raises(InvalidArgument):
        Access({WRITE: "all"})


async def test_a_public_address_requires_tokens(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org", ""):
        for access in (None, Access(anonymous="read")):
            with pytest.raises(InvalidArgument, match="needs tokens"):
                Server(tmp_path, host=host, access=access)
    async with Server(tmp_path, host="0.0.0.0", access=everybody()) as server, client_of(server, READ) as client:
        assert (await client("GET", "/latest")).status == 404


async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        with pytest.raises(Unavailable, match="another port"):
            await Server(tmp_path, port=int(server.url.rsplit(":", 1)[1])).__aenter__()


async def test_clients_that_leave_early_are_not_logged_as_faults(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Server(tmp_path / "store", access=everybody()) as server:
        async with client_of(server, WRITE) as client:
            assert (await client.create(PACK, b"abc")).status == 201
            asked = f"GET {PACK} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {READ}\r\n\r\n".encode()
            for times in range(60):
                async with wire(server) as gone:
                    await gone.send(asked * (times % 3 + 1))
                    gone.writer.transport.abort()
            assert (await client("GET", PACK)).body == b"abc"
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


async def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made.private_key_pem.write_to_path(key)
    for blob in made.cert_chain_pems:
        blob.write_to_path(cert, append=True)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    body = np.random.default_rng(0).bytes(3_000_000)
    certificate = Certificate(str(cert), str(key))
    async with Server(tmp_path / "store", certificate=certificate) as server:
        assert server.url.startswith("https://")
        async with client_of(server) as client:
            with pytest.raises(OSError, match="certificate"):
                await client("GET", "/latest")
        connector = aiohttp.TCPConnector(ssl=trusting)
        async with client_of(server, connector=connector) as client:
            assert (await client.create(PACK, body)).status == 201
            assert (await client("GET", PACK, Range="bytes=7-")).body == body[7:]
    with pytest.raises(InvalidArgument, match="PEM"):
        Server(tmp_path, certificate=Certificate(str(key), str(cert)))
    with pytest.raises(InvalidArgument, match=r"gone\.pem"):
        Server(tmp_path, certificate=Certificate(str(cert), str(tmp_path / "gone.pem")))


async def test_each_request_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tstore.server")
    async with Server(tmp_path, access=everybody()) as server, client_of(server, WRITE) as client:
        await client.create(PACK, b"abc")
        await client("GET", PACK)
        await client.with_token("wrong-0123456789")("GET", "/?list&prefix=hidden")
        await client("GET", "/%0a%1b")
    lines = [JsonLines().format(r) for r in caplog.records if r.name == "tstore.server.access"]
    assert all("\n" not in line and line.isascii() for line in lines)
    logged = [json.loads(line) for line in lines]
    assert [(e["method"], e["path"], e["status"], e["scope"]) for e in logged] == [
        ("PUT", PACK, 201, "write"),
        ("GET", PACK, 200, "write"),
        ("GET", "/", 401, "none"),
        ("GET", "/%0A%1B", 400, "write"),
    ]
    assert [(e["received"], e["sent"]) for e in logged[:2]] == [(3, 0), (0, 3)]
    assert not any(secret in caplog.text + "".join(lines) for secret in (WRITE, "wrong-0123456789", "hidden"))


async def test_uploads_in_progress_at_shutdown_are_stored(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, wire(server) as raw, wire(server) as idle:
        await raw.send(b"PUT %s HTTP/1.1\r\nHost: 127.0.0.1\r\nIf-None-Match: *\r\n" % PACK.encode())
        await raw.send(b"Content-Length: 6\r\nExpect: 100-continue\r\n\r\n")
        await raw.reader.readuntil(b"\r\n\r\n")  # it is at work
        await raw.send(b"abc")
        ending = asyncio.ensure_future(server.__aexit__(None, None, None))
        await asyncio.sleep(0)
        await idle.send(b"GET /-/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert (await idle.response())[0] == 503
        await raw.send(b"def")
        assert (await raw.response())[0] == 201
        await ending
        assert await idle.rest() == b""
    assert (tmp_path / PACK[1:]).read_bytes() == b"abcdef"


async def test_shutdown_does_not_wait_forever(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with Server(tmp_path, limits=Limits(drain=0.05)) as server:
            raw = await stack.enter_async_context(wire(server))
            await raw.send(b"PUT %s HTTP/1.1\r\nHost: 127.0.0.1\r\nIf-None-Match: *\r\n" % PACK.encode())
            await raw.send(b"Content-Length: 6\r\nExpect: 100-continue\r\n\r\n")
            await raw.reader.readuntil(b"\r\n\r\n")
        assert await raw.rest() == b""
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


async def test_the_command(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as served:
        async with aiohttp.ClientSession(served.url) as session:
            client = Client(session)
            assert (await client("GET", "/-/health")).status == 200
            assert (await client("GET", PACK)).status == 401
            assert (await client.with_token(WRITE).create(PACK, b"abc")).status == 201
        logged = served.end()
    assert [line["status"] for line in logged] == [200, 401, 201]
    assert WRITE not in str(logged)
    assert (tmp_path / "store" / PACK[1:]).read_bytes() == b"abc"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--host", "0.0.0.0"], 2, "needs tokens"),
        (["--token-file", "open.txt"], 2, "chmod 600 open.txt"),
        (["--token-file", "gone.txt"], 2, "gone.txt"),
        (["--tls-cert", "x.pem"], 2, "--tls-key"),
        (["--tls-cert", "x.pem", "--tls-key", "y.pem"], 2, "x.pem can't be read"),
        ([], 1, "it does not exist, or is empty; check the path, or pass --create"),
        (["--read-only", "--create"], 1, "not a tstore store"),
        (["--token", "abc"], 2, "--token"),
    ],
)
def test_misuse_of_serve_is_refused(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    (tmp_path / "open.txt").write_text(f"write {WRITE}")
    (tmp_path / "open.txt").chmod(0o644)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as errors:
        patch.chdir(tmp_path)
        assert main(["serve", "store", *arguments]) == code
    assert said in errors.getvalue()
    assert errors.getvalue().count("\n") == 1
    assert WRITE not in errors.getvalue()


@pytest.mark.parametrize("text", ["", " ", "# no token"])
def test_an_empty_token_variable_does_not_allow_anonymous_writes(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TSTORE_SERVER_TOKENS", text)
    assert main(["serve", str(tmp_path), "--create", "--port", "0"]) == 2
    assert "TSTORE_SERVER_TOKENS contains no token" in capsys.readouterr().err


async def test_an_unread_log_delays_no_response(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with serving(tmp_path / "store", stderr=writing) as served:
        os.close(writing)
        async with aiohttp.ClientSession(served.url) as session:
            client = Client(session, WRITE)
            for _ in range(20):
                responses = await asyncio.gather(*[client("GET", f"/{'x' * 900}") for _ in range(20)])
                assert {response.status for response in responses} == {404}
        served.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(served.process.wait, 60) == 0
    os.close(reading)


def test_ctrl_c_is_a_regular_shutdown(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as served:
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(60) == 0
        assert "Traceback" not in served.logged()


def test_dropped_log_entries_are_counted(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    total, log = 12_000, logging.getLogger("tstore.server.access")
    with logging_to(writing), (tmp_path / "log").open("wb") as file:
        for number in range(total):
            log.info("entry %d", number)
        reader = subprocess.Popen(["cat"], stdin=reading, stdout=file)
        os.close(reading)
    os.close(writing)
    assert reader.wait(60) == 0
    lines = [json.loads(line)["message"] for line in (tmp_path / "log").read_text().splitlines()]
    dropped = sum(int(line.split()[0]) for line in lines if "dropped" in line)
    assert dropped > 0
    assert dropped + sum("dropped" not in line for line in lines) == total
    assert lines[0] == "entry 0"


async def test_tokens_are_reloaded_on_sighup(tmp_path: Path) -> None:
    file = tmp_path / "tokens"

    def write(text: str) -> None:
        file.write_text(text)
        file.chmod(0o600)

    write(f"read {READ}\n")
    with serving(tmp_path / "store", "--token-file", str(file)) as served:
        async with aiohttp.ClientSession(served.url) as session:
            client = Client(session)

            async def status(token: str) -> int:
                return (await client.with_token(token)("GET", PACK)).status

            async def told(text: str) -> None:
                served.process.send_signal(signal.SIGHUP)
                async with asyncio.timeout(20):
                    while text not in served.logged():
                        await status(READ)

            assert [await status(READ), await status(WRITE)] == [404, 401]
            write(f"write {WRITE}\n")
            await told("the tokens were reloaded; there are now 1")
            assert [await status(READ), await status(WRITE)] == [401, 404]
            write("nonsense\n")
            await told("the current tokens are kept")
            assert [await status(READ), await status(WRITE)] == [401, 404]
        assert WRITE not in str(served.end())


async def test_health_and_methods(client: Client) -> None:
    assert (await client("GET", "/-/health")).status == 200
    for method in ("POST", "OPTIONS", "TRACE", "PATCH"):
        assert (await client(method, PACK)).status == 405


# ---- whole stores


async def test_garbage_is_collected_with_the_permission_for_it(tmp_path: Path) -> None:
    async with Server(tmp_path / "store", access=everybody()) as server:
        async with await tstore.open(server.url, storage_options={"token": WRITE}) as store:
            for step in range(4):
                await tstore.save(store, {"w": np.full(300_000, step)}, step)
            with pytest.raises(Denied, match=r"scope admin.*Nothing was collected"):
                await store.collect(tstore.Keep(last=2))
            assert await tstore.steps(store) == [0, 1, 2, 3]
            assert len([c async for c in store.history()]) == 4
        async with await tstore.open(server.url, storage_options={"token": ADMIN}) as store:
            await store.collect(tstore.Keep(last=2))
            assert await tstore.steps(store) == [2, 3]
            assert (await store.verify()).faults == []
    assert len(list(tmp_path.glob("store/txn/*"))) == 2


async def test_no_commit_is_lost_among_racing_writers(tmp_path: Path) -> None:
    """Two servers of one folder, and a writer that uses neither."""
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(Server(tmp_path / "store")) for _ in range(2)]
        places = [servers[0].url, servers[1].url, servers[0].url, str(tmp_path / "store")]
        stores = [await stack.enter_async_context(await tstore.open(place)) for place in places]

        async def write(number: int) -> None:
            for i in range(5):
                async with stores[number].transaction() as tx:
                    array = await tx.create_array(f"w{number}.{i}", (40_000,), "float64")
                    await array.write(np.full(40_000, float(number)))

        await asyncio.gather(*[write(number) for number in range(4)])
        snapshot = await stores[0].snapshot()
        assert snapshot.version == 20
        for number in range(4):
            for i in range(5):
                assert (await (await snapshot.array(f"w{number}.{i}")).read() == number).all()
        assert (await stores[3].verify()).faults == []


async def test_paths_have_the_same_depth_limit_through_a_server(tmp_path: Path) -> None:
    """A folder and a server accept the same paths, and longer ones are refused by the call."""
    deepest = "/".join("a" * 256)
    async with Server(tmp_path / "served") as server:
        for url in (server.url, tmp_path / "folder"):
            async with await tstore.open(url) as store:
                async with store.transaction() as tx:
                    await (await tx.create_array(deepest, (4,), "f4")).write(1)
                    with pytest.raises(tstore.errors.InvalidArgument, match="257 levels, more than 256"):
                        await tx.create_array(deepest + "/a", (4,), "f4")
                    with pytest.raises(tstore.errors.InvalidArgument, match="300 levels, more than 256"):
                        await tx.create_group("/".join("b" * 300))
                assert (await store.snapshot()).paths() == [deepest]


async def test_copying_a_collected_store_without_tokens_is_denied_with_advice(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for step in range(3):
        await tstore.save(source, {"w": np.arange(2000.0) + step}, step)
    async with await tstore.open(source) as store:
        await store.collect(tstore.Keep(last=1))
    async with Server(tmp_path / "served") as server:
        with pytest.raises(Denied, match=r"admin.*serve with a --token-file that has one, or copy to a folder"):
            await tstore.copy(source, server.url)


@pytest.mark.parametrize(
    "name", ["http://store.example", "store.example:7341", "store.example/path", "", "*", "größe.example", "a..b"]
)
def test_an_impossible_hostname_is_refused(name: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"expected a name such as ckpt.example.com, without http://, port"):
        Server(tmp_path, hostnames=["store.example", name])
    assert main(["serve", str(tmp_path), "--create", "--port", "0", "--hostname", name]) == 2
    assert "expected a name such as" in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["0", "-1", "1025", "100000000", "x"])
def test_an_impossible_rate_is_refused(rate: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["serve", str(tmp_path), "--create", "--min-rate", rate]) == 2
    assert "--min-rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    "limits",
    [Limits(rate=0), Limits(rate=1 << 30), Limits(stall=0), Limits(wait=float("nan")), Limits(drain=-1)],
)
def test_invalid_limits_are_refused(limits: Limits, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"Limits\([a-z]+=.*\): expected a number of at least"):
        Server(tmp_path, limits=limits)


@pytest.mark.parametrize("piece", [256 << 10, PIECE])
def test_server_and_client_tolerate_the_same_slowness(piece: int) -> None:
    """32 bodies share 2 Mbit/s: each has the minimum rate, and one pause of the maximum length."""

    async def moved(rate: float) -> int:
        with Transfers(LIMITS).track("client") as transfer:
            while transfer.moved < 64 << 20:
                async with transfer:
                    silence = 0.99 * IDLE_SECONDS if not transfer.moved else 0
                    await asyncio.sleep(silence + piece / rate)
                    transfer.moved += piece
        return transfer.moved

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(moved(BODY_RATE)) == 64 << 20
        with pytest.raises(Refused, match="bytes/s on average"):
            runner.run(moved(BODY_RATE / 2))
