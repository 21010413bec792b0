"""zarr-python with each of its pipelines."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import Any, ClassVar

from bench.contender import Contender, New, Point, gathered
from bench.workloads import Index, Values


class Zarr(Contender):
    """zarr-python on its `LocalStore`, with its default pipeline of batches; never calls fsync."""

    title = "zarr-python"
    durabilities = (False,)
    pipeline: ClassVar[str] = "zarr.core.codec_pipeline.BatchedCodecPipeline"

    def prepare(self) -> None:
        self.zarr: Any = importlib.import_module("zarr")
        module, _, name = self.pipeline.rpartition(".")
        if not hasattr(importlib.import_module(module), name):
            raise ImportError(f"zarr-python {self.zarr.__version__} has no {name}")
        self.zarr.config.set({"codec_pipeline.path": self.pipeline})

    def create(self, new: New) -> None:
        self.put(self.zarr.storage.LocalStore(self.folder), new)

    def put(self, store: Any, new: New) -> None:
        root, (serializer, *compressors) = self.zarr.create_group(store), new.codecs
        for name, values in new.arrays.items():
            how = {"shape": values.shape, "dtype": values.dtype, "chunks": new.chunk or values.shape}
            array = root.create_array(name, **how, serializer=serializer, compressors=compressors or None)
            array[...] = values

    def newest(self) -> Any:
        """Return the group with all arrays."""
        if not hasattr(self, "root"):
            store = self.zarr.storage.LocalStore(self.folder, read_only=True)
            self.root = self.zarr.open_group(store, mode="r")
        return self.root

    def open(self, name: str) -> None:
        self.array: Any = self.newest()[name]

    def read(self, index: Index) -> Values:
        return self.array[index]  # type: ignore[no-any-return]

    def read_points(self, points: Sequence[Point]) -> Sequence[Any]:
        return asyncio.run(gathered(self.array.async_array.getitem, points))

    def names(self, group: str) -> list[str]:
        return [name for name, _ in self.newest()[group].arrays()]


class ZarrFused(Zarr):
    """zarr-python with its fused pipeline, which versions from 3.3 on have."""

    title = "zarr-python, fused"
    pipeline = "zarr.core.codec_pipeline.FusedCodecPipeline"
