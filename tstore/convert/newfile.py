"""A local file that appears whole or not at all, and never in place of another.

1. Its bytes go to a temporary file in the same folder, `.tstore-….tmp`.
2. That is made durable (fsync), then linked to its name, which fails where the name is taken.
3. The temporary name is removed, and the folder made durable.

A process killed before 2 leaves the temporary file, after it the whole new one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from tstore.errors import (
    AlreadyExists,
    Denied,
    InvalidArgument,
    Misuse,
    NotFound,
    StorageFull,
    TStoreError,
    Unavailable,
)

__all__ = ["NewFile", "Path", "file_error"]

Path: TypeAlias = str | os.PathLike[str]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
_MISNAMED = frozenset({errno.EISDIR, errno.ENAMETOOLONG})
_LINKLESS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


class NewFile:
    """A file that appears, whole and durable, when its `with` block ends without an exception.

    Raises AlreadyExists if the name is taken, at the start or at the end; StorageFull, Denied, NotFound,
    InvalidArgument or Unavailable as the file system says. Whatever was raised, nothing new is left.
    """

    def __init__(self, path: Path) -> None:
        self.path = os.fspath(path)
        self._folder = os.path.dirname(os.path.abspath(self.path))
        self._temporary = os.path.join(self._folder, f".tstore-{secrets.token_hex(8)}.tmp")
        self._file: int | None = None

    def __enter__(self) -> Self:
        if os.path.lexists(self.path):
            raise _taken(self.path)
        try:
            self._file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise file_error(error, self.path, "written") from error
        return self

    def write(self, data: bytes | memoryview[Any], at: int) -> None:
        """Writes the bytes at that offset. Raises Misuse outside the `with` block."""
        left = memoryview(data)
        try:
            while left:
                done = os.pwrite(self._open(), left, at)
                at += done
                left = left[done:]
        except OSError as error:
            raise file_error(error, self.path, "written") from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            if self._file is not None:
                os.close(self._file)
                self._file = None
                with contextlib.suppress(OSError):
                    os.unlink(self._temporary)

    def _open(self) -> int:
        if self._file is None:
            raise Misuse(f"{self.path} is not open for writing; write inside its `with` block")
        return self._file

    def _publish(self) -> None:
        try:
            os.fsync(self._open())
            self._link()
            try:
                _fsync_folder(self._folder)
            except OSError:
                os.unlink(self.path)
                raise
        except OSError as error:
            raise file_error(error, self.path, "written") from error

    def _link(self) -> None:
        try:
            os.link(self._temporary, self.path)
        except FileExistsError as error:
            raise _taken(self.path) from error
        except OSError as error:
            if error.errno not in _LINKLESS:
                raise
            raise Denied(
                f"{self.path} can't appear at once, for its file system makes no hard links "
                f"({error.strerror}); write it to a local disk and copy it"
            ) from error


def file_error(error: OSError, path: str, verb: Literal["read", "written"]) -> TStoreError:
    """The error of tstore's that says what the operating system's says of that file, and what to do."""
    said = f"{path} could not be {verb}: {error.strerror or error}"
    if error.errno in _FULL:
        return StorageFull(f"{said}; make room and repeat, nothing was left under that name")
    if error.errno in _REFUSED:
        return Denied(f"{said}; mend the permissions or choose another folder")
    if error.errno in _ABSENT:
        return NotFound(f"{said}; give the path of {'a file' if verb == 'read' else 'a file in a folder'}")
    if error.errno in _MISNAMED:
        return InvalidArgument(f"{said}; give the path of a file")
    return Unavailable(f"{said}; try again, or choose another disk")


def _taken(path: str) -> AlreadyExists:
    return AlreadyExists(f"{path} exists and was left as it is; choose another name or remove it first")


def _fsync_folder(folder: str) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
