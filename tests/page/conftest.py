"""A served store with its page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

import tstore
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
