"""tensorstore: zarr3 on files, on ocdbt and over HTTP, alone and as many writers of one store."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from bench.contender import Contender, New, Point, Saved, gathered, value_of
from bench.workloads import RAW, Index, Tree, Values

_SLAB = 100_000  # chunks of one transaction, since one for ten million takes far more memory


class TensorStore(Contender):
    """zarr3 on the `file` driver, uncompressed, all arrays at once.

    Fastest settings: chunks of 16 MiB, and writing by reference, without a copy of the caller's arrays. Large
    arrays are read into `np.empty` arrays, which get huge pages, unlike the arrays that `read()` allocates. Small
    arrays are read faster with `read()`.
    """

    title = "tensorstore file"
    by_reference = True
    cache = 0

    def prepare(self) -> None:
        import tensorstore

        self.ts: Any = tensorstore
        self.opened: dict[str, Any] = {}

    def root(self, place: str, durable: bool = True) -> Any:
        """Open a folder, in a new context."""
        context = {"cache_pool": {"total_bytes_limit": self.cache}, "file_io_concurrency": {"limit": 32}}
        return self.ts.KvStore.open(
            self.driver(place), context=self.ts.Context(context | {"file_io_sync": durable})
        )

    def driver(self, place: str) -> dict[str, Any]:
        return {"driver": "file", "path": f"{place}/"}

    def spec(self, values: Any, chunk: Index | None, codecs: Sequence[dict[str, Any]] = RAW) -> dict[str, Any]:
        """Return the specification of a new array like `values`."""
        return {
            "driver": "zarr3",
            "metadata": {
                "shape": list(values.shape),
                "data_type": str(values.dtype),
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk or values.shape)}},
                "codecs": list(codecs),
            },
        }

    # arrays in chunks

    def create(self, new: New) -> None:
        self.put(f"{self.folder}", new)

    def put(self, place: str, new: New) -> None:
        root = self.root(place, new.durable).result()
        opened = [
            self.ts.open(self.spec(values, new.chunk, new.codecs), kvstore=root / f"{name}/", create=True)
            for name, values in new.arrays.items()
        ]
        writes = [
            array.result().write(values, can_reference_source_data_indefinitely=self.by_reference)
            for array, values in zip(opened, new.arrays.values(), strict=True)
        ]
        for write in writes:
            write.result()

    @cached_property
    def top(self) -> Any:
        return self.root(f"{self.folder}").result()

    def open(self, name: str) -> None:
        if name not in self.opened:
            spec = {"driver": "zarr3", "recheck_cached_metadata": "open"}
            self.opened[name] = self.ts.open(spec, kvstore=self.top / f"{name}/", open=True).result()
        self.array: Any = self.opened[name]

    def read(self, index: Index) -> Values:
        if any(i != slice(None) for i in index):
            return self.array[index].read().result()  # type: ignore[no-any-return]
        values = np.empty(self.array.shape, self.array.dtype.numpy_dtype)
        self.ts.array(values).write(self.array).result()
        return values

    def read_points(self, points: Sequence[Point]) -> Sequence[Any]:
        return asyncio.run(gathered(lambda point: self.array[point].read(), points))

    def names(self, group: str) -> list[str]:
        keys = self.top.list(self.ts.KvStore.KeyRange(f"{group}/", f"{group}0")).result()
        return sorted({key.decode().split("/")[1] for key in keys})

    def write(self, name: str, index: Index, values: Values) -> None:
        self.open(name)
        self.array[index].write(values).result()

    # whole states

    def place(self, step: int) -> str:
        return f"{self.folder}/{step}"

    def save(self, step: int, durable: bool) -> None:
        self.put(self.place(step), New(self.arrays, self.work.chunk, RAW, durable))

    def restore(self, step: int, what: str) -> Tree:
        root = self.root(self.place(step)).result()
        opened = [
            array.result()
            for array in [
                self.ts.open({"driver": "zarr3"}, kvstore=root / f"{name}/", open=True, recheck_cached=False)
                for name in self.work.names
            ]
        ]
        if self.work.nbytes // self.work.count < 1 << 20:
            reads = [array.read() for array in opened]
            return {name: read.result() for name, read in zip(self.work.names, reads, strict=True)}
        arrays = {n: np.empty(a.shape, np.float32) for n, a in zip(self.work.names, opened, strict=True)}
        for copy in [self.ts.array(new).write(a) for new, a in zip(arrays.values(), opened, strict=True)]:
            copy.result()
        return arrays


class TensorStoreCopying(TensorStore):
    """`TensorStore` with a plain `write(array)`, which first copies the caller's array."""

    title = "tensorstore file, copying"
    restores = False
    by_reference = False


class TensorStoreOcdbt(TensorStore):
    """zarr3 on `ocdbt` over files; saving is fastest in one atomic transaction for all arrays."""

    title = "tensorstore ocdbt"

    def driver(self, place: str) -> dict[str, Any]:
        return {"driver": "ocdbt", "base": super().driver(place)}

    def put(self, place: str, new: New) -> None:
        root = self.root(place, new.durable).result()

        def opened(name: str, values: Values, **how: Any) -> Any:
            spec = self.spec(values, new.chunk, new.codecs)
            return self.ts.open(spec, kvstore=root / f"{name}/", create=True, **how)

        limit = _SLAB * (new.chunk[0] if new.chunk else 1)
        long = {name: values for name, values in new.arrays.items() if values.ndim == 1 and len(values) > limit}
        for name, values in long.items():
            array = opened(name, values).result()
            for start in range(0, len(values), limit):
                slab = slice(start, min(start + limit, len(values)))
                with self.ts.Transaction(atomic=True) as transaction:
                    array.with_transaction(transaction)[slab].write(values[slab]).result()
        transaction = self.ts.Transaction(atomic=True)
        short = [item for item in new.arrays.items() if item[0] not in long]
        for batch in (short[start : start + 1000] for start in range(0, len(short), 1000)):
            handles = [opened(name, values, transaction=transaction) for name, values in batch]
            writes = [
                array.result().write(values, can_reference_source_data_indefinitely=True)
                for array, (_, values) in zip(handles, batch, strict=True)
            ]
            for write in writes:
                write.copy.result()
        transaction.commit_async().result()


class TensorStoreCaching(TensorStoreOcdbt):
    """`TensorStoreOcdbt` with a cache for the nodes of a large database."""

    cache = 64 << 20


class TensorStoreServed(TensorStore):
    """zarr3 on the drivers `file`, `http` and `gcs`, a folder for each host, in chunks of at most 1024 rows."""

    title = "tensorstore"
    reading = False

    def driver(self, place: str) -> dict[str, Any]:
        where = self.work.place
        if self.work.server == "gcs":
            os.environ["TENSORSTORE_GCS_HTTP_URL"] = where.server
            return {"driver": "gcs", "bucket": where.store.split("/")[2], "path": f"{place}/"}
        if self.reading and self.work.server != "local":
            return {"driver": "http", "base_url": f"{where.server}/{place}/"}
        return super().driver(f"{where.folder}/{place}")

    def place(self, step: int) -> str:
        return f"tensorstore/{step}/{self.number}"

    def restore(self, step: int, what: str) -> Tree:
        self.reading = True
        return super().restore(step, what)


class TensorStoreShared(TensorStoreOcdbt):
    """zarr3 in one ocdbt that all hosts write, each in one atomic transaction.

    A chunk is a host's part of an array; the arrays are created before the clock starts.
    """

    title = "tensorstore, one ocdbt"

    def prepare(self) -> None:
        super().prepare()
        io = {"file_io_concurrency": {"limit": 32}, "file_io_sync": self.durable}
        self.context = self.ts.Context(io)  # shared; otherwise one ocdbt could not reference files of another

    def root(self, place: str, durable: bool = True) -> Any:
        return self.ts.KvStore.open(self.driver(place), context=self.context)

    def begin(self, writers: int) -> None:
        if not writers:
            self.joint(f"{self.folder}", create=True)

    def join(self, attempt: int) -> None:
        self.all = self.root(f"{self.folder}").result()
        self.joined = self.joint(f"{self.folder}", open=True) if (self.folder / "manifest.ocdbt").exists() else {}

    def joint(self, place: str, **how: Any) -> dict[str, Any]:
        """Open the arrays of all hosts."""
        root, whole = self.root(place).result(), np.broadcast_to(np.float32(), self.work.shape)
        spec = self.spec(whole, (min(1024, whole.shape[0] // self.count), whole.shape[1]))
        opened = {name: self.ts.open(spec, kvstore=root / f"{name}/", **how) for name in self.work.names}
        return {name: future.result() for name, future in opened.items()}

    def save_part(self, attempt: int) -> Saved:
        transaction = self.ts.Transaction(atomic=True)
        writes = [
            self.joined[name]
            .with_transaction(transaction)[self.mine]
            .write(part, can_reference_source_data_indefinitely=True)
            for name, part in self.arrays.items()
        ]
        for write in writes:
            write.copy.result()
        transaction.commit_async().result()
        now = time.monotonic()
        return Saved(now, now)

    def read_part(self, name: str) -> Values:
        return self.joint(self.saved, open=True)[name][self.mine].read().result()  # type: ignore[no-any-return]

    @property
    def saved(self) -> str:
        """The database with the state of all hosts."""
        return f"{self.folder}"

    async def commit(self, writer: int, number: int) -> int:
        await self.all.write(f"{writer}/{number}", value_of(writer, number).to_bytes(8, "little"))
        return 0

    def lost(self, made: Sequence[int]) -> int:
        root = self.root(f"{self.folder}").result()
        reads = {
            value_of(writer, i): root.read(f"{writer}/{i}") for writer, n in enumerate(made) for i in range(n)
        }
        return sum(read.result().value != value.to_bytes(8, "little") for value, read in reads.items())


class TensorStoreMerged(TensorStoreShared):
    """As in Orbax: one ocdbt per process; at the end, process 0 copies their entries to another ocdbt."""

    title = "tensorstore, merged by process 0"
    merges = True

    def begin(self, writers: int) -> None:
        """Do nothing: `join` creates the ocdbt of each host."""

    def join(self, attempt: int) -> None:
        self.attempt = attempt
        self.joined = self.joint(self._own(self.number), open=True, create=True)

    @property
    def saved(self) -> str:
        return f"{self.folder}/attempt{self.attempt}"

    def merge(self, payloads: Sequence[bytes]) -> float:
        transaction = self.ts.Transaction(atomic=True)
        parent = self.root(self.saved).result().with_transaction(transaction)
        copies = [self.root(self._own(n)).result().experimental_copy_range_to(parent) for n in range(self.count)]
        for copy in copies:
            copy.result()
        transaction.commit_async().result()
        return time.monotonic()

    def _own(self, number: int) -> str:
        return f"{self.saved}/ocdbt.process_{number}"
