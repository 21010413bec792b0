"""A served store with its page, and a browser."""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

import tstore
from tests.support.browser import Browser, browser
from tests.support.http_server import everybody
from tests.support.processes import run_tstore
from tstore.service.page import Site
from tstore.service.server import Server


@pytest.fixture
async def store(tmp_path: Path) -> Path:
    """A store with two steps."""
    folder = tmp_path / "store"
    for step in (10, 20):
        w = np.random.default_rng(step).normal(size=(64, 32)).astype("float32")
        tree = {"params": {"w": w, "b": np.zeros(32)}, "epoch": step}
        await tstore.save(folder, tree, step=step, metrics={"loss": 1 / step})
    return folder


@pytest.fixture
async def server(store: Path) -> AsyncIterator[Server]:
    """A server of the store with a token for each scope, and with a page."""
    async with Server(store, access=everybody(), page=Site()) as server:
        yield server


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that the demo leaves: two steps, two quantized copies, and an attempt whose host was killed.

    The demo takes seconds, so one process runs it for all that run tests.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    store, complete = shared / "demo" / "store", shared / "demo-complete"
    with open(shared / "demo-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            assert run_tstore("demo", "--size", "12", "--store", store).returncode == 0
            complete.touch()
    return store


@pytest.fixture
def window(chromium: Browser) -> Browser:
    """The browser, away from the page of the test before, whose server has stopped."""
    chromium.driver.get("about:blank")
    chromium.complaints()
    return chromium
