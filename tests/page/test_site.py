"""The requests of browsers: who sees the page, what every response forbids, and what no request can do."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urljoin

import aiohttp
import numpy as np
import pytest

import tstore
from tests.support.http_server import READ, Client, client_of, everybody
from tests.support.processes import line, running, start_tstore
from tstore.errors import Corrupt
from tstore.service.page import Site
from tstore.service.page.sessions import Sessions
from tstore.service.server import Access, Server

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


async def sign_in(client: Client, token: str) -> None:
    """Sign in as a browser does; the session keeps the cookie."""
    client.session.cookie_jar._unsafe = True  # type: ignore[attr-defined]  # accepts cookies from an address
    response = await client("POST", "/-/page/login", {"token": token}, Accept=HTML["Accept"])
    assert response.status == 200, response.body


async def test_a_browser_is_sent_to_the_page_and_a_client_is_not(server: Server) -> None:
    async with client_of(server, READ) as client:
        async with client.session.get("/", headers=HTML, allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (303, "/-/page/")
        assert (await client("GET", "/")).status == 404
        assert (await client("GET", "/?list", Accept=HTML["Accept"])).status == 200


async def test_a_view_is_a_page_or_its_document(server: Server) -> None:
    async with client_of(server, READ) as client:
        page = await client("GET", "/-/page/", Accept=HTML["Accept"])
        assert page.headers["Content-Type"] == "text/html; charset=utf-8"
        assert b"/-/page/tree?at=2" in page.body
        document = await client("GET", "/-/page/", Accept="application/json")
        assert json.loads(document.body)["command"] == f"tstore log {server.url}"


async def test_every_response_forbids_scripts_frames_and_caches(server: Server) -> None:
    async with client_of(server) as client:
        for path in ("/-/page/", "/-/page/none", "/-/page/static/page.css", "/-/page/enter?code=x", "/-/page"):
            response = await client("GET", path, Accept=HTML["Accept"])
            policy = response.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert response.headers["X-Frame-Options"] == "DENY"
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert "static" in path or response.headers["Cache-Control"] == "no-store"


async def test_without_a_token_there_is_only_the_form(server: Server) -> None:
    async with client_of(server) as client:
        response = await client("GET", "/-/page/", Accept=HTML["Accept"])
        assert response.status == 401
        assert b'name="token"' in response.body
        assert b"tree?at=2" not in response.body
        response = await client("GET", "/-/page/", Accept="application/json")
        assert response.status == 401
        assert response.headers["WWW-Authenticate"].startswith("Bearer")


async def test_a_session_stands_for_the_token_until_it_is_withdrawn(server: Server) -> None:
    async with client_of(server) as client:
        await sign_in(client, READ)
        [cookie] = client.session.cookie_jar
        assert READ not in cookie.value
        assert cookie["httponly"]
        assert cookie["samesite"] == "Strict"
        assert cookie["path"] == "/-/page/"
        assert (await client("GET", "/-/page/")).status == 200
        assert (await client("GET", "/?list")).status == 401  # a session is for the page only
        server.set_access(Access({"another-token-012345": "read"}))
        assert (await client("GET", "/-/page/")).status == 401


async def test_an_unknown_token_signs_nobody_in(server: Server) -> None:
    async with client_of(server) as client:
        for token in ("unknown-0123456789", "", "ü" * 20, READ[:-1]):
            response = await client("POST", "/-/page/login", {"token": token}, Accept=HTML["Accept"])
            assert response.status == 401
        assert not list(client.session.cookie_jar)


async def test_signing_in_again_ends_the_session_before(server: Server) -> None:
    async with client_of(server) as client:
        await sign_in(client, READ)
        [first] = client.session.cookie_jar
        await sign_in(client, READ)
        [second] = client.session.cookie_jar
        assert first.value != second.value
    for cookie, status in ((first, 401), (second, 200)):
        async with client_of(server) as client:
            assert (await client("GET", "/-/page/", Cookie=f"{cookie.key}={cookie.value}")).status == status


def test_one_token_does_not_end_the_sessions_of_others() -> None:
    sessions = Sessions()
    other = sessions.start(b"other")
    own = [sessions.start(b"own") for _ in range(2000)]
    assert sessions.token_digest(other) == b"other"
    assert sum(sessions.token_digest(session) is not None for session in own) == 100


async def test_signing_out_needs_the_form_of_this_session(server: Server) -> None:
    async with client_of(server) as client:
        await sign_in(client, READ)
        page = (await client("GET", "/-/page/", Accept=HTML["Accept"])).body.decode()
        form_token = re.findall('name="form_token" value="([0-9a-f]+)"', page)[0]
        assert (await client("POST", "/-/page/logout", {"form_token": "0" * 64})).status == 403
        assert (await client("GET", "/-/page/")).status == 200
        forged = {"Origin": "http://evil.example"}
        assert (await client("POST", "/-/page/logout", {"form_token": form_token}, **forged)).status == 403
        assert (await client("POST", "/-/page/logout", {"form_token": form_token})).status == 401  # the form again
        assert (await client("GET", "/-/page/")).status == 401


@pytest.mark.parametrize("origin", ["null", "http://[", "http://evil.example", "http://127.0.0.1:1", ""])
async def test_a_form_of_another_site_signs_nobody_in(server: Server, origin: str) -> None:
    async with client_of(server) as client:
        response = await client("POST", "/-/page/login", {"token": READ}, Origin=origin)
        assert response.status == 403
        assert not list(client.session.cookie_jar)
        response = await client("POST", "/-/page/login", {"token": "x"}, Origin=server.url)
        assert response.status == 401


async def test_an_entrance_works_once_and_not_for_long(store: Path) -> None:
    site, token = Site(), "a-token-of-one-view"
    async with Server(store, mode="r", access=Access({token: "read"}), page=site) as server:
        jar = aiohttp.CookieJar(unsafe=True)
        async with client_of(server, cookie_jar=jar) as client, client_of(server) as other:

            async def enter(client: Client, entrance: str) -> int:
                async with client.session.get(entrance, allow_redirects=False) as response:
                    assert ("Set-Cookie" in response.headers) == (response.status == 303)
                    return response.status

            entrance = site.entrance(server.url, token, 100.0)
            assert (await other("HEAD", entrance)).status == 405
            assert await enter(client, entrance) == 303
            assert (await client("GET", "/-/page/")).status == 200
            assert await enter(other, entrance) == 401
            assert await enter(other, site.entrance(server.url, token, 0.0)) == 401


async def test_the_host_must_be_this_server(store: Path) -> None:
    async with Server(store, access=everybody(), page=Site()) as server, client_of(server, READ) as client:
        response = await client("GET", "/-/page/", Host="rebound.example")
        assert response.status == 403
        for host in ("127.0.0.1:80@evil.example", "localhost@evil.example", "127.0.0.1/evil.example"):
            assert (await client("GET", "/-/page/", Host=host)).status == 400


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_other_methods_are_refused(server: Server, method: str) -> None:
    async with client_of(server, READ) as client:
        assert (await client(method, "/-/page/")).status == 405


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_view_with_status_0(store: Path, stop: signal.Signals) -> None:
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    process = start_tstore("view", store, "--no-browser", **pipes, text=True)
    with running(process):
        assert "http://127.0.0.1" in line(process)
        process.send_signal(stop)
        assert process.wait(60) == 0


async def test_a_server_without_a_page_shows_none(store: Path) -> None:
    async with Server(store, access=everybody()) as server, client_of(server, READ) as client:
        assert (await client("GET", "/", Accept=HTML["Accept"])).status == 404
        assert (await client("GET", "/-/page/", Accept=HTML["Accept"])).status == 400


@pytest.mark.parametrize(
    "jinja2", ["raise ImportError('no Markup in markupsafe')", "raise RuntimeError('broken')", ""]
)
async def test_a_server_without_what_the_page_needs_serves_the_store(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jinja2: str
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "jinja2.py").write_text(jinja2)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'broken'}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("TSTORE_SERVER_TOKENS", f"read {READ}")
    command = [sys.executable, "-m", "tstore", "serve", os.path.relpath(store), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:  # not forked
        assert process.stdout is not None
        document = json.loads(process.stdout.readline())
        assert document["store"] == str(store)
        url = document["url"]
        async with await tstore.open(url, "r", storage_options={"token": READ}) as opened:
            assert (await opened.snapshot()).version == 2
        process.terminate()
        logged = [json.loads(line) for line in process.communicate(timeout=250)[1].splitlines()]
    reports = [entry for entry in logged if entry["level"] == "warning"]
    assert len(reports) == 1
    assert "the page can't be shown (" in reports[0]["message"]
    assert "pip install jinja2" in reports[0]["message"]
    if jinja2:
        return
    command = [sys.executable, "-m", "tstore", "view", str(store), "--no-browser"]
    viewing = subprocess.run(command, check=False, capture_output=True, text=True, timeout=250)
    assert viewing.returncode == 2
    assert "the page can't be shown" in viewing.stderr
    assert "Traceback" not in viewing.stderr


async def test_memory_of_views_goes_back_to_the_system(tmp_path: Path) -> None:
    await tstore.save(tmp_path / "store", {"w": np.ones((20_000, 400), "float32")}, step=1)
    process = start_tstore("view", tmp_path / "store", "--no-browser", "--json", stdout=subprocess.PIPE)
    with running(process):
        assert process.stdout is not None
        entrance = json.loads(process.stdout.readline())["entrance"]
        jar = aiohttp.CookieJar(unsafe=True)  # accepts cookies from an address
        async with aiohttp.ClientSession(headers={"Accept": "text/html"}, cookie_jar=jar) as session:
            async with session.get(entrance) as response:
                assert response.status == 200
            before = resident(process.pid)

            async def look(first: int) -> None:
                query = f"path=w&budget=100000000&window={first}:20000,0:400"
                async with session.get(urljoin(entrance, f"/-/page/tensor?{query}")) as response:
                    assert response.status == 200

            for first in range(0, 6, 3):
                await asyncio.gather(*(look(first + i) for i in range(3)))
        after = resident(process.pid)
    assert after - before < 200 << 20  # with the buffers that malloc retains, about twice that


def resident(pid: int) -> int:
    """Return the bytes of memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_an_error_keeps_nothing_of_what_was_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    class Read:
        """What a view has read before it fails."""

    async def fail(*_: object) -> None:
        read = Read()
        raise Corrupt(f"{read!r} is damaged")

    monkeypatch.setattr(tstore.Store, "snapshot", fail)
    async with client_of(server, READ) as client:
        gc.disable()
        try:
            for _ in range(4):
                assert (await client("GET", "/-/page/tree")).status == 500
            assert sum(type(found) is Read for found in gc.get_objects()) == 0
        finally:
            gc.enable()
