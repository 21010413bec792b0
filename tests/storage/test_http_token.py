"""A token is sent only to the server that it is bound to."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

import tstore
from tests.support.raw_http import RawResponse, Request, Server, ok, serving
from tstore.core.storage.gcs.store import GcsStorage
from tstore.core.storage.http.store import HttpStorage
from tstore.core.storage.http.tokens import find_token, warn_if_cleartext
from tstore.core.storage.objects import PutMode
from tstore.errors import Denied, InvalidArgument, TStoreError
from tstore.service.server import Access
from tstore.service.server import Server as StoreServer

SECRET = "s3cr3t-t0ken-0123456789"
OTHER = "0ther-t0ken-0123456789"
WANTS = ok(b"", "WWW-Authenticate: Bearer", status="401 Unauthorized")


def asking(body: bytes = b"1") -> RawResponse:
    """Return a response that requires a token, any token."""
    return lambda request: ok(body) if "Authorization" in request.headers else WANTS


def shown(server: Server) -> list[str | None]:
    return [r.headers.get("Authorization") for r in server.requests]


def port(server: Server) -> str:
    return server.url.rpartition(":")[2]


@pytest.fixture(autouse=True)
def no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TSTORE_TOKEN")]:
        monkeypatch.delenv(name)


@contextlib.asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[HttpStorage]:
    objects = HttpStorage(url, **options)
    try:
        yield objects
    finally:
        await objects.close()


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tokens"
    path.touch(0o600)
    monkeypatch.setenv("TSTORE_TOKEN_FILE", str(path))
    return path


# ---- tokens and hosts


@pytest.mark.parametrize("with_port", [True, False])
async def test_a_variable_binds_a_token_to_a_host(with_port: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(ok(b"0"), asking()) as server, serving(asking()) as stranger:
        name = f"TSTORE_TOKEN_127_0_0_1_{port(server)}" if with_port else "TSTORE_TOKEN_127_0_0_1"
        monkeypatch.setenv(name, SECRET)
        async with connected(server.url) as store:
            assert [await store.get("k") for _ in range(3)] == [b"0", b"1", b"1"]
            assert shown(server) == [None, None, *[f"Bearer {SECRET}"] * 2], (
                "no token is sent before the server requires one"
            )
        for url in (stranger.url, stranger.url.replace("127.0.0.1", "localhost")):
            async with connected(url) as store:
                if not with_port and url == stranger.url:  # a host without a port covers all its ports
                    assert await store.get("k") == b"1"
                    stranger.requests.clear()
                    continue
                with pytest.raises(Denied, match="wants a token"):
                    await store.get("k")
        assert set(shown(stranger)) == {None}


@pytest.mark.parametrize("with_port", [True, False])
async def test_a_line_of_a_file_binds_a_token_to_a_host(with_port: bool, token_file: Path) -> None:
    async with serving(asking()) as server, serving(asking()) as stranger:
        place = f"127.0.0.1:{port(server)}" if with_port else "127.0.0.1"
        token_file.write_text(
            f"# of my servers\n\n  ckpt.example.com {OTHER}\n{place}\t{SECRET}  \n[::1]:80 {OTHER}\n"
        )
        async with connected(server.url) as store:
            assert await store.get("k") == b"1"
            assert shown(server) == [None, f"Bearer {SECRET}"]
        async with connected(stranger.url.replace("127.0.0.1", "localhost")) as store:
            with pytest.raises(Denied, match="wants a token"):
                await store.get("k")
        assert shown(stranger) == [None]


async def test_a_token_without_a_host_is_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSTORE_TOKEN", SECRET)
    async with serving(asking()) as server, connected(server.url) as store:
        with pytest.raises(Denied) as caught:
            await store.get("k")
        assert shown(server) == [None]
    said = str(caught.value)
    assert SECRET not in said
    assert f"set TSTORE_TOKEN_127_0_0_1_{port(server)}," in said
    assert f"'127.0.0.1:{port(server)} <token>'" in said
    assert "storage_options={'token': …}" in said
    assert "TSTORE_TOKEN is not used" in said


async def test_the_error_without_a_token_says_how_to_pass_one() -> None:
    async with serving(WANTS) as server, connected(server.url.replace("127.0.0.1", "localhost")) as store:
        with pytest.raises(
            Denied, match=r"storage_options.*TSTORE_TOKEN_LOCALHOST_\d+, .*TSTORE_TOKEN_FILE"
        ) as caught:
            await store.get("k")
    assert "not used" not in str(caught.value)


async def test_a_passed_token_is_sent_at_once_and_takes_precedence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TSTORE_TOKEN_127_0_0_1", OTHER)
    async with serving(ok(b"")) as server, connected(server.url, token=SECRET) as store:
        await store.get("k")
        assert shown(server) == [f"Bearer {SECRET}"]


def token_of(url: str) -> str | None:
    token = find_token(URL(url), None)
    return None if token is None else token.header.removeprefix("Bearer ")


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("CKPT_EXAMPLE_COM", "https://ckpt.example.com/runs"),
        ("CKPT_EXAMPLE_COM", "https://CKPT.Example.com:7341"),
        ("CKPT_EXAMPLE_COM_443", "https://ckpt.example.com"),
        ("CKPT_EXAMPLE_COM_80", "http://ckpt.example.com"),
        ("CKPT_EXAMPLE_COM_7341", "http://ckpt.example.com:7341"),
        ("CKPT__1_EXAMPLE_COM", "https://ckpt-1.example.com"),
        ("A____B", "https://a--b"),
        ("XN____NXASMM1C_COM", "https://bücher.com".replace("bücher", "xn--nxasmm1c")),
        ("10_0_0_5", "http://10.0.0.5:7341"),
        ("FILE_7341", "http://file:7341"),
    ],
)
def test_the_environment_variable_of_a_host(name: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"TSTORE_TOKEN_{name}", SECRET)
    assert token_of(url) == SECRET


HOSTS = ["a.b.c", "a-b.c", "a.b-c", "a-b-c", "a--b-c", "a.b--c", "a_b.c", "a.b_c", "a", "a.b", "1.2.3.4", "1.2.3"]
HOSTS += ["[::1]", "[1::2]", "[1:2::3]", "a.b.c.", "file", "c", "7341", "a.7341", "1.2.3.4.5"]


@pytest.mark.parametrize("names", ["a.b.c", "a-b.c", "a_b.c", "1.2.3.4", "1.2.3:4", "a:7341", "a.7341", "file"])
def test_no_two_hosts_share_a_variable(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of a host is never used for another host."""
    meant = URL(f"http://{names}")
    for text in {names, names.replace("_", "-"), names.replace("-", "--")}:
        for of in {text, text.partition(":")[0]}:
            name = "TSTORE_TOKEN_" + "".join(c if c.isalnum() else "_" for c in of.upper())
            if name == "TSTORE_TOKEN_FILE":
                continue
            monkeypatch.setenv(name, SECRET)
            got = {h for h in HOSTS for p in ("", ":4", ":7341") if token_of(f"http://{h}{p}") == SECRET}
            assert len(got) <= 1, (name, got)
            if meant.host in got:
                assert got == {meant.host}
            monkeypatch.delenv(name)


def test_the_most_specific_token_takes_precedence(monkeypatch: pytest.MonkeyPatch, token_file: Path) -> None:
    token_file.write_text("host of-the-host-in-the-file\nhost:1 of-port-1\n[0:0::1]:1 of-v6\nH2 two\n")
    assert [token_of(f"http://{h}") for h in ("host", "host:1", "[::1]:1", "[::1]:2", "h2", "h3")] == [
        "of-the-host-in-the-file",
        "of-port-1",
        "of-v6",
        None,
        "two",
        None,
    ]
    monkeypatch.setenv("TSTORE_TOKEN_HOST", "of-the-host")
    monkeypatch.setenv("TSTORE_TOKEN_HOST_2", "of-port-2")
    assert [token_of(f"http://host:{p}") for p in (1, 2, 3)] == ["of-the-host", "of-port-2", "of-the-host"]


# ---- the token file


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (f"{SECRET}\n", "line 1: expected HOST TOKEN"),  # a token alone would be sent to every host
        (f"\n# x\nhost {SECRET} more\n", "line 3: expected HOST TOKEN"),
        (f"http://host {SECRET}\n", "line 1: expected HOST TOKEN"),
        (f"host:port {SECRET}\n", "line 1"),
        (f"host:99999 {SECRET}\n", "line 1"),
        (f"[host] {SECRET}\n", "line 1"),
        (f"host {SECRET}\nhost:1 {SECRET}\nHOST {OTHER}\n", "line 3: an earlier line"),
        (f"host {SECRET}ö\n", "line 1: the token"),
        (f"h\xff {SECRET}\n", "line 1"),
        (f"host\0 {SECRET}\n", "line 1"),
        ("#" * (2 << 20), "longer than"),
    ],
)
def test_an_invalid_token_file_is_reported_by_line_without_the_token(
    text: str, match: str, token_file: Path
) -> None:
    token_file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidArgument, match=match) as caught:
        HttpStorage("http://host")
    assert str(token_file) in str(caught.value)
    assert_hidden(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_file_that_others_may_read_is_refused(mode: int, token_file: Path) -> None:
    token_file.write_text(f"host {SECRET}\n")
    token_file.chmod(mode)
    with pytest.raises(InvalidArgument, match=rf"mode {mode:04o}.*chmod 600"):
        HttpStorage("http://host")


def test_an_unreadable_token_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(0o700)
    for name in ("none", "pipe", "folder"):
        monkeypatch.setenv("TSTORE_TOKEN_FILE", str(tmp_path / name))
        with pytest.raises(InvalidArgument, match=rf"TSTORE_TOKEN_FILE names .*{name}"):
            HttpStorage("http://host")


def test_an_invalid_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", f"{SECRET} x", f"{SECRET}\nX-Evil: 1"):
        monkeypatch.setenv("TSTORE_TOKEN_HOST", value)
        with pytest.raises(InvalidArgument, match="TSTORE_TOKEN_HOST: the token") as caught:
            HttpStorage("http://host")
        assert_hidden(caught.value)


# ---- a copy between two servers


async def test_a_copy_between_two_servers_has_two_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with await tstore.open(tmp_path / "from") as store, store.transaction() as tx:
        await (await tx.create_array("a", shape=(4,), dtype="f4", chunks=(4,))).write([1, 2, 3, 4])
    source = StoreServer(tmp_path / "from", access=Access({SECRET: "read"}))
    target = StoreServer(tmp_path / "to", access=Access({OTHER: "write"}))
    async with source, target:
        monkeypatch.setenv(f"TSTORE_TOKEN_127_0_0_1_{URL(source.url).port}", SECRET)
        with pytest.raises(Denied, match=f"TSTORE_TOKEN_127_0_0_1_{URL(target.url).port}"):
            await tstore.copy(source.url, target.url)
        monkeypatch.setenv(f"TSTORE_TOKEN_127_0_0_1_{URL(target.url).port}", OTHER)
        assert (await tstore.copy(source.url, target.url)).version == 1


# ---- plain HTTP, other origins, error messages


@pytest.mark.parametrize(
    ("url", "warned"),
    [
        ("http://store.example.com:7341", True),
        ("http://192.0.2.7", True),
        ("http://[2001:db8::1]", True),
        ("http://0.0.0.0:7341", True),
        ("http://localhost.example.com", True),
        ("http://127.0.0.1:7341", False),
        ("http://127.8.9.1:7341", False),
        ("http://[::1]:7341", False),
        ("http://localhost:7341", False),
        ("https://tls.example.com", False),
    ],
)
def test_a_token_over_http_to_another_machine_warns_once(url: str, warned: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for place in (url, url, f"{url}/other/path"):
            warn_if_cleartext(URL(place))
    assert len(caught) == warned
    assert all("over http" in str(w.message) and w.category is RuntimeWarning for w in caught)


async def test_the_warning_comes_with_the_token_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected("http://no-token.invalid") as store:
        with pytest.raises(TStoreError, match="no connection"):
            await store.get("k")
    async with connected("http://a-token.invalid", token=SECRET) as store:
        with pytest.warns(RuntimeWarning, match=r"a-token\.invalid goes over http"):
            with pytest.raises(TStoreError, match="no connection"):
                await store.get("k")
    gcs = GcsStorage("gs://bucket/x", token=SECRET, endpoint_url="http://gcs-token.invalid")
    with pytest.warns(RuntimeWarning, match=r"gcs-token\.invalid goes over http"):
        with pytest.raises(TStoreError, match="no connection"):
            await gcs.get("k")
    await gcs.close()


async def test_another_origin_gets_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSTORE_TOKEN_127_0_0_1", SECRET)  # it would be the other's, too, if that was opened
    async with serving(WANTS) as other:
        led = ok(b"", f"Location: {other.url}/x", status="302 Found")
        for options in ({}, {"token": OTHER}):
            async with serving(led) as server, connected(server.url, **options) as store:
                with pytest.raises(Denied, match="to which the server redirects, wants a token"):
                    await store.get("k")
        assert set(shown(other)) == {None}


def assert_hidden(error: BaseException, *secrets: str) -> None:
    """Assert that secrets are neither in an error nor in its causes."""
    seen: list[BaseException] = []
    following: list[BaseException | None] = [error]
    while following:
        link = following.pop()
        if link is None or link in seen:
            continue
        seen.append(link)
        told = f"{link} {link!r} {link.args!r} {vars(link)!r} {getattr(link, 'object', '')!r}"
        for secret in secrets or (SECRET, OTHER):
            assert secret not in told
        following += [link.__cause__, link.__context__]


def echo(status: str, kind: str) -> RawResponse:
    def said(request: Request) -> bytes:
        token = request.headers.get("Authorization", "none")
        body = f'{{"error": "no {token}"}}' if "json" in kind else f"no {token}"
        return ok(
            body.encode(), f"Content-Type: {kind}", f"Server: tstore/{token}", f"ETag: {token}", status=status
        )

    return said


BROKEN = [
    b"SSH-2.0-OpenSSH\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    ok(b"x" * 5, "Content-Encoding: gzip"),
    ok(b"x", status="206 Partial"),
    ok(b"x", "Location: http://[", status="302 F"),
    lambda request: None,
]


@pytest.mark.parametrize("given", ["option", "variable"])
async def test_no_error_log_or_repr_shows_a_token(
    given: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    responses = [echo(f"{s} X", k) for s in (400, 401, 403, 409, 500) for k in ("text/plain", "application/json")]
    responses += BROKEN
    options = {"token": SECRET} if given == "option" else {}
    if given == "variable":
        monkeypatch.setenv("TSTORE_TOKEN_127_0_0_1", SECRET)
    for response in responses:
        async with serving(ok(b"", "Server: tstore/1"), WANTS, response) as server:
            async with connected(server.url, **options) as store:
                await store.get("k")
                with contextlib.suppress(TStoreError):
                    await store.get("k")  # from now on the token is sent
                for call in (
                    store.get("k"),
                    store.put("k", [b"x"], PutMode.CREATE),
                    store.head("k"),
                    store.delete("k"),
                ):
                    try:
                        await call
                    except TStoreError as error:
                        assert_hidden(error)
                assert SECRET not in repr(store) + str(vars(store)) + repr(vars(store)["_session"])
            assert f"Bearer {SECRET}" in shown(server)
    assert SECRET not in caplog.text


# ---- publicly readable servers


async def test_a_publicly_readable_server_gets_the_token_with_the_first_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    access = Access({SECRET: "write"}, anonymous="read")
    async with StoreServer(tmp_path / "store", access=access) as server:
        monkeypatch.setenv("TSTORE_TOKEN_127_0_0_1", SECRET)
        await tstore.save(server.url, {"w": [1.0]}, step=1)
        assert await tstore.steps(server.url) == [1]


async def test_a_server_accepts_an_unknown_host_name_with_a_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await tstore.save(tmp_path / "store", {"w": [1.0]}, step=1)
    async with StoreServer(tmp_path / "store", access=Access({SECRET: "read"}, anonymous="read")) as server:
        url = server.url.replace("127.0.0.1", "ckpt.localhost")
        with monkeypatch.context() as patch:
            patch.setattr("aiohttp.connector.TCPConnector._resolve_host", _loopback)
            with pytest.raises(Denied, match="--hostname"):
                await tstore.steps(url)
            patch.setenv("TSTORE_TOKEN_CKPT_LOCALHOST", SECRET)
            assert await tstore.steps(url) == [1]


async def _loopback(self: Any, host: str, port: int, traces: Any = None) -> list[dict[str, Any]]:
    return [{"hostname": host, "host": "127.0.0.1", "port": port, "family": 2, "proto": 0, "flags": 0}]


async def test_another_server_that_responds_403_gets_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSTORE_TOKEN_127_0_0_1", SECRET)
    async with serving(ok(b"", status="403 Forbidden")) as server, connected(server.url) as store:
        with pytest.raises(Denied):
            await store.get("k")
        assert shown(server) == [None]


def test_a_token_file_may_begin_with_a_byte_order_mark(token_file: Path) -> None:
    token_file.write_bytes(b"\xef\xbb\xbfhost " + SECRET.encode() + b"\r\n")
    assert token_of("http://host") == SECRET


def test_a_group_readable_token_file_of_root_is_accepted(
    token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_file.write_text(f"host {SECRET}\n")
    token_file.chmod(0o440)
    if os.stat(token_file).st_uid:
        pytest.skip("needs a file of root's")
    with pytest.raises(InvalidArgument, match="mode 0440"):
        HttpStorage("http://host")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert token_of("http://host") == SECRET


async def test_the_advice_names_the_token_file_and_the_line_to_add(token_file: Path) -> None:
    token_file.write_text(f"another {SECRET}\n")
    async with serving(WANTS) as server, connected(server.url) as store:
        with pytest.raises(
            Denied, match=rf"add to {token_file} \(TSTORE_TOKEN_FILE\) the line '127.0.0.1:\d+ <token>'"
        ):
            await store.get("k")
