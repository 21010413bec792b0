"""Storage for the stores of a fuzzing run: a folder, memory, or a folder behind an HTTP server."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.fuzz.worker import Place

__all__ = ["STORAGES", "place"]

STORAGES = ("local", "memory", "serve")
_TOKEN = "fuzz-0123456789abcdef"
_PATIENCE = 60.0


@contextlib.contextmanager
def place(storage: str) -> Iterator[tuple[Place, Callable[[], None]]]:
    """Create storage of a kind, and a function that ends all requests in flight; remove the storage at the end."""
    top = Path(tempfile.mkdtemp(prefix="tstore-fuzz-"))
    try:
        scratch = top / "scratch"
        scratch.mkdir()
        store, copies = top / "store", tuple(str(top / f"copy{i}") for i in range(2))
        match storage:
            case "memory":
                name = secrets.token_hex(8)
                names = tuple(f"memory://{name}-{i}" for i in range(2))
                yield Place(f"memory://{name}", names, scratch), _nothing
            case "serve":
                with contextlib.closing(_Server(store)) as server:
                    yield Place(server.url, copies, scratch, {"token": _TOKEN}, top / "cache"), server.restart
            case _:
                yield Place(str(store), copies, scratch, {}, top / "cache"), _nothing
    finally:
        shutil.rmtree(top, ignore_errors=True)


def _nothing() -> None:
    """Do nothing: requests to a folder or to memory end with the process that made them."""


class _Server:
    """A process of `tstore serve`."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self.url = ""
        self._process = self._start("0")

    def restart(self) -> None:
        """Stop the server, which waits for requests of killed clients, and restart it on the same port."""
        self._process.terminate()
        status = self._process.wait(_PATIENCE)
        assert status == 0, f"tstore serve ended with status {status}"
        self._process = self._start(self.url.rpartition(":")[2])

    def close(self) -> None:
        """Kill the server."""
        self._process.kill()
        self._process.wait()

    def _start(self, port: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tstore", "serve", str(self._store), "--create", "--port", port, "--json"]
        environment = {**os.environ, "TSTORE_SERVER_TOKENS": f"admin {_TOKEN}"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        assert process.stdout is not None
        with process.stdout as output:
            self.url = json.loads(output.readline())["url"]
        return process
