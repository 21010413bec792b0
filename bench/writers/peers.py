"""The peers as writers of one store: tensorstore and icechunk.

tensorstore writes one ocdbt database, or one per process that process 0 merges. The peers have the settings that
were fastest for them: in tensorstore, a chunk is a host's part of an array, written by reference, and the arrays
are created before the clock starts.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.processes import until
from bench.writers.stores import NAMES, SLOTS, Host, Raw, RawFiles, Saved, TStore, TStoreApart, value_of


class TensorStoreShared(Host):
    """zarr3 in one ocdbt that all hosts write, each in one atomic transaction."""

    title = "tensorstore, one ocdbt"

    def prepare(self) -> None:
        import tensorstore

        io = {"file_io_concurrency": {"limit": 32}, "file_io_sync": self.durable}
        self.context = tensorstore.Context(io)  # shared; otherwise one ocdbt could not reference files of another

    def create(self, writers: int) -> None:
        if not writers:
            self._arrays(self._root(self.folder), create=True)

    def open(self, attempt: int) -> None:
        self.root = self._root(self.folder)
        self.arrays = self._arrays(self.root, open=True) if Path(self.folder, "manifest.ocdbt").exists() else []

    def save(self, start: float, attempt: int) -> Saved:
        import tensorstore

        until(start)
        transaction = tensorstore.Transaction(atomic=True)
        writes = [
            array.with_transaction(transaction)[self.mine].write(part, can_reference_source_data_indefinitely=True)
            for array, part in zip(self.arrays, self.parts.values(), strict=True)
        ]
        for write in writes:
            write.copy.result()
        transaction.commit_async().result()
        now = time.monotonic()
        return Saved(now, now)

    def read(self, name: str) -> Any:
        arrays = self._arrays(self._root(self.folder), open=True)
        return arrays[NAMES.index(name)][self.mine].read().result()

    async def commit(self, writer: int, number: int) -> int:
        await self.root.write(f"{writer}/{number}", value_of(writer, number).to_bytes(8, "little"))
        return 0

    def lost(self, made: Sequence[int]) -> int:
        root = self._root(self.folder)
        reads = {
            value_of(writer, i): root.read(f"{writer}/{i}") for writer, n in enumerate(made) for i in range(n)
        }
        return sum(read.result().value != value.to_bytes(8, "little") for value, read in reads.items())

    def _root(self, folder: str) -> Any:
        import tensorstore

        base = {"driver": "file", "path": f"{folder}/"}
        return tensorstore.KvStore.open({"driver": "ocdbt", "base": base}, context=self.context).result()

    def _arrays(self, root: Any, **how: Any) -> list[Any]:
        import tensorstore

        metadata = {
            "shape": [self.side, self.side],
            "data_type": "float32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [min(1024, self.rows), self.side]}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        }
        spec = {"driver": "zarr3", "metadata": metadata}
        opened = [tensorstore.open(spec, kvstore=root / f"{name}/", **how) for name in NAMES]
        return [future.result() for future in opened]


class TensorStoreMerged(TensorStoreShared):
    """As in Orbax: one ocdbt per process; at the end, process 0 copies their entries to another ocdbt."""

    title = "tensorstore, merged by process 0"
    merges = True

    def create(self, writers: int) -> None:
        """Do nothing: `open` creates the ocdbt of each host."""

    def open(self, attempt: int) -> None:
        self.top = f"{self.folder}/attempt{attempt}"
        self.arrays = self._arrays(self._root(self._own(self.number)), open=True, create=True)

    def merge(self, payloads: Sequence[bytes]) -> float:
        import tensorstore

        transaction = tensorstore.Transaction(atomic=True)
        parent = self._root(self.top).with_transaction(transaction)
        copies = [self._root(self._own(n)).experimental_copy_range_to(parent) for n in range(self.count)]
        for copy in copies:
            copy.result()
        transaction.commit_async().result()
        return time.monotonic()

    def read(self, name: str) -> Any:
        arrays = self._arrays(self._root(self.top), open=True)
        return arrays[NAMES.index(name)][self.mine].read().result()

    def _own(self, number: int) -> str:
        return f"{self.top}/ocdbt.process_{number}"


class Icechunk(Host):
    """Forks of one session for the hosts, merged and committed by host 0. icechunk never calls fsync."""

    title = "icechunk"
    merges = True
    fsync = False
    tasks = False

    def prepare(self) -> None:
        import icechunk

        icechunk.set_logs_filter("error")  # icechunk warns at each use that this storage is not safe

    def create(self, writers: int) -> None:
        import icechunk
        import zarr

        repository = icechunk.Repository.create(icechunk.local_filesystem_storage(self.folder))
        session = repository.writable_session("main")
        root = zarr.create_group(session.store)
        for name in () if writers else NAMES:
            chunks = (min(1024, self.rows), self.side)
            root.create_array(name, shape=(self.side, self.side), dtype="float32", chunks=chunks, compressors=None)
        for writer in range(writers):
            root.create_array(f"writer{writer}", shape=(SLOTS,), dtype="int64", chunks=(1,), compressors=None)
        session.commit("begin")
        self.session = repository.writable_session("main")
        for number in range(self.count):
            Path(f"{self.folder}.fork{number}").write_bytes(pickle.dumps(self.session.fork()))

    def open(self, attempt: int) -> None:
        import icechunk
        import zarr

        self.repository = icechunk.Repository.open(icechunk.local_filesystem_storage(self.folder))
        self.fork = pickle.loads(Path(f"{self.folder}.fork{self.number}").read_bytes())
        self.arrays = dict(zarr.open_group(self.fork.store).arrays())

    def save(self, start: float, attempt: int) -> Saved:
        until(start)
        for name, part in self.parts.items():
            self.arrays[name][self.mine] = part
        now = time.monotonic()
        return Saved(now, now, pickle.dumps(self.fork))

    def merge(self, payloads: Sequence[bytes]) -> float:
        self.session.merge(*[pickle.loads(p) for p in payloads])
        self.session.commit("step 0")
        return time.monotonic()

    def read(self, name: str) -> Any:
        return self._newest()[name][self.mine]

    async def commit(self, writer: int, number: int) -> int:
        import icechunk
        import zarr

        for tries in range(1000):
            try:
                session = self.repository.writable_session("main")
                zarr.open_group(session.store)[f"writer{writer}"][number] = value_of(writer, number)
                session.commit("small", rebase_with=icechunk.ConflictDetector())
            except icechunk.IcechunkError:
                continue  # icechunk read an object that another process was writing
            return tries
        raise RuntimeError("a commit failed a thousand times")

    def lost(self, made: Sequence[int]) -> int:
        root = self._newest()
        return sum(
            int((root[f"writer{writer}"][:n] != value_of(writer, 0) + np.arange(n)).sum())
            for writer, n in enumerate(made)
        )

    def _newest(self) -> Any:
        import icechunk
        import zarr

        repository = icechunk.Repository.open(icechunk.local_filesystem_storage(self.folder))
        return zarr.open_group(repository.readonly_session("main").store, mode="r")


CONTENDERS: dict[str, type[Host]] = {
    "raw": Raw,
    "raw-files": RawFiles,
    "tstore": TStore,
    "tstore-apart": TStoreApart,
    "ts-shared": TensorStoreShared,
    "ts-merged": TensorStoreMerged,
    "icechunk": Icechunk,
}
