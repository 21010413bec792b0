"""Host processes that a driver asks to do things at the same moment, and kills.

1. A fork server imports every library once; each host is forked from it, so that 64 of them start in a second and
   no library is used before the fork.
2. A host holds one object, made of the class and the arguments that the driver passes, and answers calls of its
   methods, one after the other. An error there is an error here.
3. `together` names a moment by the machine's monotonic clock, at which all hosts begin; what they report in that
   clock can be compared.
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
_LEAD = 0.05  # seconds from the order to the common start


class HostError(Exception):
    """What a host's call raised, as text; or the end of its process."""


class Hosts:
    """``count`` processes, each with its own ``make(number, count, *arguments)``."""

    def __init__(self, count: int, make: Callable[..., Any], *arguments: Any) -> None:
        _CONTEXT.set_forkserver_preload([name for name in LIBRARIES if importlib.util.find_spec(name)])
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for number in range(count):
            mine, its = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(its, make, number, count, arguments), daemon=True)
            process.start()
            its.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in range(len(self._processes)):
            self.kill(number)

    def order(self, do: str, *arguments: Any, of: Sequence[int] | None = None) -> list[int]:
        """Asks hosts (all by default) to call a method; ``answers`` waits for it."""
        asked = list(range(len(self._pipes)) if of is None else of)
        for number in asked:
            self._pipes[number].send((do, arguments))
        return asked

    def answers(self, asked: Sequence[int]) -> list[Any]:
        """What the methods returned; raises `HostError`, once all have answered."""
        found, errors = [], []
        for number in asked:
            try:
                value, error = self._pipes[number].recv()
            except EOFError:
                value, error = None, "its process has ended"
            found.append(value)
            if error is not None:
                errors.append(f"host {number}: {error}")
        if errors:
            raise HostError(errors[0] + (f" (and {len(errors) - 1} more)" if errors[1:] else ""))
        return found

    def ask(self, do: str, *arguments: Any, of: Sequence[int] | None = None) -> list[Any]:
        """Calls a method on hosts (all by default), and returns what it returned."""
        return self.answers(self.order(do, *arguments, of=of))

    def together(self, do: str, *arguments: Any) -> tuple[float, list[int]]:
        """Orders a method, whose first argument is the moment when all hosts begin."""
        start = time.monotonic() + _LEAD
        return start, self.order(do, start, *arguments)

    def kill(self, number: int) -> None:
        """Ends a process with SIGKILL; on return it is gone."""
        if self._processes[number].is_alive():
            self._processes[number].kill()
        self._processes[number].join()
        self._pipes[number].close()


def until(moment: float) -> None:
    """Waits for a moment of the monotonic clock."""
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left if left > 0.002 else 0)


def _serve(pipe: Connection, make: Callable[..., Any], number: int, count: int, arguments: Sequence[Any]) -> None:
    try:
        subject = make(number, count, *arguments)
        while True:
            do, given = pipe.recv()
            try:
                answer = getattr(subject, do)(*given), None
            except Exception as error:  # told to the driver, which raises it
                answer = None, f"{type(error).__name__}: {error}"
            pipe.send(answer)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return  # the driver has ended
