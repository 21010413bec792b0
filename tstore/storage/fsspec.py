"""Objects on any file system of fsspec: for reading, and for writing where the probe finds a true create.

fsspec promises little about its `mode="create"`: some file systems ask the server for it, some ignore it, and its
own way, which most inherit, is to look first and then to write; that one is refused here. Of the others nobody
knows, so `capabilities.conditional_create` is False, and who wants to write asks `storage.probe`.
File systems with coroutines run on the I/O loop, others in the pool's threads. Instances and listings are never
shared or cached: a store must see what others write.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from fsspec import AbstractFileSystem, get_filesystem_class
from fsspec.core import url_to_fs

from tstore.errors import (
    AlreadyExists,
    Corrupt,
    Denied,
    InvalidArgument,
    NotFound,
    StorageFull,
    TStoreError,
    Unavailable,
)
from tstore.runtime.pool import run
from tstore.storage.base import LONGEST, Buffers, Capabilities, checked_key, overlong
from tstore.storage.objects import WHOLE, Entry, Page, PutMode, Span

__all__ = ["FsspecObjects"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_WRITTEN = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")


class FsspecObjects:
    """The files below one path of a file system that fsspec knows."""

    capabilities = Capabilities(conditional_create=False, listing=True, ranges=True, durable=False)

    def __init__(self, url: str, **options: Any) -> None:
        """Takes whatever options the file system takes, and connects at the first request.

        Raises `InvalidArgument` where fsspec does not know the scheme, or the package that it needs is missing.
        """
        parts = urlsplit(url)
        self.url = url.replace(f"{parts.netloc}", parts.netloc.rpartition("@")[2], 1).rstrip("/")
        self._address = url
        self._options = options
        try:
            kind = get_filesystem_class(parts.scheme)
        except (ImportError, ValueError) as error:
            raise InvalidArgument(f"{self.url}: {error}") from error
        self._async = bool(kind.async_impl)
        self._create: Callable[..., Any] = kind._pipe_file if self._async else kind.pipe_file
        self._root = str(kind._strip_protocol(url)).rstrip("/")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting = asyncio.Lock()
        self._files: Any = None

    async def get(self, key: str, span: Span = WHOLE, most: int = LONGEST) -> bytes:
        """See `Objects.get`; how much of a longer object is received is the file system's affair."""
        start, stop = span
        if start < 0 or (stop is not None and stop < 0):
            start, stop, _ = slice(start, stop).indices(await self._size(key))
        if stop is not None and stop <= start:
            await self._size(key)
            return b""
        end = min(start + most + 1, start + most + 1 if stop is None else stop)
        try:
            data = await self._cat(key, start=start, end=end)
        except (Unavailable, InvalidArgument):
            if start < await self._size(key):
                raise
            return b""  # servers refuse ranges behind the end
        if len(data) > most:
            raise overlong(f"{self.url}: {key}", most)
        if stop is not None and len(data) > stop - start:
            raise Corrupt(f"{self.url}: {len(data)} bytes of {key} came where {stop - start} were asked for")
        return data

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        """See `Objects.read`."""
        data = memoryview(await self.get(key, Span(offset, offset + size)))
        if len(data) != size:
            raise Corrupt(
                f"{self.url}: {key} is cut short: {size} bytes expected at {offset}, {len(data)} are there; "
                "restore the object from a copy of the store"
            )
        at = 0
        for buffer in buffers:
            view = memoryview(buffer)
            view[:] = data[at : at + len(view)]
            at += len(view)

    async def head(self, key: str) -> Entry | None:
        """See `Objects.head`."""
        try:
            found = await self._call("look at", key, "info", self._path(key))
        except NotFound:
            return None
        return None if found["type"] == "directory" else Entry(key, int(found["size"]), _age(found))

    async def put(self, key: str, data: Buffers, mode: PutMode) -> None:
        """See `Objects.put`; how far a create is exclusive is the file system's affair."""
        path, body = self._path(key), b"".join(data)
        asked: dict[str, Any] = {}
        if mode is PutMode.CREATE:
            self._check_creates()
            asked = {"mode": "create"}
        try:
            await self._call("write", key, "pipe_file", path, body, **asked)
        except NotFound:  # folders exist there
            await self._call("write", key, "makedirs", path.rpartition("/")[0], exist_ok=True)
            await self._call("write", key, "pipe_file", path, body, **asked)

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """See `Objects.pages`; one page holds everything."""
        folder = f"{self._root}/{prefix}".rpartition("/")[0]
        try:
            if delimiter:
                found = await self._call("list", prefix, "ls", folder, detail=True)
            else:
                found = (await self._call("list", prefix, "find", folder, detail=True)).values()
        except NotFound:
            return
        page = Page([], [])
        for info in sorted(found, key=lambda info: str(info["name"])):
            key = str(info["name"]).removeprefix(f"{self._root}/").rstrip("/")
            if not key.startswith(prefix):
                continue
            if info["type"] == "directory":
                page.folders.append(f"{key}/")
            else:
                page.entries.append(Entry(key, int(info["size"]), _age(info)))
        yield page

    async def delete(self, key: str) -> None:
        """See `Objects.delete`."""
        path = self._path(key)
        try:
            await self._call("delete", key, "rm_file", path)
        except TStoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return
            if not await self._call("look at", key, "isdir", path):
                raise
            with contextlib.suppress(TStoreError):  # something is left in it
                await self._call("delete", key, "rmdir", path)

    async def close(self) -> None:
        """See `Objects.close`; sessions end with their file system."""
        self._files = None

    def __repr__(self) -> str:
        return f"<FsspecObjects {self.url}>"

    def _connect(self) -> Any:
        kept = {"skip_instance_cache": True, "use_listings_cache": False}
        if self._async:
            kept["asynchronous"] = True
        try:
            return url_to_fs(self._address, **{**self._options, **kept})[0]
        except (ImportError, TypeError, ValueError) as error:
            raise InvalidArgument(f"{self.url}: {error}; mend the URL or storage_options") from error

    async def _connected(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the first, or another after a fork; sessions belong to one
            self._loop, self._connecting, self._files = loop, asyncio.Lock(), None
        async with self._connecting:
            if self._files is None:
                self._files = self._connect() if self._async else await run(self._connect)
        return self._files

    def _path(self, key: str) -> str:
        return f"{self._root}/{checked_key(key, self.url)}"

    async def _size(self, key: str) -> int:
        found = await self.head(key)
        if found is None:
            raise NotFound(f"{self.url}: there is no object {key}")
        return found.size

    async def _cat(self, key: str, **span: int | None) -> bytes:
        return bytes(await self._call("read", key, "cat_file", self._path(key), **span))

    def _check_creates(self) -> None:
        if self._create is AbstractFileSystem.pipe_file:
            why = "fsspec looks whether a name is free, and then writes"
        elif "mode" not in inspect.signature(self._create).parameters:
            why = "this file system overwrites what is there"
        else:
            return
        raise Denied(
            f"{self.url} does not create exclusively: {why}, so two jobs could overwrite each other's commits; "
            "read it with mode='r', and write elsewhere"
        )

    async def _call(self, action: str, key: str, name: str, *arguments: Any, **options: Any) -> Any:
        with self._explained(action, key):
            files = await self._connected()
            if self._async:
                return await getattr(files, f"_{name}")(*arguments, **options)
            return await run(lambda: getattr(files, name)(*arguments, **options))

    @contextlib.contextmanager
    def _explained(self, action: str, key: str) -> Iterator[None]:
        what = f"{self.url}: can't {action} {key!r}"
        try:
            yield
        except TStoreError:
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise NotFound(f"{what}: there is no such object") from error
        except FileExistsError as error:
            raise AlreadyExists(f"{what}: it exists already") from error
        except PermissionError as error:
            raise Denied(f"{what}: {error}; check the credentials and permissions") from error
        except NotImplementedError as error:
            raise Denied(f"{what}: the file system has no such operation") from error
        except OSError as error:
            if error.errno in _FULL:
                raise StorageFull(f"{what}: {error}; make room, then repeat") from error
            raise Unavailable(f"{what}: {error or type(error).__name__}; try again") from error
        except ValueError as error:
            raise InvalidArgument(f"{what}: {error}") from error
        except Exception as error:  # the libraries under fsspec have errors of their own
            raise Unavailable(f"{what}: {type(error).__name__}: {error}; try again") from error


def _age(info: Mapping[str, Any]) -> float | None:
    written = next((info[name] for name in _WRITTEN if info.get(name) is not None), None)
    if isinstance(written, datetime.datetime):
        written = written.timestamp()
    return max(0.0, time.time() - written) if isinstance(written, (int, float)) else None
