"""Imports from HTTP servers that redirect: credentials stay with the server of the URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from aiohttp import web

import tstore
from tests.support.web_server import serving
from tstore.convert.zarr_import import import_zarr


class Servers:
    """A server that redirects to another one, which has the files, and the headers that they received."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.at_first: list[dict[str, str]] = []
        self.at_other: list[dict[str, str]] = []
        self.other = ""

    async def redirect(self, request: web.Request) -> web.StreamResponse:
        self.at_first.append(dict(request.headers))
        raise web.HTTPFound(f"{self.other}{request.path}")

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.at_other.append(dict(request.headers))
        path = self.folder / request.match_info["path"]
        if not path.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(path)


SECRETS: list[dict[str, Any]] = [
    {"headers": {"X-Api-Key": "secret"}},
    {"client_kwargs": {"headers": {"X-Api-Key": "secret", "x-amz-security-token": "secret"}}},
    {"client_kwargs": {"headers": {"Authorization": "Bearer secret", "Private-Token": "secret"}}},
    {"client_kwargs": {"cookies": {"session": "secret"}}},
]


@pytest.mark.parametrize("chain", ["", "simplecache::"])
@pytest.mark.parametrize("options", SECRETS)
async def test_credentials_do_not_follow_a_redirect(tmp_path: Path, chain: str, options: dict[str, Any]) -> None:
    values = np.arange(12, dtype="f4")
    (tmp_path / "served").mkdir()
    zarr.create_array(tmp_path / "served" / "a.zarr", shape=12, chunks=5, dtype="f4")[:] = values
    servers = Servers(tmp_path / "served")
    async with serving(servers.redirect) as first, serving(servers.serve) as servers.other:
        given = {"https" if first.startswith("https") else "http": options} if chain else options
        await import_zarr(f"{chain}{first}/a.zarr", tmp_path / "store", storage_options=given)
    async with await tstore.open(tmp_path / "store", "r") as store:
        array = await (await store.snapshot()).array("a")
        assert (await array.read()).tolist() == values.tolist()
    assert servers.at_first
    assert servers.at_other
    assert all("secret" in str(headers) for headers in servers.at_first)
    for headers in servers.at_other:
        assert "secret" not in str(headers)
        assert not {"Authorization", "Cookie"} & headers.keys()
