"""The contenders: each saves the arrays of a workload to an empty folder and restores them as new arrays.

Every peer runs with the settings that were fastest for it on a 2-core ext4 machine; its class documents them. A
contender knows the names and shapes of its workload in advance, so none pays for a listing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from bench.save.workloads import Arrays, Workload


class Contender(Protocol):
    """A way of saving and restoring arrays.

    `exact`: a restore returns the saved values bit for bit. `restores`: restores are measured too; they are not if
    they run the same code as those of another contender.
    """

    title: str
    exact: bool
    restores: bool

    def __init__(self, workload: Workload) -> None: ...

    def save(self, arrays: Arrays, folder: Path, durable: bool) -> None: ...

    def restore(self, folder: Path) -> Arrays: ...


class Raw:
    """The limit of the disk: fallocate, then gathered writes or reads of 8 MiB from two threads."""

    title = "raw, 1 file"
    exact = True
    restores = True
    files = 1
    threads = 2
    block = 8 << 20

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def save(self, arrays: Arrays, folder: Path, durable: bool) -> None:
        share = -(-self.workload.nbytes // self.files)
        fds = [os.open(folder / f"{i}", os.O_WRONLY | os.O_CREAT, 0o644) for i in range(self.files)]
        for fd in fds:
            os.posix_fallocate(fd, 0, share)
        self._transfer(os.pwritev, arrays, fds)
        if durable:
            with ThreadPoolExecutor(self.files) as pool:
                list(pool.map(os.fsync, fds))
            _fsync(folder)
        for fd in fds:
            os.close(fd)

    def restore(self, folder: Path) -> Arrays:
        arrays = {name: np.empty(self.workload.shape, np.float32) for name in self.workload.names}
        fds = [os.open(folder / f"{i}", os.O_RDONLY) for i in range(self.files)]
        self._transfer(os.preadv, arrays, fds)
        for fd in fds:
            os.close(fd)
        return arrays

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
            flat = array.reshape(-1).view(np.uint8)
            for start in range(0, flat.size, self.block):
                piece = flat[start : start + self.block]
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


class RawOneThread(Raw):
    """`Raw` in one thread, as a save in the background has one."""

    title = "raw, 1 thread"
    threads = 1


class TensorStoreFile:
    """zarr3 on the ``file`` driver, uncompressed, all arrays at once.

    Fastest settings: chunks of 16 MiB, and writing by reference, without a copy of the caller's arrays. Large
    arrays are read into `np.empty` arrays, which get huge pages, unlike the arrays that `read()` allocates. Small
    arrays are read faster with `read()`.
    """

    title = "tensorstore file"
    exact = True
    restores = True
    by_reference = True

    def __init__(self, workload: Workload) -> None:
        import tensorstore

        self.ts: Any = tensorstore
        self.workload = workload
        self.metadata = {
            "shape": list(workload.shape),
            "data_type": "float32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(workload.chunk)}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        }

    def save(self, arrays: Arrays, folder: Path, durable: bool) -> None:
        opened = self._open(folder, durable, {"driver": "zarr3", "metadata": self.metadata}, create=True)
        by_reference = self.by_reference
        writes = [
            store.write(array, can_reference_source_data_indefinitely=by_reference)
            for store, array in zip(opened, arrays.values(), strict=True)
        ]
        for write in writes:
            write.result()

    def restore(self, folder: Path) -> Arrays:
        opened = self._open(folder, True, {"driver": "zarr3"}, open=True, recheck_cached=False)
        if self.workload.nbytes // self.workload.count < 1 << 20:
            reads = [store.read() for store in opened]
            return {n: read.result() for n, read in zip(self.workload.names, reads, strict=True)}
        arrays = {name: np.empty(self.workload.shape, np.float32) for name in self.workload.names}
        copies = [self.ts.array(array).write(s) for array, s in zip(arrays.values(), opened, strict=True)]
        for copy in copies:
            copy.result()
        return arrays

    def _open(self, folder: Path, durable: bool, spec: dict[str, Any], **how: Any) -> list[Any]:
        root, context = self._root(folder, durable)
        futures = [self.ts.open(spec, kvstore=root / f"{n}/", context=context, **how) for n in self.workload.names]
        return [future.result() for future in futures]

    def _root(self, folder: Path, durable: bool) -> tuple[Any, Any]:
        context = self.ts.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "file_io_concurrency": {"limit": 32},
                "file_io_sync": durable,
            }
        )
        return self.ts.KvStore.open(self._kvstore(folder), context=context).result(), context

    def _kvstore(self, folder: Path) -> dict[str, Any]:
        return {"driver": "file", "path": f"{folder}/"}


class TensorStoreFileCopying(TensorStoreFile):
    """`TensorStoreFile` with a plain `write(array)`, which first copies the caller's array."""

    title = "tensorstore file, copying"
    restores = False
    by_reference = False


class TensorStoreOcdbt(TensorStoreFile):
    """zarr3 on `ocdbt` over files; saving is fastest in one atomic transaction for all arrays."""

    title = "tensorstore ocdbt"

    def save(self, arrays: Arrays, folder: Path, durable: bool) -> None:
        transaction = self.ts.Transaction(atomic=True)
        spec = {"driver": "zarr3", "metadata": self.metadata}
        opened = self._open(folder, durable, spec, create=True, transaction=transaction)
        writes = [
            store.write(array, can_reference_source_data_indefinitely=True)
            for store, array in zip(opened, arrays.values(), strict=True)
        ]
        for write in writes:
            write.copy.result()
        transaction.commit_async().result()

    def _kvstore(self, folder: Path) -> dict[str, Any]:
        return {"driver": "ocdbt", "base": super()._kvstore(folder)}


class NumPy:
    """np.save and np.load, one file per array; a durable save then fsyncs each file and the folder."""

    title = "np.save"
    exact = True
    restores = True

    def __init__(self, workload: Workload) -> None:
        self.names = workload.names

    def save(self, arrays: Arrays, folder: Path, durable: bool) -> None:
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        if durable:
            _fsync_all(folder, (f"{name}.npy" for name in arrays))

    def restore(self, folder: Path) -> Arrays:
        return {name: np.load(folder / f"{name}.npy") for name in self.names}


class Safetensors:
    """safetensors.numpy, one file; a durable save then fsyncs the file and the folder."""

    title = "safetensors"
    exact = True
    restores = True

    def __init__(self, workload: Workload) -> None:
        from safetensors.numpy import load_file, save_file

        self.save_file, self.load_file = save_file, load_file

    def save(self, arrays: Arrays, folder: Path, durable: bool) -> None:
        self.save_file(arrays, folder / "all.safetensors")
        if durable:
            _fsync_all(folder, ["all.safetensors"])

    def restore(self, folder: Path) -> Arrays:
        return self.load_file(folder / "all.safetensors")


class TStore:
    """tstore.save and tstore.restore; a transaction if the workload prescribes the chunk shape."""

    title = "tstore"
    exact = True
    restores = True
    codecs: ClassVar[dict[str, str] | None] = None

    def __init__(self, workload: Workload) -> None:
        import tstore.sync

        self.tstore: Any = tstore.sync
        self.workload = workload

    def save(self, arrays: Arrays, folder: Path, durable: bool) -> None:
        durability = "fsync" if durable else "none"
        store = self.tstore.open(str(folder / "store"))
        if not self.workload.chunked:
            self.tstore.save(store, arrays, step=0, codecs=self.codecs, durability=durability)
            return
        with store.transaction(durability=durability) as tx:
            for name, x in arrays.items():
                tx.create_array(name, shape=x.shape, dtype="float32", chunks=self.workload.chunk).write(x)

    def restore(self, folder: Path) -> Arrays:
        store = self.tstore.open(str(folder / "store"), mode="r")
        if self.workload.chunked:
            snapshot = store.snapshot()
            return {name: snapshot.array(name).read() for name in self.workload.names}
        arrays: Arrays = self.tstore.restore(store)
        return arrays


class TStoreE4M3(TStore):
    """`TStore` with 8 bits per value; its GB/s count the float32 bytes of the input."""

    title = "tstore e4m3"
    exact = False
    codecs: ClassVar = {"**": "e4m3"}


CONTENDERS: dict[str, type[Contender]] = {
    "raw1": Raw,
    "raw2": RawTwoFiles,
    "ts-file": TensorStoreFile,
    "ts-file-copy": TensorStoreFileCopying,
    "ts-ocdbt": TensorStoreOcdbt,
    "npy": NumPy,
    "safetensors": Safetensors,
    "tstore": TStore,
    "tstore-e4m3": TStoreE4M3,
}
RAW = ("raw1", "raw2")
TENSORSTORE = ("ts-file", "ts-file-copy", "ts-ocdbt")
LARGE_ONLY = ("ts-file-copy", "tstore-e4m3")


def _fsync_all(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        _fsync(folder / name)
    _fsync(folder)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
