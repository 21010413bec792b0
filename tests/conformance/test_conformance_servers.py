"""The conformance suite on `tstore serve` and on Google Cloud Storage; `test_s3.py` runs it on S3."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import tstore
from tests.support import gcs
from tests.support.relay import Relay
from tstore.errors import Denied
from tstore.lab import conformance
from tstore.service.server import Server

STORED: web.AppKey[dict[str, bytes]] = web.AppKey("stored")


def port_of(url: str) -> int:
    return int(url.rstrip("/").rpartition(":")[2])


@pytest.fixture
async def served(names: Any, tmp_path: Path) -> AsyncIterator[conformance.Subject]:
    async with (
        Server(tmp_path / "store", names=names) as server,
        Relay.to("127.0.0.1", port_of(server.url)) as relay,
    ):
        async with await tstore.open(server.url, "x"):
            pass
        yield conformance.Subject.from_url(f"http://{relay.host}:{relay.port}", relay=relay)


@pytest.mark.parametrize(
    ("names", "check"),
    [pytest.param("layout", check, id=f"layout-{check}") for check in conformance.CHECKS]
    + [
        pytest.param("any", check, id=f"any-{check}", marks=() if check.name == "odd_names" else pytest.mark.deep)
        for check in conformance.CHECKS
    ],
)
async def test_tstore_serve(check: conformance.Check, served: conformance.Subject) -> None:
    await check(served)


@pytest.mark.parametrize("check", conformance.CHECKS, ids=str)
async def test_gcs(check: conformance.Check, emulator: str) -> None:
    url = f"gs://{gcs.new_bucket(emulator)}/run"
    async with Relay.to("127.0.0.1", port_of(emulator)) as relay:
        through = {"endpoint_url": f"http://{relay.host}:{relay.port}"}
        async with await tstore.open(url, "x", storage_options=through):
            pass
        await check(conformance.Subject.from_url(url, through, relay=relay))


async def test_a_gcs_that_ignores_the_condition_is_refused(emulator: str) -> None:
    url = f"gs://{gcs.new_bucket(emulator)}/run"

    def ignore(sent: bytes) -> bytes:
        return sent.replace(b"ifGenerationMatch", b"someOtherArgument")

    async with Relay.to("127.0.0.1", port_of(emulator), ignore) as liar:
        for mode in ("x", "a"):
            options = {"endpoint_url": f"http://{liar.host}:{liar.port}"}
            with pytest.raises(Denied, match="does not create exclusively"):
                await (await tstore.open(url, mode, storage_options=options)).transaction().paths()


async def overwrites(request: web.Request) -> web.Response:
    """Respond as `tstore serve` does, but overwrite existing objects."""
    stored, name = request.app[STORED], {"Server": "tstore/0.0"}
    if request.method == "PUT":
        stored[request.path] = await request.read()
        return web.Response(status=201, headers=name)
    if request.method == "DELETE":
        stored.pop(request.path, None)
        return web.Response(status=204, headers=name)
    if "list" in request.query:
        return web.json_response({"entries": [], "folders": [], "next": None}, headers=name)
    if request.path not in stored:
        return web.Response(status=404, headers=name)
    return web.Response(body=stored[request.path], headers={**name, "ETag": '"1"'})


async def test_a_server_that_impersonates_tstore_is_refused() -> None:
    app = web.Application()
    app[STORED] = stored = {}
    app.router.add_route("*", "/{key:.*}", overwrites)
    async with TestServer(app) as server:
        for mode in ("x", "a"):
            with pytest.raises(Denied, match="does not create exclusively"):
                await (await tstore.open(f"http://{server.host}:{server.port}", mode)).transaction().paths()
    assert not stored
