"""icechunk, alone and as many writers of one repository."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bench.contender import SLOTS, New, Saved, value_of
from bench.peers.zarr import Zarr
from bench.workloads import Index, Values


class Icechunk(Zarr):
    """icechunk in zarr-python's default pipeline; never calls fsync.

    Of many writers of one state, each has a fork of one session, and host 0 merges and commits them.
    """

    title = "icechunk"
    merges = True
    tasks = False

    def prepare(self) -> None:
        super().prepare()
        import icechunk

        self.icechunk: Any = icechunk
        icechunk.set_logs_filter("error")  # icechunk warns at each use that this storage is not safe

    @cached_property
    def repository(self) -> Any:
        return self.icechunk.Repository.open(self.storage())

    def storage(self) -> Any:
        return self.icechunk.local_filesystem_storage(str(self.folder))

    def newest(self) -> Any:
        return self.zarr.open_group(self.repository.readonly_session("main").store, mode="r")

    def create(self, new: New) -> None:
        session = self.icechunk.Repository.create(self.storage()).writable_session("main")
        self.put(session.store, new)
        session.commit("create")

    def write(self, name: str, index: Index, values: Values) -> None:
        session = self.repository.writable_session("main")
        self.zarr.open_group(session.store)[name][index] = values
        session.commit("change")

    # one store of many writers

    def begin(self, writers: int) -> None:
        repository = self.icechunk.Repository.create(self.storage())
        session = repository.writable_session("main")
        root = self.zarr.create_group(session.store)
        for name in () if writers else self.work.names:
            shape, rows = self.work.shape, self.work.shape[0] // self.count
            chunks = (min(1024, rows), shape[1])
            root.create_array(name, shape=shape, dtype="float32", chunks=chunks, compressors=None)
        for writer in range(writers):
            root.create_array(f"writer{writer}", shape=(SLOTS,), dtype="int64", chunks=(1,), compressors=None)
        session.commit("begin")
        self.session = repository.writable_session("main")
        for number in range(self.count):
            self._fork(number).write_bytes(pickle.dumps(self.session.fork()))

    def join(self, attempt: int) -> None:
        self.__dict__.pop("repository", None)  # of a rehearsal
        self.fork = pickle.loads(self._fork(self.number).read_bytes())
        self.joined = dict(self.zarr.open_group(self.fork.store).arrays())

    def save_part(self, attempt: int) -> Saved:
        for name, part in self.arrays.items():
            self.joined[name][self.mine] = part
        now = time.monotonic()
        return Saved(now, now, pickle.dumps(self.fork))

    def merge(self, payloads: Sequence[bytes]) -> float:
        self.session.merge(*[pickle.loads(payload) for payload in payloads])
        self.session.commit("step 0")
        return time.monotonic()

    def read_part(self, name: str) -> Values:
        return self.newest()[name][self.mine]  # type: ignore[no-any-return]

    async def commit(self, writer: int, number: int) -> int:
        for tries in range(1000):
            try:
                session = self.repository.writable_session("main")
                self.zarr.open_group(session.store)[f"writer{writer}"][number] = value_of(writer, number)
                session.commit("small", rebase_with=self.icechunk.ConflictDetector())
            except self.icechunk.IcechunkError:
                continue  # icechunk read an object that another process was writing
            return tries
        raise RuntimeError("a commit failed a thousand times")

    def lost(self, made: Sequence[int]) -> int:
        root = self.newest()
        return sum(
            int((root[f"writer{writer}"][:n] != value_of(writer, 0) + np.arange(n)).sum())
            for writer, n in enumerate(made)
        )

    def _fork(self, number: int) -> Path:
        return self.folder.with_name(f"{self.folder.name}.fork{number}")
