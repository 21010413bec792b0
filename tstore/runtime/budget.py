"""The byte budget: what all calls of this process may hold beyond the caller's arrays.

Scratch buffers belong to a worker thread and are reused, which also spares the page faults of fresh memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

__all__ = ["BUDGET", "acquire", "aligned", "on_shortage", "release", "scratch"]

BUDGET = 256 << 20
"""Bytes that all calls of this process together may hold beyond the caller's arrays."""

_LONGEST_KEPT = 16 << 20
_ALIGNMENT = 64
_SHORTAGE = 0.05  # seconds after which a caller that waits for memory says so again


class _Budget:
    """Half of the bytes for buffers that threads keep, half for claims that end.

    A claim above its half waits until it is alone. A thread that holds a claim gets another at once: it could
    not let go of the first while it waits.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit // 2
        self._kept = 0
        self._held = 0
        self._changed = threading.Condition()
        self._mine = threading.local()

    def keep(self, size: int) -> bool:
        """Whether a thread may keep a buffer of that size for good."""
        with self._changed:
            room = size <= _LONGEST_KEPT and self._kept + size <= self._limit
            self._kept += size if room else 0
            return room

    @contextlib.contextmanager
    def claim(self, size: int) -> Iterator[None]:
        mine = getattr(self._mine, "held", 0)
        self.acquire(size)
        self._mine.held = mine + size
        try:
            yield
        finally:
            self._mine.held = mine
            self.release(size)

    def acquire(self, size: int) -> None:
        mine = getattr(self._mine, "held", 0)
        while True:
            with self._changed:
                if mine or self._held == 0 or self._held + size <= self._limit:
                    self._held += size
                    return
            for call in _on_shortage:
                call()
            with self._changed:
                if self._held + size > self._limit:
                    self._changed.wait(_SHORTAGE)  # not for ever: who holds memory may come to hold it only now

    def release(self, size: int) -> None:
        with self._changed:
            self._held -= size
            self._changed.notify_all()


class _State:
    """The budget of this process and the buffers of its threads; a forked child begins with none taken."""

    def __init__(self) -> None:
        self.budget = _Budget(BUDGET)
        self.local = threading.local()


_on_shortage: list[Callable[[], None]] = []
_state = _State()


def _after_fork() -> None:
    global _state  # noqa: PLW0603 - the parent's threads, which hold the rest, do not exist in the child
    _state = _State()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def acquire(size: int) -> None:
    """Take bytes from the budget until `release(size)`; block until there is room."""
    _state.budget.acquire(size)


def release(size: int) -> None:
    """Give bytes back to the budget, from any thread."""
    _state.budget.release(size)


def on_shortage(call: Callable[[], None]) -> None:
    """Have whoever waits for memory call `call`, which should begin to free some without waiting."""
    _on_shortage.append(call)


@contextlib.contextmanager
def scratch(size: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield a buffer of `size` bytes for the calling worker thread, taken from the budget.

    Nested calls get distinct buffers. The contents are undefined.
    """
    free: list[npt.NDArray[np.uint8]] = _state.local.__dict__.setdefault("free", [])
    at = next((i for i, buffer in enumerate(free) if buffer.size >= size), None)
    if at is not None:
        kept = free.pop(at)
    elif _state.budget.keep(rounded := 1 << max(16, (size - 1).bit_length())):
        kept = np.empty(rounded, np.uint8)
    else:
        with _state.budget.claim(size):
            yield np.empty(size, np.uint8)
        return
    try:
        yield kept[:size]
    finally:
        free.append(kept)


def aligned(size: int) -> int:
    """Return the first offset from `size` on in a scratch buffer that is aligned for every dtype."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
