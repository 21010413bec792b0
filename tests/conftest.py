"""What the tests share: places for stores, a server, and how long hypothesis looks for faults."""

from __future__ import annotations

import gc
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import gcs

settings.register_profile("default", deadline=None)  # a busy machine is no fault of a test's
settings.register_profile("long", max_examples=20_000, deadline=None)
settings.load_profile("default")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell without job control starts what it puts into the background so, and children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


# the tests start hundreds of processes that import the packages: compile these once, whatever the shell says
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what lives until the end: modules, and thousands of tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a test makes a store: in a folder, and in memory. (Modules that want another place have their own.)"""
    return str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4()}"


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a running fake-gcs-server, one for all tests; each makes a bucket of its own."""
    with gcs.fake_gcs_server(tmp_path_factory.mktemp("gcs")) as url:
        yield url
