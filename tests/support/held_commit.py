"""Holding a commit just before its record is created, while a test changes the store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from tstore.lab.conformance.faults import Faults

__all__ = ["held_commit"]

T = TypeVar("T")


@contextlib.asynccontextmanager
async def held_commit(faults: Faults, commit: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Start a commit and hold it before its record is created, until the block ends; yield its task."""
    gate = faults.hold("create", "commits/*")
    task = asyncio.create_task(commit)
    await gate.reached()
    yield task
    gate.release()
