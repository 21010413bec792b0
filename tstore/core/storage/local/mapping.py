"""Read-only memory over files: the pages of the system's cache, which processes share, without a copy."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.core.storage.local.atomic_file import open_regular
from tstore.core.storage.objects import mapped_errors, too_short

__all__ = ["FileRange", "are_pages", "map_file", "map_ranges"]

_MAP_FIXED = 0x10  # of mman.h

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
)
_mmap.restype = ctypes.c_void_p


class FileRange(NamedTuple):
    """A range of bytes of a file."""

    path: str
    offset: int
    size: int


def are_pages(ranges: Sequence[FileRange]) -> bool:
    """Return whether ranges can be mapped behind each other: they begin, and all but the last end, at a page."""
    starts = any(offset % mmap.PAGESIZE for _, offset, _ in ranges)
    return not starts and not any(size % mmap.PAGESIZE for _, _, size in ranges[:-1])


def map_file(path: str) -> npt.NDArray[np.uint8]:
    """Return a whole file as memory, which stays valid if the file is deleted."""
    with mapped_errors("map", path):
        size = os.stat(path).st_size
    return map_ranges([FileRange(path, 0, size)])


def map_ranges(ranges: Sequence[FileRange]) -> npt.NDArray[np.uint8]:
    """Return ranges, which `are_pages`, as one range of memory; raise `Corrupt` if a file is too short.

    Memory of the whole length is reserved, and then replaced by the pages of the files. Freeing it unmaps them.
    """
    reserved = mmap.mmap(
        -1, max(1, sum(size for _, _, size in ranges)), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ
    )
    memory = np.frombuffer(reserved, np.uint8)
    address = memory.__array_interface__["data"][0]
    for path, offset, size in ranges:
        with mapped_errors("map", path):
            fd, status = open_regular(path)
            try:
                if status.st_size < offset + size:  # touching pages behind the end of a file kills the process
                    raise too_short(path, offset, offset + size, status.st_size)
                if (
                    size
                    and _mmap(address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, offset) != address
                ):
                    error = ctypes.get_errno()
                    raise OSError(error, os.strerror(error), path)
            finally:
                os.close(fd)
        address += size
    return memory
