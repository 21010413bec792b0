"""The objects behind a server, where they are local files.

What is read can be sent by the system itself, and what comes goes into a temporary file piece by piece, so that
memory stays flat whatever the length of an object. These files lie in the store's own folder, `.upload.….tmp`, and
are locked: so a server that starts removes at once those of one that was killed, and none that is being written.

No link is followed below the store's own folder. Whoever can write into that folder is trusted not to swap a
folder for a link at the very moment between the look and the open.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import stat
import time
from collections.abc import AsyncIterator, Hashable, Iterator
from io import FileIO

import xxhash

from tstore.errors import Denied, NotFound
from tstore.runtime.pool import run, uncancelled
from tstore.server.limits import LIMITS
from tstore.server.listings import Listings
from tstore.server.names import Kind
from tstore.server.served import SMALL, Found, Incoming, Served
from tstore.storage.base import Buffers, Durability, checked_key
from tstore.storage.local.atomic_file import StagedFile, explained, locked_draft, write_all
from tstore.storage.local.store import LocalBackend
from tstore.storage.objects import Entry, Page, PutMode

__all__ = ["ServedFolder"]

_MARK = "upload"
_TICK = 3.0  # seconds, in which a file may change without another time


class ServedFolder(Served):
    """The files of a store's folder."""

    backend: LocalBackend

    def __init__(self, backend: LocalBackend, wait: float = LIMITS.wait) -> None:
        super().__init__(LocalBackend(os.path.realpath(backend.url)), wait)
        self._listings = Listings()

    @contextlib.asynccontextmanager
    async def opened(self, key: str, kind: Kind) -> AsyncIterator[Found]:
        """The object at a key, as long as the block takes; `NotFound`."""
        found, file = await run(self._open, key, kind)
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
        if mode is PutMode.CREATE:
            await run(self._create, key, data)  # in one turn of a thread
            return
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

    async def tidy_up(self) -> None:
        """Removes what a server that was killed left unfinished."""
        await run(self._tidy_up)

    @contextlib.asynccontextmanager
    async def incoming(self, key: str, client: Hashable) -> AsyncIterator[Incoming]:
        """A new object that is filled piece by piece, and appears whole when the block ends without exception.

        Raises `AlreadyExists` at the end where another was faster.
        """
        incoming = _IncomingFile(self.backend, await run(self._path, key))
        try:
            await run(incoming.begin)
            yield incoming
            await run(incoming.finish)
        finally:
            await uncancelled(run(incoming.close))

    def _tidy_up(self) -> None:
        try:
            draft = locked_draft(self.backend.url, _MARK, Durability.NONE)
        except OSError:
            return  # there is no folder yet, or nothing can be changed in it
        try:
            draft.remove_abandoned()
        finally:
            draft.close()

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

    def _create(self, key: str, data: bytes) -> None:
        self._path(key)
        with self.backend.created(key, Durability.FSYNC) as fd:
            write_all(fd, [data], 0)

    def _open(self, key: str, kind: Kind) -> tuple[Found, FileIO]:
        path = self._path(key)
        with explained("read", path):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise Denied(f"{path} is a link; a server follows no links below its store") from error
                raise
            try:
                known = os.fstat(fd)
                if not stat.S_ISREG(known.st_mode):
                    raise NotFound(f"{path} is not a file")
                file = FileIO(fd)
            except BaseException:
                os.close(fd)
                raise
        age = _age(known)
        if kind.replaceable and known.st_size <= SMALL:  # two in one tick of the clock may look alike
            data = file.read(SMALL)
            return Found(len(data), xxhash.xxh3_128_hexdigest(data), age, known.st_mtime, data), file
        young = kind.replaceable and age < _TICK
        etag = None if young else f"{known.st_ino:x}-{known.st_mtime_ns:x}-{known.st_size:x}"
        return Found(known.st_size, etag, age, known.st_mtime, file), file

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
        for name in self._walk(prefix.rpartition("/")[0], prefix, delimiter, after):
            entry = None if name.endswith("/") else self._entry(name)
            if entry is None and not name.endswith("/"):
                continue
            if len(entries) + len(folders) == limit:
                return Page(entries, folders), last
            last = name
            if entry is None:
                folders.append(name)
            else:
                entries.append(entry)
        return Page(entries, folders), None

    def _entry(self, name: str) -> Entry | None:
        """An object as a list tells it; None where it is no file, or was removed meanwhile."""
        try:
            known = os.lstat(f"{self.backend.url}/{name}")
        except FileNotFoundError:
            return None
        return Entry(name, known.st_size, _age(known)) if stat.S_ISREG(known.st_mode) else None

    def _walk(self, folder: str, prefix: str, delimiter: str, after: str) -> Iterator[str]:
        """The names below the prefix and behind `after`, in order, whatever they are; folders end in "/"."""
        base = f"{folder}/" if folder else ""
        try:
            path = self._path(f"{base}x")[:-2]
            with explained("list", path):
                names = self._listings.names(path)
        except NotFound:
            return
        at = bisect.bisect_left(names, max(prefix, after), key=lambda name: f"{base}{name}")
        if at and not delimiter and names[at - 1].endswith("/") and after.startswith(f"{base}{names[at - 1]}"):
            at -= 1  # the folder in which `after` lies
        for name in (f"{base}{names[i]}" for i in range(at, len(names))):
            if not name.startswith(prefix):
                break
            if not name.endswith("/"):
                if name != after:
                    yield name
            elif not delimiter:
                yield from self._walk(name[:-1], prefix, delimiter, after)
            elif name != after and any(map(self._entry, self._walk(name[:-1], name, "", ""))):
                yield name  # a folder without an object is none


class _IncomingFile:
    def __init__(self, backend: LocalBackend, path: str) -> None:
        self._backend = backend
        self._path = path
        self._draft: StagedFile | None = None
        self._end = 0

    async def write(self, pieces: Buffers) -> None:
        await run(self._write, pieces)

    def begin(self) -> None:
        """Opens the temporary file. Blocking."""
        with explained("create", self._path):
            self._backend.make_folder(self._backend.url, Durability.FSYNC)
            self._draft = locked_draft(self._backend.url, _MARK, Durability.FSYNC)

    def finish(self) -> None:
        """Gives the file its name. Blocking."""
        assert self._draft is not None
        with explained("create", self._path):
            self._draft.force()
            self._backend.make_folder(os.path.dirname(self._path), Durability.FSYNC)
            self._draft.publish(self._path)

    def close(self) -> None:
        """Removes what has no name yet; any number of times. Blocking."""
        if self._draft is not None:
            self._draft.close()

    def _write(self, pieces: Buffers) -> None:
        assert self._draft is not None
        with explained("write", self._path):
            self._end += write_all(self._draft.fd, pieces, self._end)


def _age(known: os.stat_result) -> float:
    return max(0.0, time.time() - known.st_mtime)
