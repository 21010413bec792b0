"""Client processes, forked from one that has imported tstore, so that crashes and hangs are contained."""

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
"""The seconds after its deadline at which a child ends by itself."""


class Ended(NamedTuple):
    """How a child ended: its result, or an error message."""

    result: Any
    error: str
    memory: int
    seconds: float


class Children:
    """Run functions in child processes."""

    def __init__(self, preload: list[str]) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(preload)
        with _python_path():
            forkserver.ensure_running()
        self.memory = 0
        """The peak resident memory of any child."""

    async def run(
        self,
        function: Callable[..., Awaitable[Any]],
        *arguments: Any,
        seconds: float,
        limit: int | None = None,
        environment: Mapping[str, str] | None = None,
        progress: Callable[[Any], None] | None = None,
    ) -> Ended:
        """Run a coroutine function in a child, with limits on its time and on the address space it adds (`limit`).

        If `progress` is given, the function gets a callable as its first argument that sends values to `progress`.
        """
        here, there = self._context.Pipe(duplex=False)
        task = (there, function, arguments, seconds, limit, dict(environment or {}), progress is not None)
        child = self._context.Process(target=_begin, args=task, daemon=True)
        child.start()
        there.close()
        loop = asyncio.get_running_loop()
        began, meter = loop.time(), Meter(child.pid or 0)
        result, error = None, ""
        try:
            while True:
                meter.look()
                alive = child.is_alive()
                message = _received(here)
                if message is None:
                    if not alive:
                        error = f"the process ended with exit status {child.exitcode}"
                        break
                    if loop.time() - began > seconds:
                        error = f"not done after {seconds:g} s"
                        break
                    await asyncio.sleep(_EVERY)
                elif message[0] == "progress":
                    if progress is not None:
                        progress(message[1])
                else:
                    _, result, error = message
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
    """Let processes started in the block import what this one can."""
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
    """Return the next message, or None at the end."""
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

    def tell(value: Any) -> None:
        pipe.send(("progress", value))

    async def work() -> Any:
        return await (function(tell, *arguments) if progress else function(*arguments))

    try:
        pipe.send(("done", asyncio.run(work()), ""))
    except BaseException as error:  # report any error to the parent, and end
        last = traceback.extract_tb(error.__traceback__)[-1]
        pipe.send(("done", None, f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"))
