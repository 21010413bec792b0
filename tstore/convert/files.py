"""Files of other formats: memory maps and whole reads of regular files, and names that stay within a folder."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from tstore.errors import AlreadyExists, Corrupt, InvalidArgument
from tstore.storage.local.atomic_file import mapped_errors

__all__ = ["StrPath", "map_file", "map_open_file", "open_file", "read_whole", "refuse_existing", "within"]

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


def refuse_existing(path: str) -> None:
    """Raise `AlreadyExists` if there is anything at a path."""
    if os.path.lexists(path):
        raise AlreadyExists(f"{path} exists already and is unchanged; choose another name, or remove it first")
