"""A local folder of cached objects, under a limit of bytes.

1. A file appears whole or not at all (`atomic_file`), and is never changed: any number of processes share a
   folder.
2. A hit sets the file's time. A process that has written a fraction of the limit checks whether the limit is
   exceeded, and then removes the least recently used files; one process does that at a time. So several processes
   together may exceed the limit by some fractions.

A failure to write here never fails a read: there is one warning, and reading continues without the cache. `store`
says what is cached, and under which names.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import warnings
from collections.abc import Iterator

from tstore.errors import InvalidArgument
from tstore.format.arguments import shown
from tstore.format.checksums import CHECK_SIZE
from tstore.storage.local.atomic_file import new_file, write_all
from tstore.storage.objects import Buffers, Durability

__all__ = ["Cache", "remove"]

_PARTS = 32  # fractions of the limit, one written between two checks
_LEFT = 0.9  # of the limit, after a check that exceeded it
_UNFINISHED = 3600.0  # seconds after which a temporary file is nobody's
_IOV_MAX = 1000


class Cache:
    """A folder of cached objects, of about `size` bytes at most; made at the first write.

    Processes and stores may share it. Nobody else should be able to write there. Raises `InvalidArgument`.
    """

    def __init__(self, folder: str | os.PathLike[str], size: int = 10 << 30) -> None:
        if not isinstance(folder, (str, os.PathLike)):
            raise InvalidArgument(f"Cache({shown(folder)}): expected the path of a local folder")
        if isinstance(size, bool) or not isinstance(size, int) or size < _PARTS * CHECK_SIZE:
            raise InvalidArgument(
                f"Cache(size={shown(size)}): expected at least {_PARTS * CHECK_SIZE} bytes, as 10 << 30"
            )
        self.folder = os.path.abspath(os.fspath(folder))
        self.size = size
        self._unchecked = size  # bytes written since the last check; the first write checks
        self._warned = False

    def __repr__(self) -> str:
        return f"Cache({self.folder!r}, size={self.size})"

    def write(self, path: str, buffers: Buffers) -> None:
        """Write a file, unless it exists already; warn once if that fails."""
        try:
            for folder in (self.folder, os.path.dirname(path)):
                os.makedirs(folder, mode=0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError), new_file(path, Durability.NONE) as fd:
                size = 0
                for i in range(0, len(buffers), _IOV_MAX):
                    size += write_all(fd, buffers[i : i + _IOV_MAX], size)
                self._unchecked += size
            if self._unchecked > self.size // _PARTS:
                self._unchecked = 0
                self._make_room()
        except FileNotFoundError:
            return  # the folder was empty just now, and another process removed it
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"the cache in {self.folder} can't be written ({error}); reading goes on without it",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _make_room(self) -> None:
        lock = os.open(f"{self.folder}/.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            files = sorted(self._files())
            left = sum(size for _, size, _ in files)
            if left <= self.size:
                return
            for _, size, path in files:
                remove(path)
                left -= size
                if left <= _LEFT * self.size:
                    return
        except BlockingIOError:
            return  # another process is doing it
        finally:
            os.close(lock)

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Yield when each file was last used, its size and its path."""
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = f"{folder}/{name}"
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(path)
                    if not name.startswith("."):
                        yield status.st_mtime, status.st_size, path
                    elif name.endswith(".tmp") and status.st_mtime < time.time() - _UNFINISHED:
                        os.unlink(path)


def remove(path: str) -> None:
    """Remove a file if it exists, and its folder if that is then empty."""
    with contextlib.suppress(OSError):
        os.unlink(path)
        os.rmdir(os.path.dirname(path))
