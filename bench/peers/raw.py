"""The limit of the machine: plain files of the same bytes, with and without chunks, and a file for each commit."""

from __future__ import annotations

import importlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.contender import Contender, New, Saved, value_of
from bench.workloads import Arrays, Index, Tree, Values, flat

_RECORD = 560  # bytes of a record of tstore with a chunk of 8 bytes


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


class Files(Contender):
    """A contender with a folder for each step."""

    def put(self, arrays: Arrays, folder: Path, durable: bool) -> None:
        """Save arrays to an empty folder."""
        raise NotImplementedError

    def fetch(self, folder: Path) -> Arrays:
        """Restore all arrays."""
        raise NotImplementedError

    def save(self, step: int, durable: bool) -> None:
        self.put(dict(flat(self.state)), self.step(step), durable)

    def restore(self, step: int, what: str) -> Tree:
        return self.work.tree(self.fetch(self.step(step)).items())  # type: ignore[no-any-return]

    def step(self, step: int) -> Path:
        folder = self.folder / str(step)
        folder.mkdir(exist_ok=True)
        return folder


class Raw(Files):
    """Fallocate, then gathered writes or reads of 8 MiB from two threads."""

    title = "raw, 1 file"
    files = 1
    threads = 2
    block = 8 << 20
    stagings = ("memory",)

    def put(self, arrays: Arrays, folder: Path, durable: bool) -> None:
        share = -(-sum(array.nbytes for array in arrays.values()) // self.files)
        fds = [os.open(folder / f"{i}", os.O_WRONLY | os.O_CREAT, 0o644) for i in range(self.files)]
        for fd in fds:
            os.posix_fallocate(fd, 0, share)
        self._transfer(os.pwritev, arrays, fds)
        if durable:
            with ThreadPoolExecutor(self.files) as pool:
                list(pool.map(os.fsync, fds))
            fsync(folder)
        for fd in fds:
            os.close(fd)

    def fetch(self, folder: Path) -> Arrays:
        return self.fill({name: np.empty(self.work.shape, np.float32) for name in self.work.names}, folder)

    def fill(self, arrays: Arrays, folder: Path) -> Arrays:
        """Read what was put into arrays of the same sizes."""
        fds = [os.open(folder / f"{i}", os.O_RDONLY) for i in range(self.files)]
        self._transfer(os.preadv, arrays, fds)
        for fd in fds:
            os.close(fd)
        return arrays

    def begin_save(self, step: int, staging: str) -> Callable[[], Any]:
        folder, copies = self.step(step), {name: array.copy() for name, array in flat(self.state)}
        one_thread = RawOneThread(0, 1, self.folder, self.work)
        return lambda: one_thread.put(copies, folder, True)

    def create(self, new: New) -> None:
        self.put(new.arrays, self.folder, new.durable)

    def open(self, name: str) -> None:
        """Do nothing."""

    def read(self, index: Index) -> Values:
        return self.fill({"": np.empty(self.work.shape, np.uint16)}, self.folder)[""]

    def _transfer(self, move: Callable[[int, list[Any], int], int], arrays: Arrays, fds: list[int]) -> None:
        """Move one contiguous share of the batches per thread, to or from the thread's own file if it has one."""
        batches = list(self._batches(arrays))
        cut = len(batches) // self.threads

        def work(thread: int) -> None:
            mine = batches[thread * cut : (thread + 1) * cut if thread + 1 < self.threads else None]
            own = len(fds) > 1
            offset = 0 if own else sum(size for size, _ in batches[: thread * cut])
            for size, buffers in mine:
                if move(fds[thread if own else 0], buffers, offset) != size:
                    raise OSError("short read or write: is the disk full?")
                offset += size

        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(work, range(self.threads)))

    def _batches(self, arrays: Arrays) -> Iterator[tuple[int, list[Any]]]:
        """Yield batches of buffers, each of at most one block and 1024 pieces (IOV_MAX), with their size."""
        batch: list[Any] = []
        size = 0
        for array in arrays.values():
            data = array.reshape(-1).view(np.uint8)
            for start in range(0, data.size, self.block):
                piece = data[start : start + self.block]
                if batch and (size + piece.size > self.block or len(batch) == 1024):
                    yield size, batch
                    batch, size = [], 0
                batch.append(piece)
                size += piece.size
        yield size, batch


class RawTwoFiles(Raw):
    """`Raw` with one file per thread: on ext4, writers of one file contend for its inode lock."""

    title = "raw, 2 files"
    files = 2


class RawDisk(RawTwoFiles):
    """The limit of the disk, also for saves in the background."""

    title = "raw disk"


class RawOneThread(Raw):
    """`Raw` in one thread, as a save in the background has one, and each of many hosts, with a file of its own."""

    title = "raw, a file per host"
    threads = 1

    def save_part(self, attempt: int) -> Saved:
        self.put(self.arrays, self.step(self.number), self.durable)
        now = time.monotonic()
        return Saved(now, now)

    def read_part(self, name: str) -> Values:
        empty = {each: np.empty_like(array) for each, array in self.arrays.items()}
        return self.fill(empty, self.step(self.number))[name]


class RawChunks(Contender):
    """The limit of the codec: each chunk is copied and encoded by one call, in two threads, into one file.

    Reads decode the chunks that they need, and copy from these. There are no checksums, and the index is a list.
    """

    title = "raw, chunks"

    def prepare(self) -> None:
        self.zstd: Any = importlib.import_module("numcodecs.zstd").Zstd(1) if self.work.codec == "zstd" else None
        self.pool, self.local = ThreadPoolExecutor(2), threading.local()
        self.along = self.work.side // self.work.chunk  # chunks along each axis

    def create(self, new: New) -> None:
        [values] = new.arrays.values()
        lock, index, size = threading.Lock(), np.zeros((self.along**3, 2), np.int64), self.work.chunk
        fd, end = os.open(self.folder / "chunks", os.O_WRONLY | os.O_CREAT, 0o644), 0

        def write(number: int) -> None:
            nonlocal end
            at = map(int, np.unravel_index(number, (self.along,) * 3))
            part = self._memory()
            part[...] = values[tuple(slice(i * size, (i + 1) * size) for i in at)]
            data: Any = part.reshape(-1).view(np.uint8) if self.zstd is None else self.zstd.encode(part)
            with lock:
                index[number] = end, len(data)
                end += len(data)
            os.pwrite(fd, data, index[number, 0])

        list(self.pool.map(write, range(self.along**3)))
        if new.durable:
            os.fsync(fd)
        os.close(fd)
        np.save(self.folder / "index.npy", index)

    def open(self, name: str) -> None:
        self.index = np.load(self.folder / "index.npy").tolist()
        self.fd = os.open(self.folder / "chunks", os.O_RDONLY)

    def read(self, index: Index) -> Values:
        axes = [range(self.work.side)[i] for i in index]
        values, size = np.empty([len(axis) for axis in axes], np.uint16), self.work.chunk
        touched = itertools.product(*[range(axis.start // size, (axis.stop - 1) // size + 1) for axis in axes])

        def copy(at: Index) -> None:
            chunk = self._decoded((at[0] * self.along + at[1]) * self.along + at[2])
            low = [max(axis.start, i * size) for axis, i in zip(axes, at, strict=True)]
            high = [min(axis.stop, (i + 1) * size) for axis, i in zip(axes, at, strict=True)]
            ends = list(zip(axes, at, low, high, strict=True))
            values[tuple(slice(lo - axis.start, hi - axis.start) for axis, _, lo, hi in ends)] = chunk[
                tuple(slice(lo - i * size, hi - i * size) for _, i, lo, hi in ends)
            ]

        list(self.pool.map(copy, touched))
        return values

    def _decoded(self, number: int) -> Values:
        offset, length = self.index[number]
        chunk = self._memory()
        data = chunk.reshape(-1).view(np.uint8)
        encoded = data if self.zstd is None else self.local.encoded[:length]
        if os.preadv(self.fd, [encoded], offset) != length:
            raise OSError("short read")
        if self.zstd is not None:
            self.zstd.decode(encoded, data)
        return chunk

    def _memory(self) -> Values:
        """Return the memory of this thread for a chunk."""
        if not hasattr(self.local, "chunk"):
            self.local.chunk = np.empty(self.work.chunks, np.uint16)
            self.local.encoded = np.empty(2 * self.local.chunk.nbytes, np.uint8)
        chunk: Values = self.local.chunk
        return chunk


class RawFiles(Contender):
    """The limit of the disk for small commits: each is a file that is written, synced and linked to its name.

    The files are as long as a record of tstore with a chunk of 8 bytes.
    """

    title = "raw, a file per commit"

    def begin(self, writers: int) -> None:
        (self.folder / "commits").mkdir()

    async def commit(self, writer: int, number: int) -> int:
        folder = self.folder / "commits"
        temporary = f"{folder}/.{writer}-{number}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.pwrite(fd, value_of(writer, number).to_bytes(8, "little") * (_RECORD // 8), 0)
        if self.durable:
            os.fsync(fd)
        os.link(temporary, f"{folder}/{writer:02}-{number:017}")
        os.unlink(temporary)
        os.close(fd)
        if self.durable:
            fsync(folder)
        return 0

    def lost(self, made: Sequence[int]) -> int:
        return sum(made) - len(os.listdir(self.folder / "commits"))
