"""Objects on any fsspec file system: readable on all, writable on those that pass a test of exclusive creates.

1. fsspec promises little about `mode="create"`. Some file systems make the server enforce it, some ignore it, and
   the default implementation, which most inherit, checks first and then writes. `put` refuses to create with the
   default implementation. Nothing is known of the other implementations, so `capabilities.conditional_create` is
   False, and a store is opened for writing only after `storage.probe` has raced several creates of one key.
2. Async file systems run on the I/O loop, others in the pool's threads.
3. Instances and listings are never shared or cached: a store must see what others write.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import datetime
import errno
import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from fsspec import AbstractFileSystem, get_filesystem_class
from fsspec.archive import AbstractArchiveFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.cached import CachingFileSystem

from tstore.core.runtime.event_loops import PerLoop
from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage
from tstore.core.storage.objects import (
    Buffers,
    Capabilities,
    Durability,
    Entry,
    Page,
    PutMode,
    checked_key,
    overlong,
    prefixes_above,
    read_limit,
    too_short,
)
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

__all__ = ["FsspecStorage"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_TIME_KEYS = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")


class FsspecStorage(Storage):
    """The files below one path of an fsspec file system."""

    capabilities = Capabilities(conditional_create=False, listing=True, ranges=True, durable=False, folders=True)

    def __init__(self, url: str, **options: Any) -> None:
        """Take the options of the file system; connect at the first request.

        Raise `InvalidArgument` if fsspec does not know the scheme or lacks the package for it.
        """
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]  # without user and password, since errors and logs show `url`
        self.url = url.replace(parts.netloc, host, 1).rstrip("/")
        self._address = url  # with user and password
        self._options = options
        try:
            implementation = get_filesystem_class(parts.scheme)
        except (ImportError, ValueError) as error:
            raise InvalidArgument(f"{self.url}: {error}") from error
        if issubclass(implementation, CachingFileSystem):
            raise InvalidArgument(
                f"{self.url}: {parts.scheme}:// is a cache of fsspec, which can't have a store; pass the URL of "
                "the store itself, and cache=FOLDER to keep what is read"
            )
        if issubclass(implementation, AbstractArchiveFileSystem):
            raise InvalidArgument(
                f"{self.url}: {parts.scheme}:// is an archive, which can't have a store; unpack it, and pass the "
                "path of the folder"
            )
        self._async = bool(implementation.async_impl)
        self._pipe_file: Callable[..., Any] = (
            implementation._pipe_file if self._async else implementation.pipe_file
        )
        self._root = str(implementation._strip_protocol(url)).rstrip("/")
        self._connections = PerLoop(_Connection)

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        """See `Storage.get`; the file system decides how much of a longer object is received."""
        limit = read_limit(key, max_size)
        data = await self._cat(key, 0, limit + 1)
        if len(data) > limit:
            raise overlong(f"{self.url}: {key}", limit)
        return data

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        data = memoryview(await self._cat(key, offset, offset + size) if size else b"")
        if len(data) > size:
            raise Corrupt(f"{self.url}: expected {size} bytes of {key}, but {len(data)} arrived; check the server")
        if len(data) != size:
            raise too_short(f"{self.url}: {key}", offset, offset + size, offset + len(data))
        at = 0
        for buffer in buffers:
            view = memoryview(buffer)
            view[:] = data[at : at + len(view)]
            at += len(view)

    async def head(self, key: str) -> Entry | None:
        try:
            info = await self._call("stat", key, "info", self._path(key))
        except NotFound:
            return None
        return None if info["type"] == "directory" else Entry(key, int(info["size"]), _age(info))

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        """See `Storage.put`; the file system decides whether a create is exclusive."""
        path, body = self._path(key), b"".join(buffers)
        options: dict[str, Any] = {}
        if mode is PutMode.CREATE:
            self._check_exclusive_create()
            options = {"mode": "create"}
        try:
            await self._call("write", key, "pipe_file", path, body, **options)
        except NotFound:  # unlike buckets, this file system needs the parent folder first
            await self._call("write", key, "makedirs", path.rpartition("/")[0], exist_ok=True)
            await self._call("write", key, "pipe_file", path, body, **options)

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """See `Storage.pages`; there is only one page."""
        folder = f"{self._root}/{prefix}".rpartition("/")[0]
        try:
            if delimiter:
                infos = await self._call("list", prefix, "ls", folder, detail=True)
            else:
                infos = (await self._call("list", prefix, "find", folder, detail=True)).values()
        except NotFound:
            return
        page = Page([], [])
        for info in sorted(infos, key=lambda info: str(info["name"])):
            key = str(info["name"]).removeprefix(f"{self._root}/").rstrip("/")
            if not key.startswith(prefix):
                continue
            if info["type"] == "directory":
                page.folders.append(f"{key}/")
            else:
                page.entries.append(Entry(key, int(info["size"]), _age(info)))
        yield page

    async def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            await self._call("delete", key, "rm_file", path)
        except TStoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return
            if not await self._call("stat", key, "isdir", path):
                raise
            with contextlib.suppress(TStoreError):  # the folder may have objects
                await self._call("delete", key, "rmdir", path)

    def above(self) -> Iterator[Storage]:
        for root in filter(None, (prefix.rstrip("/") for prefix in prefixes_above(f"{self._root}/"))):
            folder = copy.copy(self)
            folder._root, folder.url = root, self.url[: len(root) - len(self._root)]
            yield folder

    async def close(self) -> None:
        """See `Storage.close`; a file system closes its sessions when it is garbage-collected."""
        self._connections.pop()

    def _connect(self) -> Any:
        required = {"skip_instance_cache": True, "use_listings_cache": False}
        if self._async:
            required["asynchronous"] = True
        try:
            return url_to_fs(self._address, **{**self._options, **required})[0]
        except (ImportError, TypeError, ValueError) as error:
            raise InvalidArgument(f"{self.url}: {error}; check the URL and storage_options") from error

    async def _file_system(self) -> Any:
        connection = self._connections.get()
        async with connection.lock:
            if connection.file_system is None:
                connection.file_system = self._connect() if self._async else await run(self._connect)
        return connection.file_system

    def _path(self, key: str) -> str:
        return f"{self._root}/{checked_key(key, self.url)}"

    async def _cat(self, key: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` to `end`, fewer if the object ends earlier."""
        try:
            return bytes(await self._call("read", key, "cat_file", self._path(key), start=start, end=end))
        except (Unavailable, InvalidArgument):
            entry = await self.head(key)
            if entry is None:
                raise NotFound(f"{self.url}: {key} does not exist") from None
            if start < entry.size:
                raise
            return b""  # servers refuse ranges beyond the end

    def _check_exclusive_create(self) -> None:
        if self._pipe_file is AbstractFileSystem.pipe_file:
            why = "fsspec checks whether a name is free, and then writes"
        elif "mode" not in inspect.signature(self._pipe_file).parameters:
            why = "this file system overwrites objects"
        else:
            return
        raise Denied(
            f"{self.url} does not create exclusively: {why}, so two jobs could overwrite each other's commits; "
            "read it with mode='r', and write elsewhere"
        )

    async def _call(self, action: str, key: str, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the file system; errors say which `action` on which key failed."""
        with self._mapped_errors(action, key):
            file_system = await self._file_system()
            if self._async:
                return await getattr(file_system, f"_{method}")(*arguments, **options)
            return await run(lambda: getattr(file_system, method)(*arguments, **options))

    @contextlib.contextmanager
    def _mapped_errors(self, action: str, key: str) -> Iterator[None]:
        failure = f"{self.url}: can't {action} {key!r}"
        try:
            yield
        except TStoreError:
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise NotFound(f"{failure}: it does not exist") from error
        except FileExistsError as error:
            raise AlreadyExists(f"{failure}: it already exists") from error
        except PermissionError as error:
            raise Denied(f"{failure}: {error}; check the credentials and permissions") from error
        except NotImplementedError as error:
            raise Denied(f"{failure}: the file system has no such operation") from error
        except OSError as error:
            if error.errno in _FULL:
                raise StorageFull(f"{failure}: {error}; free space, then repeat") from error
            raise Unavailable(f"{failure}: {error or type(error).__name__}; try again") from error
        except ValueError as error:
            raise InvalidArgument(f"{failure}: {error}") from error
        except Exception as error:  # the libraries under fsspec have their own exceptions
            raise Unavailable(f"{failure}: {type(error).__name__}: {error}; try again") from error


class _Connection:
    """The file system object of one event loop, since its sessions are bound to the loop; opened under `lock`."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.file_system: Any = None


def _age(info: Mapping[str, Any]) -> float | None:
    written = next((info[name] for name in _TIME_KEYS if info.get(name) is not None), None)
    if isinstance(written, datetime.datetime):
        written = written.timestamp()
    return max(0.0, time.time() - written) if isinstance(written, (int, float)) else None
