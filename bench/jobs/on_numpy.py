"""Contenders that save NumPy arrays from one process, and the limit of the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy.typing as npt

from bench.jobs.states import Piece, flat, grouped, tenth
from bench.save import peers
from bench.save.workloads import Workload


class _Arrays:
    """The state as NumPy arrays."""

    processes = 1
    stagings: ClassVar[tuple[str, ...]] = ()
    durabilities: ClassVar[tuple[bool, ...]] = (True, False)
    reshards = False
    parts = True

    def __init__(self, workload: Workload, host: int, hosts: int, rendezvous: Path) -> None:
        self.tree = grouped(workload, workload.items())

    def values(self) -> Iterator[npt.NDArray[Any]]:
        for _, array in flat(self.tree):
            yield array

    def wait_for_others(self) -> None:
        """The job has one process."""

    def begin_save(self, folder: Path, step: int, staging: str) -> Callable[[], Any]:
        raise NotImplementedError

    def change_tenth(self) -> None:
        for _, array in flat(tenth(self.tree)):
            array += 1

    def pieces(self, restored: Any) -> Iterator[Piece]:
        for name, array in flat(restored):
            yield name, tuple(slice(0, n) for n in array.shape), array


class Raw(_Arrays):
    """The limit of the disk (see `bench.save.peers.RawTwoFiles`), and of saves in the background."""

    title = "raw disk"
    stagings = ("memory",)
    parts = False

    def __init__(self, workload: Workload, host: int, hosts: int, rendezvous: Path) -> None:
        super().__init__(workload, host, hosts, rendezvous)
        self.workload = workload
        self.raw = peers.RawTwoFiles(workload)

    def save(self, folder: Path, step: int, durable: bool) -> None:
        (folder / str(step)).mkdir()
        self.raw.save(dict(flat(self.tree)), folder / str(step), durable)

    def begin_save(self, folder: Path, step: int, staging: str) -> Callable[[], Any]:
        (folder / str(step)).mkdir()
        copies = {name: array.copy() for name, array in flat(self.tree)}
        return lambda: peers.RawOneThread(self.workload).save(copies, folder / str(step), True)

    def restore(self, folder: Path, step: int, what: str) -> Any:
        return grouped(self.workload, self.raw.restore(folder / str(step)).items())


class Safetensors(_Arrays):
    """safetensors, one file a step."""

    title = "safetensors"

    def __init__(self, workload: Workload, host: int, hosts: int, rendezvous: Path) -> None:
        super().__init__(workload, host, hosts, rendezvous)
        import safetensors

        self.open: Any = safetensors.safe_open
        self.workload = workload
        self.files = peers.Safetensors(workload)

    def save(self, folder: Path, step: int, durable: bool) -> None:
        (folder / str(step)).mkdir()
        self.files.save(dict(flat(self.tree)), folder / str(step), durable)

    def restore(self, folder: Path, step: int, what: str) -> Any:
        if what == "same":
            return grouped(self.workload, self.files.restore(folder / str(step)).items())
        with self.open(folder / str(step) / "all.safetensors", "numpy") as file:
            return {"group0": {name: file.get_tensor(name) for name in self.tree["group0"]}}


class TStore(_Arrays):
    """`tstore.save`, `tstore.save_async` and `tstore.restore`."""

    title = "tstore"
    stagings = ("memory", "turns")

    def __init__(self, workload: Workload, host: int, hosts: int, rendezvous: Path) -> None:
        super().__init__(workload, host, hosts, rendezvous)
        import tstore.sync

        self.tstore: Any = tstore.sync

    def save(self, folder: Path, step: int, durable: bool) -> None:
        self.tstore.save(str(folder / "store"), self.tree, step, durability="fsync" if durable else "none")

    def begin_save(self, folder: Path, step: int, staging: str) -> Callable[[], Any]:
        saving = self.tstore.save_async(str(folder / "store"), self.tree, step, staging=staging)
        return saving.wait  # type: ignore[no-any-return]

    def restore(self, folder: Path, step: int, what: str) -> Any:
        only = "group0/**" if what == "tenth" else None
        return self.tstore.restore(str(folder / "store"), step, only=only)
