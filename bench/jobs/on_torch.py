"""Contenders that save tensors from two processes of a gloo process group.

A tensor of two dimensions is a `DTensor`, of which each process has half of the rows; the other layout has halves
of the columns. A tensor of one dimension is whole in both processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bench.jobs.states import Piece, Tree, flat, grouped, is_sharded, tenth
from bench.save.workloads import Workload


class _Job:
    """This process's part of the state."""

    processes = 2
    durabilities: ClassVar[tuple[bool, ...]] = (True, False)
    reshards = True
    parts = True

    def __init__(self, workload: Workload, host: int, hosts: int, rendezvous: Path) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed import tensor
        from torch.distributed.device_mesh import init_device_mesh

        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=host, world_size=hosts)
        self.torch: Any = torch
        self.tensor: Any = tensor
        self.mesh: Any = init_device_mesh("cpu", (hosts,))
        self.workload = workload
        self.host, self.hosts = host, hosts
        items = ((n, self._leaf(torch.from_numpy(x[self._index(0)].copy()), 0)) for n, x in workload.items())
        self.tree = grouped(workload, items)

    def values(self) -> Iterator[npt.NDArray[Any]]:
        for _, leaf in flat(self.tree):
            yield self._local(leaf).numpy()

    def wait_for_others(self) -> None:
        import torch.distributed as dist

        dist.barrier()

    def change_tenth(self) -> None:
        for _, leaf in flat(tenth(self.tree)):
            self._local(leaf).add_(1)

    def pieces(self, restored: Any) -> Iterator[Piece]:
        for name, leaf in flat(restored):
            local = self._local(leaf).numpy()
            yield name, self._index(int(local.shape[0] == self.workload.shape[0])), local

    def target(self, what: str) -> Tree:
        """Return tensors to restore into."""
        dim = int(what == "other")
        names = self.workload.names
        shape = np.empty(self.workload.shape, "V0")[self._index(dim)].shape
        tree = grouped(self.workload, ((name, None) for name in names))
        wanted = tenth(tree) if what == "tenth" else tree
        return {
            g: {name: self._leaf(self.torch.empty(shape), dim) for name in group} for g, group in wanted.items()
        }

    def _index(self, dim: int) -> tuple[slice, ...]:
        """Return the region that this process holds of an array sharded along a dimension."""
        index = [slice(0, n) for n in self.workload.shape]
        if is_sharded(self.workload):
            size = self.workload.shape[dim] // self.hosts
            index[dim] = slice(self.host * size, (self.host + 1) * size)
        return tuple(index)

    def _leaf(self, local: Any, dim: int) -> Any:
        if not is_sharded(self.workload):
            return local
        return self.tensor.DTensor.from_local(local, self.mesh, [self.tensor.Shard(dim)], run_check=False)

    def _local(self, leaf: Any) -> Any:
        return leaf.to_local() if is_sharded(self.workload) else leaf


class TStore(_Job):
    """`tstore.torch`."""

    title = "tstore.torch"
    stagings = ("memory", "turns")

    def __init__(self, workload: Workload, host: int, hosts: int, rendezvous: Path) -> None:
        super().__init__(workload, host, hosts, rendezvous)
        import tstore.sync.torch

        self.tstore: Any = tstore.sync.torch

    def save(self, folder: Path, step: int, durable: bool) -> None:
        self.tstore.save(str(folder / "store"), self.tree, step, durability="fsync" if durable else "none")

    def begin_save(self, folder: Path, step: int, staging: str) -> Callable[[], Any]:
        saving = self.tstore.save_async(str(folder / "store"), self.tree, step, staging=staging)
        return saving.wait  # type: ignore[no-any-return]

    def restore(self, folder: Path, step: int, what: str) -> Any:
        only = "group0/**" if what == "tenth" else None
        return self.tstore.restore(str(folder / "store"), step, target=self.target(what), only=only)


class CheckpointFiles(_Job):
    """`torch.distributed.checkpoint` with its own files and default planners."""

    title = "torch DCP"
    stagings = ("memory",)

    def __init__(self, workload: Workload, host: int, hosts: int, rendezvous: Path) -> None:
        super().__init__(workload, host, hosts, rendezvous)
        import torch.distributed.checkpoint

        self.dcp: Any = torch.distributed.checkpoint

    def save(self, folder: Path, step: int, durable: bool) -> None:
        writer = self.dcp.FileSystemWriter(folder / str(step), sync_files=durable)
        self.dcp.save(self.tree, storage_writer=writer)

    def begin_save(self, folder: Path, step: int, staging: str) -> Callable[[], Any]:
        future = self.dcp.async_save(self.tree, checkpoint_id=folder / str(step))
        return future.result  # type: ignore[no-any-return]

    def restore(self, folder: Path, step: int, what: str) -> Any:
        target = self.target(what)
        self.dcp.load(target, checkpoint_id=folder / str(step))
        return target
