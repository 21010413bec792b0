"""The peers: tensorstore's zarr3 on files and on ocdbt, zarr-python with each of its pipelines, and icechunk."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from bench.arrays.contenders import Contender, Point, RawChunks, RawFile, RawTwo, TStore, gathered
from bench.arrays.volume import Index, Values
from bench.scale import contenders as scale
from bench.scale import peers as scale_peers


class TensorStore(Contender):
    """zarr3 on the `file` driver; writes by reference, without a copy of the caller's array."""

    title = "tensorstore file"

    def prepare(self) -> None:
        self.ts: Any = importlib.import_module("tensorstore")

    def create(self, values: Values, durable: bool) -> None:
        metadata = {
            "shape": list(self.volume.shape),
            "data_type": "uint16",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.volume.chunks)}},
            "codecs": self.volume.codecs,
        }
        spec = {"driver": "zarr3", "kvstore": self._kvstore(), "metadata": metadata}
        array = self.ts.open(spec, context=self._context(durable), create=True).result()
        self.store(array, values)

    def store(self, array: Any, values: Values) -> None:
        """Write all values of a new array."""
        array.write(values, can_reference_source_data_indefinitely=True).result()

    def open(self) -> None:
        spec = {"driver": "zarr3", "kvstore": self._kvstore(), "recheck_cached_metadata": "open"}
        self.array: Any = self.ts.open(spec, context=self._context(True), open=True).result()

    def read_whole(self) -> Values:
        values = np.empty(self.volume.shape, np.uint16)  # in huge pages, unlike an array that `read` allocates
        self.ts.array(values).write(self.array).result()
        return values

    def read(self, index: Index) -> Values:
        values: Values = self.array[index].read().result()
        return values

    def read_points(self, points: Sequence[Point]) -> Sequence[Any]:
        async def work() -> Sequence[Any]:
            return await gathered(lambda point: self.array[point].read(), points)

        return asyncio.run(work())

    def _context(self, durable: bool) -> Any:
        pool = {"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": {"limit": 32}}
        return self.ts.Context(pool | {"file_io_sync": durable})

    def _kvstore(self) -> dict[str, Any]:
        return {"driver": "file", "path": f"{self.folder}/"}


class TensorStoreOcdbt(TensorStore):
    """zarr3 on `ocdbt` over files, in one atomic transaction."""

    title = "tensorstore ocdbt"

    def store(self, array: Any, values: Values) -> None:
        with self.ts.Transaction(atomic=True) as transaction:
            super().store(array.with_transaction(transaction), values)

    def _kvstore(self) -> dict[str, Any]:
        return {"driver": "ocdbt", "base": super()._kvstore()}


class Zarr(Contender):
    """zarr-python on its `LocalStore`, with its default pipeline of batches; never calls fsync."""

    title = "zarr-python"
    durable = False
    pipeline: ClassVar[str] = "zarr.core.codec_pipeline.BatchedCodecPipeline"

    def prepare(self) -> None:
        self.zarr: Any = importlib.import_module("zarr")
        module, _, name = self.pipeline.rpartition(".")
        if not hasattr(importlib.import_module(module), name):
            raise ImportError(f"zarr-python {self.zarr.__version__} has no {name}")
        self.zarr.config.set({"codec_pipeline.path": self.pipeline})

    def create(self, values: Values, durable: bool) -> None:
        self._write(self.zarr.storage.LocalStore(self.folder), values)

    def _write(self, store: Any, values: Values) -> None:
        serializer, *compressors = self.volume.codecs
        array = self.zarr.create_array(
            store,
            name="volume",
            shape=values.shape,
            dtype="uint16",
            chunks=self.volume.chunks,
            serializer=serializer,
            compressors=compressors or None,
        )
        array[...] = values

    def open(self) -> None:
        self.array: Any = self.zarr.open_array(self._store(), path="volume", mode="r")

    def _store(self) -> Any:
        return self.zarr.storage.LocalStore(self.folder, read_only=True)

    def read(self, index: Index) -> Values:
        values: Values = self.array[index]
        return values

    def read_points(self, points: Sequence[Point]) -> Sequence[Any]:
        array = self.array.async_array

        async def work() -> Sequence[Any]:
            return await gathered(array.getitem, points)

        return asyncio.run(work())


class ZarrFused(Zarr):
    """zarr-python with its fused pipeline, which versions from 3.3 on have."""

    title = "zarr-python, fused"
    pipeline = "zarr.core.codec_pipeline.FusedCodecPipeline"


class Icechunk(Zarr):
    """icechunk in zarr-python's default pipeline; never calls fsync."""

    title = "icechunk"

    def prepare(self) -> None:
        super().prepare()
        self.icechunk: Any = importlib.import_module("icechunk")
        self.icechunk.set_logs_filter("error")  # icechunk warns at each use that this storage is not safe

    def create(self, values: Values, durable: bool) -> None:
        session = self.icechunk.Repository.create(self._storage()).writable_session("main")
        self._write(session.store, values)
        session.commit("create")

    def _store(self) -> Any:
        return self.icechunk.Repository.open(self._storage()).readonly_session("main").store

    def _storage(self) -> Any:
        return self.icechunk.local_filesystem_storage(str(self.folder))


class ZarrArrays(scale_peers.Icechunk):
    """Many small arrays in groups of a `LocalStore`."""

    title = Zarr.title

    def prepare(self) -> None:
        self.zarr: Any = importlib.import_module("zarr")

    def create_arrays(self, arrays: dict[str, scale.Values]) -> None:
        root = self.zarr.create_group(self.zarr.storage.LocalStore(self.folder))
        for name, values in arrays.items():
            root.create_array(name, shape=values.shape, dtype="int64", chunks=(4,), compressors=None)[:] = values

    @cached_property
    def root(self) -> Any:
        return self.zarr.open_group(self.zarr.storage.LocalStore(self.folder, read_only=True), mode="r")

    def read(self, name: str, index: int) -> Any:
        return self.root[name][index]


CONTENDERS: dict[str, type[Contender]] = {
    "raw1": RawFile,
    "raw2": RawTwo,
    "raw-chunks": RawChunks,
    "ts-file": TensorStore,
    "ts-ocdbt": TensorStoreOcdbt,
    "zarr": Zarr,
    "zarr-fused": ZarrFused,
    "icechunk": Icechunk,
    "tstore": TStore,
}
RAW = ("raw1", "raw2")
"""The limit of the machine, without chunks."""
RAW_CHUNKS = ("raw-chunks",)
"""The limit with chunks, encoded or not."""
TENSORSTORE = ("ts-file", "ts-ocdbt")
PEERS = ("ts-file", "ts-ocdbt", "zarr", "zarr-fused", "icechunk")
"""The contenders that a run can leave out."""

MANY_ARRAYS: dict[str, type[scale.Contender]] = {**scale_peers.CONTENDERS, "zarr": ZarrArrays}
"""The contenders with many arrays."""
