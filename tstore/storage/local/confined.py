"""A local folder below which no symbolic link is followed, for a server.

Processes that can write to the folder must be trusted: one that replaces a folder by a link between the check and
the open defeats the check.
"""

from __future__ import annotations

import errno
import os
import stat

from tstore.errors import Denied
from tstore.storage.local.store import LocalStorage, path_in

__all__ = ["ConfinedStorage"]


class ConfinedStorage(LocalStorage):
    """The files below one folder; raise `Denied` for a key that is a link, or below one."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(os.path.realpath(root), _confined_path)

    def _stat(self, path: str) -> os.stat_result:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return status


def _confined_path(root: str, key: str) -> str:
    """Return the path of a key; raise `Denied` if it is a link, or a folder above it is a link or not a folder."""
    path, part = path_in(root, key), root
    try:
        for folder in key.split("/")[:-1]:
            part = f"{part}/{folder}"
            if not stat.S_ISDIR(os.lstat(part).st_mode):
                raise Denied(f"{part} is a link or not a folder; a server follows no links below its store")
        if stat.S_ISLNK(os.lstat(path).st_mode):
            raise Denied(f"{path} is a link; a server follows no links below its store")
    except FileNotFoundError:
        pass
    return path
