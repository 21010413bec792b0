"""A model of power failures: file-system calls are recorded, and every state they may leave is rebuilt.

A change survives for certain only once it was synced: the bytes of a file by an fsync of the file, a name (of a
file, link or folder, or its removal) by an fsync of its folder, everything by a sync. Each change that was not
synced may survive or not, independently of all others, and a write may survive in part. Journaling file systems
guarantee more than that.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest


class Act(NamedTuple):
    """A recorded call. `path` is the path of the name or folder, `file` the number of the file."""

    what: str  # mkdir, name (create, link), unlink, write, size; fsync, fsyncdir, sync
    path: str = ""
    file: int = 0
    offset: int = 0
    data: bytes = b""
    known: int = 0  # for syncs: the number of calls made before it began


class Recorder:
    """Records all changes below `top` from now on; existing files count as durable."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top = str(top)
        self.acts: list[Act] = []
        self._lock = threading.Lock()
        self._numbers: dict[int, int] = {}
        self._files = 0
        self.folders: set[str] = {self.top}
        self.names: dict[str, int] = {}
        self.contents: dict[int, bytes] = {}
        for folder, _, names in os.walk(top):
            self.folders.add(folder)
            for name in names:
                path = f"{folder}/{name}"
                number = self._number(os.stat(path).st_ino)
                self.names[path], self.contents[number] = number, Path(path).read_bytes()
        for name in ("open", "mkdir", "pwritev", "posix_fallocate", "ftruncate", "fsync", "link", "unlink"):
            monkeypatch.setattr(os, name, getattr(self, f"_{name}")(getattr(os, name)))
        monkeypatch.setattr(os, "replace", self._replace(os.replace))
        monkeypatch.setattr(os, "sync", self._sync(os.sync))

    def _number(self, inode: int, *, fresh: bool = False) -> int:
        if fresh or inode not in self._numbers:
            self._files += 1
            self._numbers[inode] = self._files
        return self._numbers[inode]

    def _add(self, what: str, path: str = "", file: int = 0, **more: object) -> None:
        path = os.path.abspath(path) if path else ""
        if not path or path.startswith(self.top):
            self.acts.append(Act(what, path, file, **more))  # type: ignore[arg-type]

    def _open(self, call):  # type: ignore[no-untyped-def]
        def opened(path, flags, *more):  # type: ignore[no-untyped-def]
            fd = call(path, flags, *more)
            if flags & os.O_CREAT and str(path).startswith(self.top):
                with self._lock:
                    self._add("name", path, self._number(os.fstat(fd).st_ino, fresh=True))
            return fd

        return opened

    def _mkdir(self, call):  # type: ignore[no-untyped-def]
        def made(path, *more):  # type: ignore[no-untyped-def]
            with self._lock:  # whoever finds the folder must find it recorded too
                call(path, *more)
                self._add("mkdir", path)

        return made

    def _pwritev(self, call):  # type: ignore[no-untyped-def]
        def written(fd, buffers, offset):  # type: ignore[no-untyped-def]
            done = call(fd, buffers, offset)
            data = b"".join(bytes(memoryview(b).cast("B")) for b in buffers)[:done]
            with self._lock:
                self._add("write", "", self._number(os.fstat(fd).st_ino), offset=offset, data=data)
            return done

        return written

    def _posix_fallocate(self, call):  # type: ignore[no-untyped-def]
        def allocated(fd, offset, size):  # type: ignore[no-untyped-def]
            call(fd, offset, size)
            with self._lock:
                self._add("size", "", self._number(os.fstat(fd).st_ino), offset=os.fstat(fd).st_size)

        return allocated

    def _ftruncate(self, call):  # type: ignore[no-untyped-def]
        def cut(fd, size):  # type: ignore[no-untyped-def]
            call(fd, size)
            with self._lock:
                self._add("size", "", self._number(os.fstat(fd).st_ino), offset=size)

        return cut

    def _fsync(self, call):  # type: ignore[no-untyped-def]
        def forced(fd):  # type: ignore[no-untyped-def]
            known = len(self.acts)
            call(fd)
            path = os.readlink(f"/proc/self/fd/{fd}")
            with self._lock:
                if os.path.isdir(path):
                    self._add("fsyncdir", path, known=known)
                else:
                    self._add("fsync", "", self._number(os.fstat(fd).st_ino), known=known)

        return forced

    def _link(self, call):  # type: ignore[no-untyped-def]
        def linked(source, target):  # type: ignore[no-untyped-def]
            with self._lock:  # whoever finds the name must find it recorded too
                call(source, target)
                self._add("name", target, self._number(os.stat(target).st_ino))

        return linked

    def _unlink(self, call):  # type: ignore[no-untyped-def]
        def removed(path):  # type: ignore[no-untyped-def]
            call(path)
            with self._lock:
                self._add("unlink", path)

        return removed

    def _replace(self, call):  # type: ignore[no-untyped-def]
        def replaced(source, target):  # type: ignore[no-untyped-def]
            data = Path(source).read_bytes()
            call(source, target)
            with self._lock:
                number = self._number(os.stat(target).st_ino, fresh=True)
                self._add("name", target, number)
                self._add("write", "", number, offset=0, data=data)

        return replaced

    def _sync(self, call):  # type: ignore[no-untyped-def]
        def forced():  # type: ignore[no-untyped-def]
            known = len(self.acts)
            call()
            with self._lock:
                self._add("sync", known=known)

        return forced

    def states(self, until: int, rng: random.Random, more: int) -> Iterator[dict[str, bytes]]:
        """Yield states (contents by path) that a power failure after `until` calls may leave.

        These are the two extremes, each unsynced change alone, each missing alone, and `more` random ones.
        """
        loose = self._unsynced(until)
        yield self._rebuilt(until, loose, {})
        yield self._rebuilt(until, set(), {})
        for act in loose:
            yield self._rebuilt(until, loose - {act}, {})
            yield self._rebuilt(until, {act}, {})
        for _ in range(more if loose else 0):
            lost = {i for i in loose if rng.random() < 0.5}
            torn = {i: rng.randrange(3) for i in loose - lost if self.acts[i].what == "write"}
            yield self._rebuilt(until, lost, torn)

    def _unsynced(self, until: int) -> set[int]:
        """Return the calls that were not synced."""
        loose = set()
        for i, act in enumerate(self.acts[:until]):
            match act.what:
                case "write" | "size" | "name" | "unlink" | "mkdir":
                    loose.add(i)
                case "fsync":
                    loose -= {j for j in loose if j < act.known and self._data_of(j) == act.file}
                case "fsyncdir":
                    loose -= {j for j in loose if j < act.known and self._folder_of(j) == act.path}
                case "sync":
                    loose -= {j for j in loose if j < act.known}
        return loose

    def _data_of(self, i: int) -> int:
        return self.acts[i].file if self.acts[i].what in ("write", "size") else 0

    def _folder_of(self, i: int) -> str:
        return "" if self.acts[i].what in ("write", "size") else os.path.dirname(self.acts[i].path)

    def _rebuilt(self, until: int, lost: set[int], torn: dict[int, int]) -> dict[str, bytes]:
        folders, names, contents = set(self.folders), dict(self.names), dict(self.contents)
        for i, act in enumerate(self.acts[:until]):
            if i in lost:
                continue
            data = contents.get(act.file, b"")
            match act.what:
                case "mkdir":
                    folders.add(act.path)
                case "name":
                    names[act.path] = act.file
                case "unlink":
                    names.pop(act.path, None)
                case "size":
                    contents[act.file] = data[: act.offset].ljust(act.offset, b"\0")
                case "write":
                    new, half = act.data, len(act.data) // 2
                    if torn.get(i):
                        new = new[:half] if torn[i] == 1 else bytes(half) + new[half:]
                    contents[act.file] = (
                        data[: act.offset].ljust(act.offset, b"\0") + new + data[act.offset + len(new) :]
                    )
        files = {}
        for path, number in names.items():
            parents = [p for p in map(str, Path(path).parents) if p.startswith(self.top)]
            if all(p in folders for p in parents):
                files[os.path.relpath(path, self.top)] = contents.get(number, b"")
        return files
