"""The peers: tensorstore (zarr3 on files, and on ocdbt), zarr-python and icechunk."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from bench.arrays.contenders import Contender, RawFile, TStore
from bench.arrays.volume import Index, Values


class TensorStore(Contender):
    title = "tensorstore zarr3"

    def prepare(self) -> None:
        import tensorstore

        self.ts: Any = tensorstore

    def kvstore(self) -> Any:
        return {"driver": "file", "path": f"{self.folder}/"}

    def _open(self, durable: bool, **options: Any) -> Any:
        spec = {"driver": "zarr3", "kvstore": self.kvstore(), "recheck_cached_data": False, **options}
        context = self.ts.Context({"file_io_sync": durable, "cache_pool": {"total_bytes_limit": 0}})
        return self.ts.open(spec, context=context).result()

    def create(self, values: Values, durable: bool) -> None:
        layout = self.layout
        metadata = {
            "shape": layout.shape,
            "data_type": "uint16",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": layout.chunks}},
            "codecs": _zstd_of_tensorstore(layout.codecs),
        }
        self._open(durable, metadata=metadata, create=True, delete_existing=True).write(values).result()

    @cached_property
    def array(self) -> Any:
        return self._open(False)

    def read(self, index: Index | tuple[()]) -> Any:
        return self.array[index].read().result()

    def read_at_once(self, indices: Sequence[tuple[int, ...]]) -> Sequence[Any]:
        reads = [self.array[index].read() for index in indices]
        return [read.result() for read in reads]


class Ocdbt(TensorStore):
    title = "tensorstore ocdbt"

    def kvstore(self) -> Any:
        return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{self.folder}/"}}


class ZarrPython(Contender):
    """zarr-python with its default pipeline of codecs, on a `LocalStore`, which never calls fsync."""

    title = "zarr-python"
    durable = False
    pipeline = "zarr.core.codec_pipeline.BatchedCodecPipeline"

    def prepare(self) -> None:
        self.zarr: Any = importlib.import_module("zarr")
        module, _, name = self.pipeline.rpartition(".")
        if not hasattr(importlib.import_module(module), name):
            raise ModuleNotFoundError(f"this version of zarr-python has no {name}")
        self.zarr.config.set({"codec_pipeline.path": self.pipeline})

    def writable(self) -> Any:
        return self.zarr.storage.LocalStore(self.folder)

    def readable(self) -> Any:
        return self.zarr.storage.LocalStore(self.folder, read_only=True)

    def create(self, values: Values, durable: bool) -> None:
        self._create(self.writable(), values)

    def _create(self, store: Any, values: Values) -> None:
        layout = self.layout
        compressors = [codec for codec in layout.codecs if codec["name"] == "zstd"] or None
        array = self.zarr.create_array(
            store, name="volume", shape=layout.shape, dtype="uint16", chunks=layout.chunks, compressors=compressors
        )
        array[:] = values

    @cached_property
    def array(self) -> Any:
        return self.zarr.open_array(self.readable(), path="volume", mode="r")

    def read(self, index: Index | tuple[()]) -> Any:
        return self.array[index]

    def read_at_once(self, indices: Sequence[tuple[int, ...]]) -> Sequence[Any]:
        array = self.array.async_array

        async def work() -> list[Any]:
            return list(await asyncio.gather(*(array.getitem(index) for index in indices)))

        return asyncio.run(work())


class FusedZarr(ZarrPython):
    title = "zarr-python, fused"
    pipeline = "zarr.core.codec_pipeline.FusedCodecPipeline"


class Icechunk(ZarrPython):
    """zarr-python on icechunk, which never calls fsync."""

    title = "icechunk"

    def prepare(self) -> None:
        super().prepare()
        self.icechunk: Any = importlib.import_module("icechunk")
        self.icechunk.set_logs_filter("error")  # icechunk warns at each use that this storage is not safe

    def create(self, values: Values, durable: bool) -> None:
        repository = self.icechunk.Repository.create(self._storage())
        session = repository.writable_session("main")
        self._create(session.store, values)
        session.commit("create")

    def readable(self) -> Any:
        return self.icechunk.Repository.open(self._storage()).readonly_session("main").store

    def _storage(self) -> Any:
        return self.icechunk.local_filesystem_storage(str(self.folder))


class ZarrOnTStore(ZarrPython):
    """zarr-python on tstore's `ZarrStore`."""

    title = "zarr-python on tstore"
    durable = True

    def prepare(self) -> None:
        super().prepare()
        self.tstore: Any = importlib.import_module("tstore.sync")
        self.adapter: Any = importlib.import_module("tstore.zarr").ZarrStore

    def create(self, values: Values, durable: bool) -> None:
        store = self.tstore.open(self.folder)
        with store.transaction(durability="fsync" if durable else "none") as transaction:
            self._create(self.adapter(transaction), values)

    def readable(self) -> Any:
        return self.adapter(self.tstore.open(self.folder, "r").snapshot())


CONTENDERS: dict[str, type[Contender]] = {
    "raw": RawFile,
    "tstore": TStore,
    "ts-file": TensorStore,
    "ts-ocdbt": Ocdbt,
    "zarr": ZarrPython,
    "zarr-fused": FusedZarr,
    "zarr-tstore": ZarrOnTStore,
    "icechunk": Icechunk,
}


def _zstd_of_tensorstore(codecs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the codecs as tensorstore takes them: it knows no `checksum` of zstd."""
    return [
        {"name": c["name"], "configuration": {k: v for k, v in c["configuration"].items() if k != "checksum"}}
        for c in codecs
    ]
