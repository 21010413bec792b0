"""Host processes that a driver calls simultaneously, and kills.

1. A fork server imports every library once; each host is forked from it, so that 64 of them start in a second and
   no library is used before the fork.
2. A host has one object, created at the first call from the class and the arguments that the driver passes, and
   calls its methods one after the other. The driver raises the errors of these calls.
3. `call_at_once` sets a time of the machine's monotonic clock at which all hosts begin. Hosts report times of the
   same clock.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

LIBRARIES = ("tstore", "tensorstore", "icechunk", "zarr", "numpy")

_CONTEXT = multiprocessing.get_context("forkserver")
_LEAD = 0.05  # seconds from sending the call to the common start


class HostError(Exception):
    """A host's call raised an error, or its process ended."""


class Hosts:
    """`count` processes, each with its own `make(number, count, *arguments)`."""

    def __init__(self, count: int, make: Callable[..., Any], *arguments: Any) -> None:
        libraries = [name for name in LIBRARIES if importlib.util.find_spec(name)]
        _CONTEXT.set_forkserver_preload([*libraries, make.__module__])  # by the first of all hosts
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for number in range(count):
            own_end, host_end = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(host_end, make, number, count, arguments), daemon=True)
            process.start()
            host_end.close()
            self._pipes.append(own_end)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in range(len(self._processes)):
            self.kill(number)

    def send(self, do: str, *arguments: Any, hosts: Sequence[int] | None = None) -> list[int]:
        """Start a call of a method on hosts (all by default); `results` waits for it."""
        numbers = list(range(len(self._pipes)) if hosts is None else hosts)
        for number in numbers:
            self._pipes[number].send((do, arguments))
        return numbers

    def results(self, numbers: Sequence[int]) -> list[Any]:
        """Return the results of the calls. Raise `HostError` after all have ended."""
        values, errors = [], []
        for number in numbers:
            try:
                value, error = self._pipes[number].recv()
            except EOFError:
                value, error = None, "its process has ended"
            values.append(value)
            if error is not None:
                errors.append(f"host {number}: {error}")
        if errors:
            raise HostError(errors[0] + (f" (and {len(errors) - 1} more)" if errors[1:] else ""))
        return values

    def call(self, do: str, *arguments: Any, hosts: Sequence[int] | None = None) -> list[Any]:
        """Call a method on hosts (all by default), and return the results."""
        return self.results(self.send(do, *arguments, hosts=hosts))

    def call_at_once(self, do: str, *arguments: Any) -> tuple[float, list[int]]:
        """Start a call on all hosts; its first argument is the time at which all begin."""
        start = time.monotonic() + _LEAD
        return start, self.send(do, start, *arguments)

    def kill(self, number: int) -> None:
        """Kill a process with SIGKILL and wait for its end."""
        if self._processes[number].is_alive():
            self._processes[number].kill()
        self._processes[number].join()
        self._pipes[number].close()


def until(moment: float) -> None:
    """Wait until a time of the monotonic clock."""
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left if left > 0.002 else 0)


def _serve(pipe: Connection, make: Callable[..., Any], number: int, count: int, extra: Sequence[Any]) -> None:
    try:
        subject = None
        while True:
            do, arguments = pipe.recv()
            try:
                subject = subject or make(number, count, *extra)
                result: tuple[Any, str | None] = getattr(subject, do)(*arguments), None
            except Exception as error:  # the driver raises it
                result = None, f"{type(error).__name__}: {error}"
            pipe.send(result)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return  # the driver has ended
