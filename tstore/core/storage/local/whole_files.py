"""Reading whole files: one, or the short ones at the start of a sequence in one call."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

from tstore.core.storage.local.atomic_file import open_regular
from tstore.core.storage.objects import overlong, read_limit

try:
    from tstore.core.format import kernels
except ImportError:  # installed without a C compiler
    kernels = None  # type: ignore[assignment]

__all__ = ["read_leading", "read_whole"]

_FIRST_READ = 64 << 10  # bytes


def read_whole(key: str, path: str, max_size: int | None) -> bytes:
    """Return the bytes of an object's file; raise `Corrupt` if it is longer than `read_limit`, or OSError."""
    fd, status = open_regular(path)
    try:
        data = os.read(fd, _FIRST_READ)  # usually the whole object
        max_size = read_limit(key, max_size, data)
        if _FIRST_READ <= len(data) < status.st_size <= max_size:
            data = os.pread(fd, status.st_size, 0)  # whole: joining two parts takes twice the memory
    finally:
        os.close(fd)
    if max(len(data), status.st_size) > max_size:
        raise overlong(path, max_size)
    return data


def read_leading(
    path_of: Callable[[str, str], str], root: str, keys: Iterator[str], unless: str
) -> tuple[list[bytes], list[str] | None]:
    """Return the first objects, if they are short, and the keys drawn from `keys` that come next.

    Return None in place of these keys if neither the next object, the one after it, nor `unless` exists.
    """
    if kernels is None or sys.platform == "win32":
        return [], []
    return kernels.read_leading(path_of, root, keys, unless)
