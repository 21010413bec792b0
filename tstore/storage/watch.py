"""Waiting for what others create in a folder, without asking for it again and again.

1. On Linux the system tells this process of every name that appears in a local folder (inotify). A watch that has
   begun misses nothing that appears from then on.
2. It does not tell what other machines do on a network file system, and a folder may not be watchable: too many
   watches, another system, an event loop that can't wait for descriptors, a backend that is no local folder. So
   being told only ends a wait early; whoever waits also looks of his own accord.
3. Temporary names (`newfile`) tell nothing.
4. Descriptors are kept for the next watch: to close one may take the system 10 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple, Self

from tstore.runtime.pool import run
from tstore.storage.base import Backend
from tstore.storage.local.store import LocalBackend

__all__ = ["Watch"]

_CREATED, _MOVED_TO = 0x100, 0x80
_EVENT = struct.Struct("iIII")
_READ = 16 << 10

_idle: list[int] = []


class _Watched(NamedTuple):
    """A descriptor that can be read when a name has appeared, and the number of the watch behind it."""

    fd: int
    number: int


class Watch:
    """A watch on a folder of a backend, from the beginning of the `async with` block to its end."""

    def __init__(self, backend: Backend, folder: str) -> None:
        self._path = f"{backend.url}/{folder}" if isinstance(backend, LocalBackend) else None
        self._loop = asyncio.get_running_loop()
        self._appeared = asyncio.Event()
        self._watched: _Watched | None = None

    @property
    def told(self) -> bool:
        """Whether the system tells what appears."""
        return self._watched is not None

    async def wait(self, seconds: float) -> None:
        """Returns after that many seconds, or as soon as something has appeared since the last wait."""
        if self._watched is None:
            await asyncio.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._appeared.wait()
        self._appeared.clear()

    async def __aenter__(self) -> Self:
        watched = None if self._path is None else await run(_watched, self._path)
        if watched is not None:
            try:
                self._loop.add_reader(watched.fd, self._hear, watched.fd)
                self._watched = watched
            except NotImplementedError:
                _end(watched)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watched, self._watched = self._watched, None
        if watched is not None:
            self._loop.remove_reader(watched.fd)
            _end(watched)

    def _hear(self, fd: int) -> None:
        if not all(name.startswith(b".") for name in _names(fd)):
            self._appeared.set()


def _watched(path: str) -> _Watched | None:
    """A watch on a local folder; None where there can be none."""
    system = ctypes.CDLL(None)
    if not hasattr(system, "inotify_init1"):
        return None
    try:
        fd = _idle.pop()
    except IndexError:
        fd = system.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    number = system.inotify_add_watch(fd, os.fsencode(path), _CREATED | _MOVED_TO) if fd >= 0 else -1
    if number >= 0:
        return _Watched(fd, number)
    if fd >= 0:
        _idle.append(fd)
    return None


def _end(watched: _Watched) -> None:
    ctypes.CDLL(None).inotify_rm_watch(watched.fd, watched.number)
    for _ in _names(watched.fd):
        pass  # nothing of it is left for the next watch
    _idle.append(watched.fd)


def _names(fd: int) -> Iterator[bytes]:
    """The names that have appeared."""
    while True:
        try:
            events = os.read(fd, _READ)
        except BlockingIOError:
            return
        at = 0
        while at < len(events):
            *_, size = _EVENT.unpack_from(events, at)
            at += _EVENT.size
            yield events[at : at + size].rstrip(b"\0")
            at += size


def _after_fork() -> None:
    while _idle:
        os.close(_idle.pop())  # what is told there is told to the parent


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
