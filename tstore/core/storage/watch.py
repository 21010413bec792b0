"""Waiting for new objects in a folder, with notifications of new files if the system sends them.

1. On Linux the kernel notifies this process of every name that appears in a watched local folder (inotify).
2. The kernel sends nothing for names that other machines create on a network file system. A watch may also be
   impossible: too many watches, another operating system, an event loop that can't wait for descriptors, a storage
   that is not a local folder. So a notification only ends a wait early; callers also poll.
3. Temporary names (`atomic_file`) are ignored.
4. A few descriptors are kept for the next watches, because closing a descriptor of inotify may take 10 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple, Self

from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage
from tstore.core.storage.local.store import LocalStorage

__all__ = ["Watch"]

_CREATED, _MOVED_TO = 0x100, 0x80  # IN_CREATE, IN_MOVED_TO
_EVENT = struct.Struct("iIII")  # struct inotify_event without the name: watch, mask, cookie, size of the name
_READ = 16 << 10  # bytes of events in one system call

_MAX_FREE = 4

_free_descriptors: list[int] = []  # inotify descriptors without a watch


class _Inotify(NamedTuple):
    """A descriptor that becomes readable when a name appears, and the number of its watch."""

    fd: int
    watch: int


class Watch:
    """A watch on a folder of a storage, for the duration of the `async with` block."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._path = f"{storage.url}/{folder}" if isinstance(storage, LocalStorage) else None
        self._loop = asyncio.get_running_loop()
        self._appeared = asyncio.Event()
        self._inotify: _Inotify | None = None

    @property
    def notified(self) -> bool:
        """Whether the system sends notifications of new names."""
        return self._inotify is not None

    async def wait(self, seconds: float) -> None:
        """Wait until a name appears, at most `seconds`; return at once if one has appeared since the last wait.

        Without notifications, wait for all of `seconds`.
        """
        if self._inotify is None:
            await asyncio.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._appeared.wait()
        self._appeared.clear()

    async def __aenter__(self) -> Self:
        inotify = None if self._path is None else await run(_start, self._path)
        if inotify is not None:
            try:
                self._loop.add_reader(inotify.fd, self._on_readable, inotify.fd)
                self._inotify = inotify
            except NotImplementedError:
                await run(_stop, inotify)
        return self

    async def __aexit__(self, *_: object) -> None:
        inotify, self._inotify = self._inotify, None
        if inotify is not None:
            self._loop.remove_reader(inotify.fd)
            if len(_free_descriptors) < _MAX_FREE:
                _stop(inotify)
            else:
                await run(os.close, inotify.fd)

    def _on_readable(self, fd: int) -> None:
        if not all(name.startswith(b".") for name in _names(fd)):
            self._appeared.set()


def _start(path: str) -> _Inotify | None:
    """Start a watch on a local folder; return None if that is impossible."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "inotify_init1"):
        return None
    try:
        fd = _free_descriptors.pop()
    except IndexError:
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    watch = libc.inotify_add_watch(fd, os.fsencode(path), _CREATED | _MOVED_TO) if fd >= 0 else -1
    if watch >= 0:
        return _Inotify(fd, watch)
    if fd >= 0:
        _free_descriptors.append(fd)
    return None


def _stop(inotify: _Inotify) -> None:
    ctypes.CDLL(None).inotify_rm_watch(inotify.fd, inotify.watch)
    for _ in _names(inotify.fd):
        pass  # the next watch must not see these names
    _free_descriptors.append(inotify.fd)


def _names(fd: int) -> Iterator[bytes]:
    """Yield the names that have appeared since the last call."""
    while True:
        try:
            events = os.read(fd, _READ)
        except BlockingIOError:
            return
        offset = 0
        while offset < len(events):
            *_, size = _EVENT.unpack_from(events, offset)
            offset += _EVENT.size
            yield events[offset : offset + size].rstrip(b"\0")
            offset += size


def _after_fork() -> None:
    while _free_descriptors:
        os.close(_free_descriptors.pop())  # the parent still uses it: a child would take its events


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
