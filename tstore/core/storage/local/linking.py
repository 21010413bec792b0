"""Giving an open file its name, without replacing another: link(2), or renameat2 where links are not supported."""

from __future__ import annotations

import ctypes
import errno
import os

from tstore.errors import Denied, Unavailable

__all__ = ["NO_LINKS", "give_name"]

NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.ENOTSUP}
"""The errors of link(2) where files can't be linked."""

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}  # errors of stat(2)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


def give_name(fd: int, temporary: str, path: str) -> None:
    """Give a file that is open under a temporary name its name; raise OSError only if it does not get it."""
    try:
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in NO_LINKS or _is_name_of(fd, path):
                raise
            _rename_no_replace(temporary, path)
    except OSError:
        if not _is_name_of(fd, path):
            raise


def _is_name_of(fd: int, path: str) -> bool:
    """Return whether the path is a name of an open file; raise `Unavailable` if that can't be determined."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise Unavailable(
            f"whether {path} was created is unknown: can't stat it: {error.strerror or error}; try again, or "
            "check the disk"
        ) from error


def _rename_no_replace(temporary: str, path: str) -> None:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    error_number = errno.ENOSYS
    if renameat2 is not None:
        source, target = os.fsencode(temporary), os.fsencode(path)
        if not renameat2(_AT_FDCWD, source, _AT_FDCWD, target, _RENAME_NOREPLACE):
            return
        error_number = ctypes.get_errno()
    if error_number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise Denied(
            f"{path}: the file system supports neither link(2) nor renaming without replacing, so files can't be "
            "created atomically; use another file system"
        )
    raise OSError(error_number, os.strerror(error_number), path)
