"""A local folder below which no symbolic link is followed, for a server.

Other processes that can write to the folder are trusted, because one that replaces a folder by a link between the
check and the open would defeat the check.
"""

from __future__ import annotations

import errno
import os
import stat

from tstore.errors import Denied
from tstore.storage.local.store import LocalStorage, path_in

__all__ = ["ConfinedStorage"]


class ConfinedStorage(LocalStorage):
    """The files below one folder; raise `Denied` for a key whose folders are links."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(os.path.realpath(root), _confined_path)

    def _stat(self, path: str) -> os.stat_result:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return status


def _confined_path(root: str, key: str) -> str:
    """Return the path of a key; raise `Denied` if one of its folders is a link or not a folder."""
    path, folder = path_in(root, key), root
    for part in key.split("/")[:-1]:
        folder = f"{folder}/{part}"
        try:
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                raise Denied(f"{folder} is a link or not a folder; a server follows no links below its store")
        except FileNotFoundError:
            break
    return path
