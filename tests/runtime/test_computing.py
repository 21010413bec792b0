"""Computations in threads, which a cancellation ends at any moment without consequences for later calls."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import textwrap
import threading
import uuid
from typing import Any, NoReturn

import numpy as np
import pytest

import tstore
from tstore.core.runtime.concurrency import compute
from tstore.core.runtime.pool import run


def total(count: int) -> int:
    result = 0
    for number in range(count):
        result += number
    return result


class Endless:
    """A parser that never ends, and tells when it has begun."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def __call__(self, *_: Any) -> NoReturn:
        self.begun.set()
        while True:
            pass

    async def end(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task once the parser runs in it."""
        assert await asyncio.to_thread(self.begun.wait, 60)
        task.cancel()
        async with asyncio.timeout(60):
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_results_and_errors() -> None:
    assert await compute(total, 5) == 10
    with pytest.raises(TypeError):
        await compute(total, "a")


async def test_a_cancellation_ends_a_computation() -> None:
    endless = Endless()
    await endless.end(asyncio.create_task(compute(endless)))


async def test_a_computation_that_drops_the_exception_ends_too() -> None:
    """As a destructor does, or a callback of the garbage collector."""
    endless = Endless()

    def dropping() -> NoReturn:
        with contextlib.suppress(BaseException):
            endless()
        while True:
            pass

    await endless.end(asyncio.create_task(compute(dropping)))


async def test_a_cancellation_at_any_moment_meets_no_other_call() -> None:
    choice = random.Random(1)
    for _ in range(2000):
        task = asyncio.create_task(compute(total, choice.randrange(4000)))
        for _ in range(choice.randrange(4)):
            await asyncio.sleep(choice.choice((0, 0, 1e-4)))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert await run(total, 100) == 4950


@pytest.mark.parametrize("function", ["part_of", "scalars_in", "paths_in", "unflatten"])
async def test_a_cancellation_ends_the_parsing_of_a_structure(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    await tstore.save(store, {"w": {"a": np.ones(2)}, "s": [0.5] * 50_000}, 1)
    endless = Endless()
    monkeypatch.setattr(f"tstore.checkpoint.source.{function}", endless)
    only = "w/**" if function == "part_of" else None
    await endless.end(asyncio.create_task(tstore.restore(store, 1, only=only)))


def test_a_cancellation_leaves_nothing_pending_in_the_interpreter() -> None:
    """Otherwise CPython 3.11 looks for it between all instructions, and under a tracer it never ends."""
    code = """
        import asyncio, sys
        from tests.runtime.test_computing import Endless, total
        from tstore.core.runtime.concurrency import compute

        async def cancel(call, *arguments, pause):
            task = asyncio.create_task(compute(call, *arguments))
            await asyncio.sleep(pause)
            task.cancel()
            await asyncio.wait([task])

        async def main():
            await cancel(Endless(), pause=0.05)
            for number in range(200):
                await cancel(total, 40 * number, pause=1e-4)

        asyncio.run(main())
        sys.settrace(lambda frame, event, argument: None)
        print(total(10))
    """
    traced = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=False, capture_output=True, text=True, timeout=250
    )
    assert (traced.stdout, traced.stderr) == ("45\n", "")
