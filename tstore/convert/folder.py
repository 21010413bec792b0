"""The files below a path or URL, as fsspec reads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tstore.convert.files import open_file
from tstore.convert.redirects import without_leaks
from tstore.core.format.arguments import checked_text, quote
from tstore.core.runtime.pool import WORKERS
from tstore.core.storage.http.responses import sanitize
from tstore.core.storage.objects import mapped_errors
from tstore.errors import Corrupt, Denied, InvalidArgument, NotFound, TStoreError, Unavailable, UnsupportedFormat

__all__ = ["Folder"]

_REQUESTS = 32  # concurrent requests to a server
_PART = 1 << 20  # bytes of a response to read at once


class Folder:
    """The files below a path or URL, as fsspec reads them; its methods block."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        import fsspec
        from fsspec.implementations.cached import CachingFileSystem

        if "\0" in url:
            raise InvalidArgument(f"{quote(url)} has a NUL; pass a path or URL without one")
        checked_text("path or URL", url)
        try:
            file_system, root = fsspec.core.url_to_fs(url, **(storage_options or {}))
            self._fs = without_leaks(file_system, url)
            self._fs.invalidate_cache()  # cached listings: another program may have written files since
        except Exception as error:  # each file system raises the errors of its library
            raise InvalidArgument(f"{quote(url)} can't be opened by fsspec: {error}") from error
        self._prefix = f"{root.rstrip('/')}/" if root else ""  # the root of some file systems has no name
        self.url = url.rstrip("/")
        protocol = self._fs.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self.is_http = bool(protocols & {"http", "https"})
        self._is_local = "file" in protocols
        if isinstance(self._fs, CachingFileSystem):
            self.workers = 1  # its list of cached files is not thread-safe
        else:
            self.workers = WORKERS if self._is_local else _REQUESTS

    @property
    def name(self) -> str:
        """The name of the folder, "" if it has none."""
        return self._prefix.rstrip("/").rpartition("/")[2]

    def get(self, key: str, max_size: int) -> bytes | None:
        """Return the bytes of a file, None if there is none; raise `Corrupt` if there are more than `max_size`."""
        from aiohttp import ClientError, ClientSSLError

        path = self._prefix + key
        try:
            with mapped_errors("read", f"{self.url}/{key}"):
                try:
                    if self._is_local:
                        with open_file(path) as file:  # does not block on a pipe
                            data = file.read(min(max_size, os.fstat(file.fileno()).st_size) + 1)
                    elif self.is_http:  # a server may send more than was requested, without end
                        with self._fs.open(path, block_size=0, size=max_size) as file:
                            data = _read_up_to(file, max_size + 1)
                    else:
                        data = self._fs.cat_file(path, 0, max_size + 1)
                except FileNotFoundError:  # raised by fsspec without an errno
                    return None
                except ClientSSLError as error:
                    raise Denied(
                        f"can't read {self.url}/{key}: no trusted connection ({sanitize(str(error))}); check that "
                        "the server speaks https, and check its certificate; name a private authority in the "
                        "environment variable SSL_CERT_FILE"
                    ) from error
                except ClientError as error:  # some of these are also an OSError
                    raise self._unavailable(key, error) from error
                except (OSError, MemoryError, TStoreError):
                    raise
                except Exception as error:  # each fsspec file system raises the errors of its library
                    raise self._unavailable(key, error) from error
        except NotFound:
            if self._is_local and os.path.islink(path):
                raise NotFound(
                    f"{self.url}/{key} is a symbolic link to a file that does not exist; restore that file"
                ) from None
            return None
        if len(data) > max_size:
            raise Corrupt(
                f"{self.url}/{key} has more than {max_size} bytes, the most expected there; check where it is from"
            )
        return data

    def _unavailable(self, key: str, error: Exception) -> Unavailable:
        reason = " ".join(str(error).split()) or repr(error)
        return Unavailable(
            f"can't read {self.url}/{key}: {reason:.300}; check the URL and the server, or try again"
        )

    def size(self, key: str) -> int | None:
        """Return the size of a file in bytes, None if there is none."""
        with mapped_errors("look up", f"{self.url}/{key}"):
            try:
                return int(self._fs.info(self._prefix + key)["size"])
            except FileNotFoundError:
                return None

    def names(self, key: str) -> list[str]:
        """Return the sorted names of the folders below a folder; raise `NotFound` if there is no such folder."""
        with mapped_errors("list", f"{self.url}/{key}"):
            entries = self._fs.ls(self._path(key), detail=True)
        folders = (
            e["name"].rstrip("/")
            for e in entries
            if e["type"] == "directory" or (e.get("islink") and os.path.isdir(e["name"]))
        )
        return sorted({name.rpartition("/")[2] for name in folders})

    def files(self, key: str, depth: int) -> Iterator[str] | None:
        """Return the paths of the files at most `depth` folders below a folder, relative to it, in any order.

        The folders below a local folder are also returned; `get` raises `InvalidArgument` for them.
        Return None for a server that can't list its files.
        """
        if self.is_http:
            return None
        top = self._path(key)
        if self._is_local:
            return self._local_files(top, "", depth, set())
        with mapped_errors("list", f"{self.url}/{key}"):
            paths = self._fs.find(top)
        if top:
            if not all(path.startswith(f"{top}/") for path in paths):
                return None  # the listed names are not the paths by which files are read
            return (path[len(top) + 1 :] for path in paths)
        return (path.lstrip("/") for path in paths)

    def all_files(self, has_part: Callable[[str], bool]) -> Iterator[str] | None:
        """Return the paths of all files, in any order; None for a server that can't list its files.

        A local folder for which `has_part` is false is returned, with a slash at the end, in place of its files.
        """
        return self._parts(has_part) if self._is_local else self.files("", 0)

    def _parts(self, has_part: Callable[[str], bool]) -> Iterator[str]:
        pending, linked = [""], set[tuple[int, int]]()  # `linked`: the targets of links
        while pending:
            below = pending.pop()
            with mapped_errors("list", f"{self.url}/{below}"), os.scandir(self._prefix + below) as entries:
                for entry in entries:
                    path, target = below + entry.name, None
                    if not _is_folder(entry):
                        yield path
                        continue
                    if entry.is_symlink():
                        target = entry.stat().st_dev, entry.stat().st_ino
                    if target in linked or not has_part(path):
                        yield f"{path}/"
                        continue
                    linked.update([target] if target else [])
                    pending.append(f"{path}/")

    def _local_files(self, top: str, below: str, depth: int, linked: set[tuple[int, int]]) -> Iterator[str]:
        """Yield files; `linked` are the targets of links, visited once: a few mutual links make many paths."""
        with mapped_errors("list", f"{top}/{below}"), os.scandir(f"{top}/{below}") as entries:
            for entry in entries:
                yield below + entry.name
                if depth and _is_folder(entry):
                    if entry.is_symlink():
                        target = entry.stat()
                        if (target.st_dev, target.st_ino) in linked:
                            raise UnsupportedFormat(
                                f"{top}/{below}{entry.name} is a second symbolic link to one folder; replace it "
                                "by a copy of the folder"
                            )
                        linked.add((target.st_dev, target.st_ino))
                    yield from self._local_files(top, f"{below}{entry.name}/", depth - 1, linked)

    def _path(self, key: str) -> str:
        """Return the path of a folder in the file system."""
        return (self._prefix + key).rstrip("/")

    def is_link(self, key: str) -> bool:
        """Return whether a folder is a symbolic link, which may lead to a folder above it."""
        return self._is_local and os.path.islink(self._path(key))


def _read_up_to(file: Any, size: int) -> bytes:
    """Return the bytes of a stream, whose reads may be short, up to a size."""
    parts = []
    while size and (part := file.read(min(size, _PART))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False
