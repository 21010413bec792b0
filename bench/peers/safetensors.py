"""Files of whole arrays: safetensors, and np.save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.raw import Files, fsync
from bench.workloads import Arrays, Tree


class Safetensors(Files):
    """safetensors.numpy, one file a step; a durable save then fsyncs the file and the folder."""

    title = "safetensors"
    parts = True

    def prepare(self) -> None:
        import safetensors.numpy

        self.library: Any = safetensors

    def put(self, arrays: Arrays, folder: Path, durable: bool) -> None:
        self.library.numpy.save_file(arrays, folder / "all.safetensors")
        if durable:
            fsync(folder / "all.safetensors")
            fsync(folder)

    def fetch(self, folder: Path) -> Arrays:
        return self.library.numpy.load_file(folder / "all.safetensors")  # type: ignore[no-any-return]

    def restore(self, step: int, what: str) -> Tree:
        if what == "same":
            return super().restore(step, what)
        with self.library.safe_open(self.step(step) / "all.safetensors", "numpy") as file:
            return {"group0": {name: file.get_tensor(name) for name in self.state["group0"]}}


class NumPy(Files):
    """np.save and np.load, one file per array; a durable save then fsyncs each file and the folder."""

    title = "np.save"

    def put(self, arrays: Arrays, folder: Path, durable: bool) -> None:
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        if durable:
            for name in arrays:
                fsync(folder / f"{name}.npy")
            fsync(folder)

    def fetch(self, folder: Path) -> Arrays:
        return {name: np.load(folder / f"{name}.npy") for name in self.work.names}
