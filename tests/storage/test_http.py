"""The HTTP storage: it reads from any file server, and writes to `tstore serve`."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from aiohttp import ClientSession, web

import tstore
from tests.support import ports, processes
from tests.support.fileservers import aiohttp_files, nginx, python_files
from tests.support.forks import forks
from tstore.core.storage.http.store import HttpStorage
from tstore.core.storage.objects import PutMode
from tstore.errors import AlreadyExists, Corrupt, Denied, InvalidArgument, NotAStore, NotFound, Unreachable
from tstore.service.server import Access, Server

DATA = bytes(range(256)) * 1000
TOKENS = {scope: f"token-of-scope-{scope}" for scope in ("read", "write", "admin")}
ACCESS = Access({token: scope for scope, token in TOKENS.items()})
SERVERS = ["nginx", "aiohttp", "python", "tstore"]


@contextlib.asynccontextmanager
async def served(kind: str, folder: Path, own: Path) -> AsyncIterator[str]:
    """Run a server of a kind on a folder and yield its URL."""
    async with contextlib.AsyncExitStack() as stack:
        match kind:
            case "nginx":
                yield stack.enter_context(nginx(folder, own))
            case "aiohttp":
                yield await stack.enter_async_context(aiohttp_files(folder))
            case "python":
                yield stack.enter_context(python_files(folder))
            case _:
                server = await stack.enter_async_context(Server(folder, names="any"))
                yield server.url


@contextlib.asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[HttpStorage]:
    storage = HttpStorage(url, **options)
    try:
        yield storage
    finally:
        await storage.close()


@pytest.fixture(params=SERVERS)
async def files(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[HttpStorage, Path, str]]:
    folder = tmp_path / "files"
    folder.mkdir()
    async with served(request.param, folder, tmp_path / "own") as url, connected(url) as store:
        yield store, folder, request.param


@pytest.fixture
async def ours(tmp_path: Path) -> AsyncIterator[HttpStorage]:
    async with Server(tmp_path / "store", names="any", access=ACCESS) as server:
        async with connected(server.url, token=TOKENS["admin"]) as store:
            yield store


# ---- reading from any server


@pytest.mark.filterwarnings("ignore:.*ignores Range:RuntimeWarning")
async def test_objects_are_read_whole(files: tuple[HttpStorage, Path, str]) -> None:
    store, folder, _ = files
    for name, data in (("full", DATA), ("empty", b"")):
        (folder / name).write_bytes(data)
        assert await store.get(name) == data
    with pytest.raises(NotFound, match="missing"):
        await store.get("missing")


@pytest.mark.filterwarnings("ignore:.*ignores Range:RuntimeWarning")
async def test_a_read_fills_buffers_from_an_offset(files: tuple[HttpStorage, Path, str]) -> None:
    store, folder, _ = files
    (folder / "full").write_bytes(DATA)
    for offset, sizes in [(0, [len(DATA)]), (7, [1, 0, 70_000, 3]), (len(DATA) - 1, [1]), (5, [3] * 500)]:
        buffers = [bytearray(size) for size in sizes]
        await store.read("full", offset, buffers, sum(sizes))
        assert b"".join(buffers) == DATA[offset : offset + sum(sizes)]
    for offset, size in [(0, len(DATA) + 1), (len(DATA), 1), (len(DATA) + 5, 5)]:
        with pytest.raises(Corrupt, match=r"full: expected bytes .* but the object"):
            await store.read("full", offset, [bytearray(size)], size)
    with pytest.raises(NotFound, match="missing"):
        await store.read("missing", 5, [bytearray(5)], 5)


async def test_head_returns_length_and_age(files: tuple[HttpStorage, Path, str]) -> None:
    store, folder, _ = files
    (folder / "full").write_bytes(DATA)
    info = await store.head("full")
    assert info is not None
    assert (info.key, info.size) == ("full", len(DATA))
    assert info.age is not None
    assert 0 <= info.age < 60
    assert await store.head("missing") is None


async def test_odd_names_are_read(files: tuple[HttpStorage, Path, str]) -> None:
    store, folder, _ = files
    for key in ("with space", "ünïcödé/日本", "a%2fb", "*?[x]", "-", "~", "a:b", "a+b&c=d", "a;b"):
        (folder / key).parent.mkdir(exist_ok=True)
        (folder / key).write_bytes(key.encode())
        assert await store.get(key) == key.encode(), key


async def test_a_server_that_ignores_ranges_is_read_with_one_warning(tmp_path: Path) -> None:
    (tmp_path / "full").write_bytes(DATA)
    with python_files(tmp_path) as url:
        async with connected(url) as store:
            target = bytearray(1000)
            reads = [store.read("full", i, [bytearray(9)], 9) for i in range(9)]
            with pytest.warns(RuntimeWarning, match=r"SimpleHTTP.*ignores Range") as caught:
                await asyncio.gather(*reads)
            assert len(caught) == 1
            for offset in range(0, 50_000, 1000):  # where another warning would be an error
                await store.read("full", offset, [target], 1000)
                assert target == DATA[offset : offset + 1000]
            assert not store.capabilities.ranges


async def test_capabilities_are_learned_from_responses(files: tuple[HttpStorage, Path, str]) -> None:
    store, folder, kind = files
    (folder / "full").write_bytes(DATA)
    assert not any(store.capabilities)
    await store.head("full")
    assert store.capabilities.conditional_create == store.capabilities.listing == (kind == "tstore")
    if kind != "python":
        await store.read("full", 0, [bytearray(5)], 5)
        assert store.capabilities.ranges


@pytest.mark.parametrize("files", SERVERS[:-1], indirect=True)
async def test_only_tstore_servers_are_written(files: tuple[HttpStorage, Path, str]) -> None:
    store, folder, _ = files
    for write in (
        store.put("k", [b"x"], PutMode.CREATE),
        store.put("k", [b"x"], PutMode.REPLACE),
        store.delete("k"),
    ):
        with pytest.raises(Denied, match=r"k can't be written.*tstore serve"):
            await write
    with pytest.raises(Denied, match="can't be listed"):
        await anext(store.pages(""))
    assert list(folder.iterdir()) == []


# ---- writing to tstore serve


async def test_a_listing_has_pages_folders_and_ages(tmp_path: Path, ours: HttpStorage) -> None:
    keys = [f"t/{i:04}" for i in range(1003)] + ["t/x/1", "t/x/2", "t/y/1", "u"]
    for key in keys:
        path = tmp_path / "store" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(key)
    pages = [page async for page in ours.pages("t/")]
    assert len(pages) > 1
    entries = [entry for page in pages for entry in page.entries]
    assert sorted(e.key for e in entries) == sorted(keys[:-1])
    assert all(e.size == len(e.key) and e.age is not None and 0 <= e.age < 60 for e in entries)
    split = [page async for page in ours.pages("t/", "/")]
    assert [folder for page in split for folder in page.folders] == ["t/x/", "t/y/"]
    assert sum(len(page.entries) for page in split) == 1003
    assert [page async for page in ours.pages("nothing/") if page.entries or page.folders] == []


async def test_a_closed_session_reopens(ours: HttpStorage) -> None:
    await ours.put("k", [b"x"], PutMode.CREATE)
    await ours.close()
    await ours.close()
    assert await ours.get("k") == b"x"


# ---- tokens and certificates


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (None, [r"wants a token.*storage_options"] * 3),
        ("of-nobody", ["refused the token"] * 3),
        (TOKENS["read"], ["", "forbids the request: .*scope", "forbids the request: .*scope"]),
        (TOKENS["write"], ["", "", "forbids the request: .*scope"]),
        (TOKENS["admin"], ["", "", ""]),
    ],
)
async def test_a_token_allows_what_its_scope_says(ours: HttpStorage, token: str | None, said: list[str]) -> None:
    await ours.put("there", [b"x"], PutMode.CREATE)
    async with connected(ours.url, token=token) as store:
        calls = [store.get("there"), store.put("new", [b"y"], PutMode.CREATE), store.delete("there")]
        for call, refused in zip(calls, said, strict=True):
            if not refused:
                await call
                continue
            with pytest.raises(Denied, match=refused) as caught:
                await call
            assert token is None or token not in str(caught.value)


async def test_a_certificate_is_trusted_where_its_authority_is_named(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    runner = web.ServerRunner(web.Server(_insecure))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    async with connected(url) as store:
        with pytest.raises(Denied, match=r"certificate.*ca_file"):
            await store.get("k")
    with pytest.raises(Denied, match=r"certificate.*SSL_CERT_FILE"):  # a plain array, which fsspec reads
        await tstore.open({"driver": "zarr3", "kvstore": f"{url}/"})
    async with connected(url, ca_file=tmp_path / "ca.pem") as store:
        with pytest.raises(Denied, match="redirects from https to http"):  # the token would be sent unencrypted
            await store.get("k")
    await runner.cleanup()
    for path in (tmp_path / "none.pem", Path(__file__)):
        with pytest.raises(InvalidArgument, match="can't be read as certificates"):
            HttpStorage(url, ca_file=path)


async def _insecure(request: web.BaseRequest) -> web.Response:
    return web.Response(status=307, headers={"Location": f"http://{request.host}{request.path}"})


# ---- a whole store

ROWS = 8 * 256
W = np.arange(ROWS * 1024, dtype="f4").reshape(ROWS, 1024)

HOST = """
    import os, numpy as np, tstore.sync as tstore
    url, host = arguments
    rows = np.arange(host * 256 * 1024, (host + 1) * 256 * 1024, dtype="f4").reshape(256, 1024)
    part = tstore.Shards((8 * 256, 1024), "f4", [((slice(host * 256, host * 256 + 256), slice(0, 1024)), rows)])
    version = tstore.save(url, {"w": part, "b": np.ones(5)}, step=7, host=host, hosts=8, attempt="job.0")
    os.write(out, f"{version}\\n".encode())
"""


@pytest.mark.filterwarnings("ignore:.*ignores Range:RuntimeWarning")
async def test_eight_processes_save_through_a_server_and_file_servers_restore_a_copy(tmp_path: Path) -> None:
    async with Server(tmp_path / "store") as server:
        with forks(HOST) as hosts:
            pids = [hosts.start(tmp_path / "out", server.url, host) for host in range(8)]
            assert await asyncio.to_thread(lambda: [hosts.wait(pid) for pid in pids]) == [0] * 8
        assert (tmp_path / "out").read_text().split() == ["1"] * 8
        np.testing.assert_array_equal((await tstore.restore(server.url))["w"], W)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    for kind in SERVERS[:-1]:
        async with served(kind, tmp_path / "copy", tmp_path / "own") as url:
            tree = await tstore.restore(url)
            np.testing.assert_array_equal(tree["w"], W)
            np.testing.assert_array_equal(tree["b"], np.ones(5))
            async with await tstore.open(url) as store:
                report = await store.verify()
                assert (report.versions, report.faults) == (1, [])
                with pytest.raises(Denied, match=r"can't be written.*tstore serve"):
                    await tstore.save(store, {"w": W}, step=8)


async def test_a_server_behind_a_proxy_is_recognised(tmp_path: Path) -> None:
    async with Server(tmp_path / "store", access=ACCESS) as server:
        proxied = (
            f"location /models/ {{ proxy_pass {server.url}/; proxy_http_version 1.1; client_max_body_size 0; }}"
        )
        with nginx(tmp_path, tmp_path / "nginx", proxied) as url:
            options = {"token": TOKENS["admin"]}
            async with await tstore.open(f"{url}/models", storage_options=options) as store:
                for step in range(2):
                    await tstore.save(store, {"w": W + step}, step)
                assert (await store.collect(tstore.Keep(last=1))).versions == [1]
                with pytest.raises(AlreadyExists):
                    await tstore.save(store, {"w": W}, 1)
                np.testing.assert_array_equal((await tstore.restore(store))["w"], W + 1)
                assert (await store.verify()).ok
            async with ClientSession() as client, client.get(f"{url}/models/-/health") as response:
                assert response.headers["Server"].startswith("nginx")  # otherwise this test proves nothing
    assert await tstore.steps(tmp_path / "store") == [1]


async def test_the_errors_of_a_missing_store_are_clear(tmp_path: Path) -> None:
    async with aiohttp_files(tmp_path) as url:
        with pytest.raises(NotAStore, match=r"/none is not a tstore store.*check the path"):
            await tstore.restore(f"{url}/none")
        with pytest.raises(Denied, match=r"/none can't be listed: the server \(Python.*tstore serve"):
            await tstore.save(f"{url}/none", {"w": W}, step=1)


def run_with_server(code: str, folder: Path) -> str:
    """Run code in a new process with the URL of a server as its argument, and return its output."""
    server = processes.start(
        """
        import asyncio, sys
        from tstore.service.server import Server
        async def main():
            async with Server(sys.argv[1]) as server:
                print(server.url, flush=True)
                await asyncio.Event().wait()
        asyncio.run(main())
        """,
        folder,
    )
    with processes.running(server):
        client = processes.start(code, processes.line(server))
        with processes.running(client):
            out, err = client.communicate(timeout=processes.DEADLINE)
            assert (client.returncode, err) == (0, "")
            return out


def test_a_forked_child_and_its_parent_continue_reading(tmp_path: Path) -> None:
    run_with_server(
        """
        import os, sys, warnings
        import numpy as np, tstore.sync as tstore
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own advice about fork and threads
        x = np.arange(1 << 20, dtype="f4")
        store = tstore.open(sys.argv[1])
        tstore.save(store, {"x": x}, step=1)
        for leave in (os._exit, sys.exit):
            pid = os.fork()
            if pid == 0:
                assert (tstore.restore(store)["x"] == x).all()
                leave(0)
            assert (tstore.restore(store)["x"] == x).all()
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert (tstore.restore(store)["x"] == x).all()
        store.close()
        """,
        tmp_path / "store",
    )


def test_an_unclosed_store_ends_without_warnings(tmp_path: Path) -> None:
    run_with_server(
        """
        import gc, sys
        import tstore.sync as tstore
        store = tstore.open(sys.argv[1])
        forgotten = tstore.open(sys.argv[1])
        assert tstore.steps(store) == tstore.steps(forgotten) == []
        del forgotten
        gc.collect()
        """,
        tmp_path / "store",
    )


NOWHERE = "no-such-host.invalid"


async def test_an_address_without_a_server_is_reported_at_once() -> None:
    with ports.refusing() as address:
        for host, why in ((address, "Connection refused"), (NOWHERE, f"to {NOWHERE} .*; check this name")):
            async with asyncio.timeout(8):  # `first_deadline` is 10 s
                with pytest.raises(Unreachable, match=why):
                    await tstore.open(f"http://{host}/store", "r")


def test_local_stores_import_no_http_client(tmp_path: Path) -> None:
    processes.fresh_python(
        """
        import sys
        import numpy as np, tstore.sync as tstore
        tstore.save(sys.argv[1], {"x": np.ones(5)}, step=1)
        assert not [name for name in sys.modules if name.split(".")[0] in ("aiohttp", "yarl")]
        """,
        tmp_path,
    )
