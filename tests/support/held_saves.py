"""Saves in the background that end late in one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from tstore.checkpoint.background_store import BackgroundStore


@contextmanager
def held_saves(holds: bool) -> Iterator[Callable[[], None]]:
    """If `holds`, let no save of this process be done, though committed, before the function is called."""
    released, original = threading.Event(), BackgroundStore.save

    async def save(*arguments: Any) -> Any:
        saved = await original(*arguments)
        await asyncio.to_thread(released.wait)
        return saved

    with patch.object(BackgroundStore, "save", save) if holds else nullcontext():
        yield released.set
