"""Files of other formats: memory maps and whole reads of regular files, and names that stay within a folder."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from tstore.core.storage.local.atomic_file import NO_LINKS, fsync_folder, new_file
from tstore.core.storage.objects import Durability, mapped_errors
from tstore.errors import AlreadyExists, Corrupt, InvalidArgument

__all__ = [
    "StrPath",
    "exported_file",
    "fsync_files",
    "left_out_of",
    "map_file",
    "map_open_file",
    "open_file",
    "read_whole",
    "refuse_existing",
    "within",
]

_COPIED = 1 << 30  # bytes in one system call

StrPath: TypeAlias = str | os.PathLike[str]


@contextlib.contextmanager
def open_file(path: StrPath) -> Iterator[BinaryIO]:
    """Open a regular file for reading; raise `InvalidArgument`, `NotFound` or `Denied`."""
    with mapped_errors("read", os.fspath(path)):
        mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a pipe may wait forever; a folder fails below
        raise InvalidArgument(
            f"{os.fspath(path)} is a pipe or a device; expected a regular file, which can be read in parts"
        )
    with mapped_errors("read", os.fspath(path)), open(path, "rb") as file:
        yield file


def map_file(path: StrPath) -> npt.NDArray[np.uint8]:
    """Return the bytes of a file as a read-only memory map, which stays valid if the file is deleted."""
    with open_file(path) as file:
        return map_open_file(file)


def map_open_file(file: BinaryIO) -> npt.NDArray[Any]:
    """Return the bytes of an open file as a read-only memory map."""
    if os.fstat(file.fileno()).st_size == 0:
        return np.empty(0, np.uint8)
    return np.asarray(np.memmap(file, np.uint8, "r"))


def read_whole(path: StrPath, limit: int) -> bytes:
    """Return the bytes of a small file; raise `Corrupt` if there are more than `limit`."""
    with open_file(path) as file:
        data = file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)
    if len(data) > limit:
        raise Corrupt(f"{os.fspath(path)} has more than {limit} bytes; check where it is from")
    return data


def within(folder: str, name: str, subject: str) -> str:
    """Return the path of a file in a folder; raise `Corrupt` if the name leads out of the folder."""
    parts = name.split("/")
    if os.path.isabs(name) or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise Corrupt(
            f"{folder}: {subject} names the file {name[:200]!r}, which is not in the folder; check where it is "
            "from"
        )
    return os.path.join(folder, *parts)


def left_out_of(folder: str, taken: Collection[str]) -> list[str]:
    """Return the entries of a folder that an import skips: files, and whole folders with a trailing slash.

    `taken` are the paths, relative to the folder, of the imported files, and of folders imported as a whole.
    """
    above = {path[:i] for path in taken for i, character in enumerate(path) if character == "/"}
    names, pending = [], [""]
    while pending:
        below = pending.pop()
        with (
            mapped_errors("read", os.path.join(folder, below)),
            os.scandir(os.path.join(folder, below)) as entries,
        ):
            for entry in entries:
                name = below + entry.name
                if name in above:
                    pending.append(f"{name}/")
                elif name not in taken:
                    names.append(f"{name}/" if entry.is_dir() else name)
    return sorted(names)


@contextlib.contextmanager
def exported_file(path: StrPath) -> Iterator[int]:
    """Yield the descriptor of a file that appears at `path`, durable, if the block ends without an exception.

    Until then it has no name, so that a process that is killed leaves nothing; or a temporary one, where the file
    system has only files with names. Raise OSError (FileExistsError if the name is taken by then).
    """
    folder = os.path.dirname(os.path.abspath(path))
    fd = _open_unnamed(folder)
    if fd is None:
        with new_file(os.fspath(path), Durability.FSYNC) as fd:
            yield fd
        return
    try:
        yield fd
        os.fsync(fd)
        # os.link follows the link below /proc only with a descriptor of a folder, which an absolute path ignores
        try:
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            with new_file(os.fspath(path), Durability.FSYNC) as named:
                os.lseek(fd, 0, os.SEEK_SET)
                while os.sendfile(named, fd, None, _COPIED):
                    pass
        fsync_folder(folder)
    finally:
        os.close(fd)


def _open_unnamed(folder: str) -> int | None:
    """Return the descriptor of a new file without a name, or None where there are none or they can get no name."""
    if not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except (AttributeError, OSError):
        return None


def fsync_files(folder: str) -> None:
    """Make all files and folders below a folder durable."""
    for above, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(above, name), "rb") as file:
                os.fsync(file.fileno())
        fsync_folder(above)


def refuse_existing(path: str) -> None:
    """Raise `AlreadyExists` if there is anything at a path."""
    if os.path.lexists(path):
        raise AlreadyExists(f"{path} already exists and is unchanged; choose another name, or remove it first")
