"""The peers with many chunks, arrays or commits: tensorstore (zarr3 on ocdbt) and icechunk."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from bench.scale.contenders import WIDTH, Contender, TStore, Values

_SLAB = 100_000  # chunks that tensorstore writes in one transaction


class TensorStore(Contender):
    """`create` commits once for every `_SLAB` chunks, since one transaction for all takes far more memory."""

    title = "tensorstore ocdbt"

    def prepare(self) -> None:
        import tensorstore

        self.ts: Any = tensorstore
        self.opened: dict[str, Any] = {}

    @cached_property
    def root(self) -> Any:
        base = {"driver": "file", "path": f"{self.folder}/"}
        context = self.ts.Context({"cache_pool": {"total_bytes_limit": 64 << 20}, "file_io_sync": True})
        return self.ts.KvStore.open({"driver": "ocdbt", "base": base}, context=context).result()

    def array(self, name: str) -> Any:
        if name not in self.opened:
            spec = {"driver": "zarr3", "recheck_cached_metadata": "open"}
            self.opened[name] = self.ts.open(spec, kvstore=self.root / f"{name}/", open=True).result()
        return self.opened[name]

    def create(self, arrays: dict[str, Values]) -> None:
        for name, values in arrays.items():
            array = self.ts.open(_zarr(values, WIDTH), kvstore=self.root / f"{name}/", create=True).result()
            for start in range(0, len(values), _SLAB * WIDTH):
                slab = slice(start, min(start + _SLAB * WIDTH, len(values)))
                with self.ts.Transaction(atomic=True) as transaction:
                    array.with_transaction(transaction)[slab].write(values[slab]).result()

    def create_arrays(self, arrays: dict[str, Values]) -> None:
        with self.ts.Transaction(atomic=True) as transaction:
            for batch in _batches(list(arrays.items()), 1000):
                opened = [
                    self.ts.open(
                        _zarr(values, len(values)),
                        kvstore=self.root / f"{name}/",
                        create=True,
                        transaction=transaction,
                    )
                    for name, values in batch
                ]
                writes = [a.result().write(values) for a, (_, values) in zip(opened, batch, strict=True)]
                for write in writes:
                    write.copy.result()

    def read(self, name: str, index: int) -> Any:
        return self.array(name)[index].read().result()

    def names(self, group: str) -> list[str]:
        keys = self.root.list(self.ts.KvStore.KeyRange(f"{group}/", f"{group}0")).result()
        return sorted({key.decode().split("/")[1] for key in keys})

    def commit(self, index: slice, values: Values) -> None:
        self.array("big")[index].write(values).result()


class Icechunk(Contender):
    """icechunk never calls fsync."""

    title = "icechunk"

    def prepare(self) -> None:
        icechunk: Any = importlib.import_module("icechunk")
        zarr: Any = importlib.import_module("zarr")
        icechunk.set_logs_filter("error")  # icechunk warns at each use that this storage is not safe
        self.icechunk, self.zarr = icechunk, zarr

    @cached_property
    def repository(self) -> Any:
        return self.icechunk.Repository.open(self._storage())

    def create(self, arrays: dict[str, Values], width: int = WIDTH) -> None:
        repository = self.icechunk.Repository.create(self._storage())
        session = repository.writable_session("main")
        root = self.zarr.create_group(session.store)
        for name, values in arrays.items():
            array = root.create_array(name, shape=values.shape, dtype="int64", chunks=(width,), compressors=None)
            array[:] = values
        session.commit("create")

    def create_arrays(self, arrays: dict[str, Values]) -> None:
        self.create(arrays, 4)

    def read(self, name: str, index: int) -> Any:
        return self._newest()[name][index]

    def names(self, group: str) -> list[str]:
        return [name for name, _ in self._newest()[group].arrays()]

    def commit(self, index: slice, values: Values) -> None:
        session = self.repository.writable_session("main")
        self.zarr.open_group(session.store)["big"][index] = values
        session.commit("change")

    def _newest(self) -> Any:
        return self.zarr.open_group(self.repository.readonly_session("main").store, mode="r")

    def _storage(self) -> Any:
        return self.icechunk.local_filesystem_storage(self.folder)


CONTENDERS: dict[str, type[Contender]] = {"tstore": TStore, "ts-ocdbt": TensorStore, "icechunk": Icechunk}


def _zarr(values: Values, chunk: int) -> dict[str, Any]:
    """Return tensorstore's specification of a new array."""
    metadata = {
        "shape": list(values.shape),
        "data_type": "int64",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk]}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    return {"driver": "zarr3", "metadata": metadata}


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
