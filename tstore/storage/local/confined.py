"""A local folder below which no symbolic link is followed, for a server.

Whoever can write into that folder is trusted not to replace a folder by a link at the very moment between the
check and the open."""

from __future__ import annotations

import os
import stat
import time

from tstore.errors import Denied, NotFound
from tstore.storage.local.atomic_file import explained
from tstore.storage.local.store import LocalStorage, path_in
from tstore.storage.objects import Entry

__all__ = ["ConfinedStorage"]


class ConfinedStorage(LocalStorage):
    """The files below one folder; `Denied` for a key whose folders are links."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(os.path.realpath(root), _confined_path)

    def _head(self, key: str) -> Entry | None:
        path = self.path(key)
        try:
            with explained("look at", path):
                status = os.lstat(path)
        except NotFound:
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return Entry(key, status.st_size, max(0.0, time.time() - status.st_mtime))


def _confined_path(root: str, key: str) -> str:
    """Return the path of a key, all of whose folders are real folders."""
    path, folder = path_in(root, key), root
    for part in key.split("/")[:-1]:
        folder = f"{folder}/{part}"
        try:
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                raise Denied(f"{folder} is a link, or no folder; a server follows no links below its store")
        except FileNotFoundError:
            break
    return path
