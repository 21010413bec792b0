"""Listings of a local folder, in key order and in pages; long folders are cached between pages.

The cached names of a folder are valid while its modification time is the same. A file system's clock advances in
ticks, usually of a few milliseconds, sometimes of two seconds. So the names are cached only if the folder had not
changed for more than a tick when it was read: any later change then sets a different time.
"""

from __future__ import annotations

import bisect
import errno
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tstore.core.storage.objects import Entry, Keys, Page, mapped_errors
from tstore.errors import NotFound

__all__ = ["Listing"]

_MIN_CACHED = 1000  # names; a folder with fewer is read again at little cost
_MAX_CACHED = 500_000  # names of all cached folders
_TICK = 3_000_000_000  # nanoseconds; longer than a tick of any file system


class _CachedNames(NamedTuple):
    mtime: int
    names: list[str]


class Listing:
    """The names below the folder `root`. Its methods block, and any thread may call them.

    `path_of(root, key)` returns the path of a key.
    """

    def __init__(self, root: str, path_of: Callable[[str, str], str]) -> None:
        self._root = root
        self._path_of = path_of
        self._cached: OrderedDict[str, _CachedNames] = OrderedDict()
        self._lock = threading.Lock()

    def enclosing(self, key: str) -> str | None:
        """Return the nearest folder above this one, links resolved, that has a file of this name."""
        folders = Path(os.path.realpath(self._root)).parents
        return next((str(folder) for folder in folders if os.path.isfile(folder / key)), None)

    def keys(self, prefix: str) -> Keys:
        """Return the keys that start with the prefix, sorted."""
        top = self._path_of(self._root, prefix.rpartition("/")[0]) if "/" in prefix else self._root
        keys = []
        with mapped_errors("list", top):
            for folder, folders, names in os.walk(top, onerror=_raise_unless_missing):
                base = os.path.relpath(folder, self._root).replace(os.sep, "/")
                base = "" if base == "." else f"{base}/"
                keys += [f"{base}{n}" for n in names if not n.startswith(".")]
                # only folders that can contain keys with the prefix are visited
                folders[:] = [n for n in folders if f"{base}{n}/".startswith(prefix[: len(f"{base}{n}/")])]
        return sorted(k for k in keys if k.startswith(prefix))

    def folders(self, prefix: str) -> Keys:
        """Return the folders whose paths start with the prefix, even empty ones, sorted and without the prefix."""
        top, _, name_start = prefix.rpartition("/")
        path = self._path_of(self._root, top) if top else self._root
        with mapped_errors("list", path):
            try:
                with os.scandir(path) as entries:
                    names = [e.name for e in entries if e.name.startswith(name_start) and e.is_dir()]
            except FileNotFoundError:
                return []
        return sorted(n[len(name_start) :] for n in names if not n.startswith("."))

    def empty(self) -> bool:
        """Return whether the folder is missing or contains only temporary files."""
        try:
            with mapped_errors("list", self._root), os.scandir(self._root) as entries:
                return all(e.name.startswith(".") and e.name.endswith(".tmp") for e in entries)
        except NotFound:
            existing = next(filter(os.path.lexists, [self._root, *map(str, Path(self._root).parents)]), "/")
            if not os.path.isdir(existing):
                raise  # there is a file in place of the folder, or of one above it
            return True  # even if another host has created the folder since

    def page(self, prefix: str, delimiter: str, after: str, limit: int) -> tuple[Page, str | None]:
        """Return up to `limit` names after `after`, and the last of them if more follow, else None."""
        page, last = Page([], []), ""
        for name in self._walk(prefix.rpartition("/")[0], prefix, delimiter, after):
            is_folder = name.endswith("/")
            entry = None if is_folder else self._entry(name)
            if entry is None and not is_folder:
                continue
            if len(page.entries) + len(page.folders) == limit:
                return page, last
            last = name
            if entry is None:
                page.folders.append(name)
            else:
                page.entries.append(entry)
        return page, None

    def _entry(self, name: str) -> Entry | None:
        """Return the entry of a file; None if there is no file of that name."""
        try:
            status = os.lstat(f"{self._root}/{name}")
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return Entry(name, status.st_size, max(0.0, time.time() - status.st_mtime))

    def _walk(self, folder: str, prefix: str, delimiter: str, after: str) -> Iterator[str]:
        """Yield the names with the prefix that follow `after`, in order; names of folders end in "/"."""
        base = f"{folder}/" if folder else ""
        try:
            path = self._path_of(self._root, f"{base}x")[:-2]  # `path_of` accepts only keys, such as "folder/x"
            with mapped_errors("list", path):
                names = self._names(path)
        except NotFound:
            return
        at = bisect.bisect_left(names, max(prefix, after), key=lambda name: f"{base}{name}")
        if at and not delimiter and names[at - 1].endswith("/") and after.startswith(f"{base}{names[at - 1]}"):
            at -= 1  # the folder that contains `after`
        for name in (f"{base}{names[i]}" for i in range(at, len(names))):
            if not name.startswith(prefix):
                break
            if not name.endswith("/"):
                if name != after:
                    yield name
            elif not delimiter:
                yield from self._walk(name[:-1], prefix, delimiter, after)
            elif name != after and any(map(self._entry, self._walk(name[:-1], name, "", ""))):
                yield name  # only folders that contain an object

    def _names(self, folder: str) -> list[str]:
        """Return the names in a folder in order, without hidden names; names of folders end in "/"."""
        mtime = os.stat(folder).st_mtime_ns
        with self._lock:
            cached = self._cached.get(folder)
            if cached is not None and cached.mtime == mtime:
                self._cached.move_to_end(folder)
                return cached.names
        stable = time.time_ns() - mtime > _TICK  # any later change will set another modification time
        with os.scandir(folder) as entries:
            names = [f"{e.name}/" if e.is_dir(follow_symlinks=False) else e.name for e in entries]
        names = sorted(name for name in names if not name.startswith("."))
        if stable and len(names) >= _MIN_CACHED:
            with self._lock:
                self._cached[folder] = _CachedNames(mtime, names)
                self._cached.move_to_end(folder)
                while sum(len(cached.names) for cached in self._cached.values()) > _MAX_CACHED:
                    self._cached.popitem(last=False)
        return names


def _raise_unless_missing(error: OSError) -> None:
    if error.errno != errno.ENOENT:
        raise error
