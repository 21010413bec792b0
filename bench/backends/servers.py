"""The servers of a measurement, each a new, empty process on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import fileservers, gcs, moto_server

BUCKET = "bench"

_ANY_NAMES = """
import asyncio, sys
from tstore.service.server import Server

async def serve():
    async with Server(sys.argv[1], names="any") as server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(serve())
"""


class Place(NamedTuple):
    """A location to save to: the URL of a store, the URL of the server, and the folder behind the server."""

    store: str
    server: str
    folder: Path
    options: dict[str, str]


@contextlib.contextmanager
def local(parent: Path) -> Iterator[Place]:
    with _folder(parent) as folder:
        yield Place(str(folder / "store"), "", folder, {})


@contextlib.contextmanager
def announced(*command: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Run a command that serves a store; yield its process and the document with its address."""
    with _process([sys.executable, *command, "--port", "0", "--json"], stderr=subprocess.DEVNULL) as process:
        yield process.pid, json.loads(_line(process))


@contextlib.contextmanager
def serve(parent: Path) -> Iterator[Place]:
    """Start `tstore serve` for a store, and the same server for arbitrary names."""
    with _folder(parent) as folder, contextlib.ExitStack() as stack:
        command = ("-m", "tstore", "serve", str(folder / "store"), "--create")
        _, document = stack.enter_context(announced(*command))
        other = [sys.executable, "-c", _ANY_NAMES, str(folder / "any")]
        yield Place(document["url"], _line(stack.enter_context(_process(other))), folder / "any", {})


@contextlib.contextmanager
def nginx(parent: Path) -> Iterator[Place]:
    """Start nginx, which serves a folder for reading; contenders save to the folder."""
    with _folder(parent) as folder:
        (folder / "files").mkdir()
        with fileservers.nginx(folder / "files", folder / "nginx") as url:
            yield Place(f"{url}/store", url, folder / "files", {})


@contextlib.contextmanager
def fake_gcs(parent: Path) -> Iterator[Place]:
    with _folder(parent) as folder, gcs.fake_gcs_server(folder) as url:
        bucket = gcs.new_bucket(url)
        yield Place(f"gs://{bucket}/store", url, folder, {"endpoint_url": url, "token": "anon"})


@contextlib.contextmanager
def moto(parent: Path) -> Iterator[Place]:
    with _folder(parent) as folder, moto_server.running() as server:
        yield Place(f"s3://{moto_server.BUCKET}/store", server.endpoint, folder, dict(server.options))


SERVERS = {"local": local, "serve": serve, "nginx": nginx, "gcs": fake_gcs, "s3": moto}


@contextlib.contextmanager
def _folder(parent: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=parent, prefix="served-") as name:
        os.chmod(name, 0o755)  # nginx may run as another user
        yield Path(name)


@contextlib.contextmanager
def _process(command: list[str], stderr: int | None = None) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if line := process.stdout.readline().strip():
        return line
    raise RuntimeError(f"{process.args!r} ended with {process.wait()}")
