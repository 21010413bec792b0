"""A served store with its page, and a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

import tstore
from tests.support.browser import Browser, browser
from tests.support.http_server import everybody
from tstore.page import Site
from tstore.server import Server


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


@pytest.fixture
def window(chromium: Browser) -> Browser:
    """The browser, away from the page of the test before, whose server has stopped."""
    chromium.driver.get("about:blank")
    chromium.complaints()
    return chromium
