"""Where the stores of a fuzzing run lie: a folder, memory, or a folder behind a server of its own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tstore.testing.fuzz.worker import Place

__all__ = ["BACKENDS", "place"]

BACKENDS = ("local", "memory", "serve")
_TOKEN = "fuzz-0123456789abcdef"


@contextlib.contextmanager
def place(backend: str) -> Iterator[Place]:
    """A new place of that kind, which is removed in the end."""
    top = Path(tempfile.mkdtemp(prefix="tstore-fuzz-"))
    try:
        scratch = top / "scratch"
        scratch.mkdir()
        store, copies = top / "store", tuple(str(top / f"copy{i}") for i in range(2))
        match backend:
            case "memory":
                name = secrets.token_hex(8)
                yield Place(f"memory://{name}", tuple(f"memory://{name}-{i}" for i in range(2)), scratch)
            case "serve":
                with _serving(store) as url:
                    yield Place(url, copies, scratch, {"token": _TOKEN}, top / "cache")
            case _:
                yield Place(str(store), copies, scratch, {}, top / "cache")
    finally:
        shutil.rmtree(top, ignore_errors=True)


@contextlib.contextmanager
def _serving(store: Path) -> Iterator[str]:
    """The URL of a process of `tstore serve`."""
    command = [sys.executable, "-m", "tstore", "serve", str(store), "--create", "--port", "0", "--json"]
    environment = {**os.environ, "TSTORE_SERVER_TOKENS": f"admin {_TOKEN}"}
    with tempfile.TemporaryFile() as log:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment) as process:
            assert process.stdout is not None
            try:
                yield json.loads(process.stdout.readline())["url"]
            finally:
                process.kill()
