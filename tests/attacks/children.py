"""Clients in processes of their own, forked from one that has imported tstore: a crash or a freeze is theirs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import os
import resource
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tests.attacks.meter import Meter

__all__ = ["Children", "Ended"]

_EVERY = 0.02
_BEYOND = 5
"""Seconds after its time in which a child that nobody ended ends by itself."""


class Ended(NamedTuple):
    """How a child ended: with a result, or with an error, in words."""

    result: Any
    error: str
    memory: int
    seconds: float


class Children:
    """Runs functions in child processes."""

    def __init__(self, preload: list[str]) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(preload)
        with _python_path():
            forkserver.ensure_running()
        self.memory = 0
        """The most that any child has had resident."""

    async def run(
        self,
        function: Callable[..., Awaitable[Any]],
        *arguments: Any,
        seconds: float,
        limit: int | None = None,
        environment: Mapping[str, str] | None = None,
        progress: Callable[[Any], None] | None = None,
    ) -> Ended:
        """Run a coroutine function in a child with at most so much time and address space (`limit`, in addition).

        `progress` gets what the function passes to the callable that it takes as its first argument, if given.
        """
        here, there = self._context.Pipe(duplex=False)
        asked = (there, function, arguments, seconds, limit, dict(environment or {}), progress is not None)
        child = self._context.Process(target=_begin, args=asked, daemon=True)
        child.start()
        there.close()
        loop = asyncio.get_running_loop()
        began, meter = loop.time(), Meter(child.pid or 0)
        result, error = None, ""
        try:
            while True:
                meter.look()
                alive = child.is_alive()
                said = _received(here)
                if said is None:
                    if not alive:
                        error = f"the process ended with exit status {child.exitcode}"
                        break
                    if loop.time() - began > seconds:
                        error = f"not done after {seconds:g} s"
                        break
                    await asyncio.sleep(_EVERY)
                elif said[0] == "progress":
                    if progress is not None:
                        progress(said[1])
                else:
                    _, result, error = said
                    break
        finally:
            meter.look()
            child.kill()
            await asyncio.to_thread(child.join)
            here.close()
        self.memory = max(self.memory, meter.memory)
        return Ended(result, error, meter.memory, loop.time() - began)


@contextlib.contextmanager
def _python_path() -> Iterator[None]:
    """Let processes that are started in the block import what this one can."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _received(pipe: Connection) -> Any:
    """The next message, None if there is none."""
    try:
        return pipe.recv() if pipe.poll() else None
    except EOFError:
        return None


def _begin(
    pipe: Connection,
    function: Callable[..., Awaitable[Any]],
    arguments: tuple[Any, ...],
    seconds: float,
    limit: int | None,
    environment: dict[str, str],
    progress: bool,
) -> None:
    signal.alarm(math.ceil(seconds) + _BEYOND)
    for name in [name for name in os.environ if name.startswith("TSTORE_")]:
        del os.environ[name]
    os.environ.update(environment)
    if limit is not None:
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + limit, size + limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def tell(what: Any) -> None:
        pipe.send(("progress", what))

    async def work() -> Any:
        return await (function(tell, *arguments) if progress else function(*arguments))

    try:
        pipe.send(("done", asyncio.run(work()), ""))
    except BaseException as error:  # whatever it is, the parent is told, and the child ends
        last = traceback.extract_tb(error.__traceback__)[-1]
        pipe.send(("done", None, f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"))
