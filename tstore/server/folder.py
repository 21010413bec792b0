"""The objects behind a server, where they are local files.

What is read can be sent by the system itself, and what comes goes into a temporary file piece by piece, so that
memory stays flat whatever the length of an object.

No link is followed below the store's own folder. Whoever can write into that folder is trusted not to swap a
folder for a link at the very moment between the look and the open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import AsyncIterator, Iterator
from io import FileIO

from tstore.errors import Denied, NotFound
from tstore.kv.base import Buffers, Durability, checked_key
from tstore.kv.local import LocalBackend
from tstore.kv.newfile import explained, write_all
from tstore.kv.objects import Entry, Page, PutMode
from tstore.pool import run, uncancelled
from tstore.server.names import Kind
from tstore.server.served import Found, Incoming, Served

__all__ = ["ServedFolder"]


class ServedFolder(Served):
    """The files of a store's folder."""

    backend: LocalBackend

    def __init__(self, backend: LocalBackend) -> None:
        super().__init__(LocalBackend(os.path.realpath(backend.url)))

    @contextlib.asynccontextmanager
    async def opened(self, key: str, kind: Kind) -> AsyncIterator[Found]:
        """The object at a key, as long as the block takes; `NotFound`."""
        found, file = await run(self._open, key)
        try:
            yield found
        finally:
            file.close()

    async def size(self, key: str) -> int | None:
        """The length of an object, None where there is none."""
        return await run(self._size, key)

    async def exists(self, key: str) -> bool:
        """Whether there is an object at the key."""
        return await self.size(key) is not None

    async def put(self, key: str, data: bytes, mode: PutMode) -> None:
        """Stores an object, durable when this returns; `AlreadyExists` where `mode` is CREATE and one is there."""
        await run(self._path, key)
        await super().put(key, data, mode)

    async def delete(self, key: str) -> None:
        """Removes an object; no error where it does not exist."""
        await run(self._path, key)
        await super().delete(key)

    async def tidy(self, folder: str) -> None:
        """Removes a folder in which no object is left."""
        page, _ = await self.page(f"{folder}/", "", "", 1)
        if not page.entries:
            await super().delete(folder)

    async def page(self, prefix: str, delimiter: str, after: str, limit: int) -> tuple[Page, str | None]:
        """What lies below the prefix behind the name `after`, and the last name where there is more."""
        return await run(self._page, prefix, delimiter, after, limit)

    @contextlib.asynccontextmanager
    async def incoming(self, key: str, length: int | None) -> AsyncIterator[Incoming]:
        """A new object that is filled piece by piece, and appears whole when the block ends without exception.

        Raises `AlreadyExists` at the end where another was faster.
        """
        path = await run(self._path, key)
        stack = contextlib.ExitStack()
        try:
            yield _IncomingFile(path, await run(stack.enter_context, self.backend.created(key, Durability.FSYNC)))
        except BaseException:
            await uncancelled(run(stack.__exit__, _Abandoned, _Abandoned(), None))
            raise
        await run(stack.__exit__, None, None, None)

    def _path(self, key: str) -> str:
        """The path of a key, whose folders are folders of the store, and no links out of it."""
        path = f"{self.backend.url}/{checked_key(key, self.backend.url)}"
        folder = self.backend.url
        for part in key.split("/")[:-1]:
            folder = f"{folder}/{part}"
            try:
                if not stat.S_ISDIR(os.lstat(folder).st_mode):
                    raise Denied(f"{folder} is a link, or no folder; a server follows no links below its store")
            except FileNotFoundError:
                break
        return path

    def _open(self, key: str) -> tuple[Found, FileIO]:
        path = self._path(key)
        with explained("read", path):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise Denied(f"{path} is a link; a server follows no links below its store") from error
                raise
        file = FileIO(fd)
        known = os.fstat(fd)
        if not stat.S_ISREG(known.st_mode):
            file.close()
            raise NotFound(f"{path} is not a file")
        etag = f"{known.st_ino:x}-{known.st_mtime_ns:x}-{known.st_size:x}"
        return Found(known.st_size, etag, _age(known), known.st_mtime, file), file

    def _size(self, key: str) -> int | None:
        path = self._path(key)
        try:
            with explained("look at", path):
                known = os.lstat(path)
        except NotFound:
            return None
        return known.st_size if stat.S_ISREG(known.st_mode) else None

    def _page(self, prefix: str, delimiter: str, after: str, limit: int) -> tuple[Page, str | None]:
        entries: list[Entry] = []
        folders: list[str] = []
        last = ""
        for name, size, age in self._walk(prefix.rpartition("/")[0], prefix, delimiter, after):
            if len(entries) + len(folders) == limit:
                return Page(entries, folders), last
            last = name
            if delimiter and name.endswith("/"):
                folders.append(name)
            else:
                entries.append(Entry(name, size, age))
        return Page(entries, folders), None

    def _walk(self, folder: str, prefix: str, delimiter: str, after: str) -> Iterator[tuple[str, int, float]]:
        """The names below the prefix and behind `after`, in order; folders end in "/"."""
        base = f"{folder}/" if folder else ""
        found: dict[str, os.stat_result] = {}
        try:
            path = self._path(f"{base}x")[:-2]
            with explained("list", path), os.scandir(path) as listed:
                for entry in listed:
                    if entry.name.startswith("."):
                        continue
                    name = f"{base}{entry.name}" + ("/" if entry.is_dir(follow_symlinks=False) else "")
                    behind = name > after or (name.endswith("/") and not delimiter and after.startswith(name))
                    if name.startswith(prefix) and behind:
                        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                            found[name] = entry.stat(follow_symlinks=False)
        except NotFound:
            return
        for name in sorted(found):
            known = found[name]
            if not name.endswith("/"):
                if stat.S_ISREG(known.st_mode):
                    yield name, known.st_size, _age(known)
            elif not delimiter:
                yield from self._walk(name[:-1], prefix, delimiter, after)
            elif next(self._walk(name[:-1], name, "", ""), None):  # a folder without an object is none
                yield name, 0, 0.0


class _IncomingFile:
    def __init__(self, path: str, fd: int) -> None:
        self._path = path
        self._fd = fd
        self._end = 0

    async def write(self, pieces: Buffers) -> None:
        await run(self._write, pieces)

    def _write(self, pieces: Buffers) -> None:
        with explained("write", self._path):
            self._end += write_all(self._fd, pieces, self._end)


class _Abandoned(Exception):
    """Ends a block without the new object; no error of the block could be taken for one of the file's."""


def _age(known: os.stat_result) -> float:
    return max(0.0, time.time() - known.st_mtime)
