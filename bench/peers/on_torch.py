"""States of tensors in two processes of a gloo process group: tstore and torch.distributed.checkpoint.

A tensor of two dimensions is a `DTensor`, of which each process has half of the rows; the other layout has halves
of the columns. A tensor of one dimension is whole in both processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from bench.contender import Contender, Piece
from bench.peers.tstore import TStore
from bench.workloads import Tree, Values, flat, tenth


class TorchState(Contender):
    """This process's part of the state."""

    processes = 2
    reshards = True
    parts = True

    def prepare(self) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed import tensor
        from torch.distributed.device_mesh import init_device_mesh

        meeting = f"file://{self.meeting}"
        dist.init_process_group("gloo", init_method=meeting, rank=self.number, world_size=self.count)
        self.torch: Any = torch
        self.tensor: Any = tensor
        self.mesh: Any = init_device_mesh("cpu", (self.count,))

    @cached_property
    def state(self) -> Tree:
        def leaf(values: Values) -> Any:
            return self._leaf(self.torch.from_numpy(values[self._index(0)].copy()), 0)

        return self.work.tree((name, leaf(x)) for name, x in self.work.items())  # type: ignore[no-any-return]

    def values(self) -> Iterator[Values]:
        for _, leaf in flat(self.state):
            yield self._local(leaf).numpy()

    def wait_for_others(self) -> None:
        self.torch.distributed.barrier()

    def change_tenth(self) -> None:
        for _, leaf in flat(tenth(self.state)):
            self._local(leaf).add_(1)

    def pieces(self, restored: Tree) -> Iterator[Piece]:
        for name, leaf in flat(restored):
            local = self._local(leaf).numpy()
            yield name, self._index(int(local.shape[0] == self.work.shape[0])), local

    def target(self, what: str) -> Tree:
        """Return tensors to restore into."""
        dim = int(what == "other")
        shape = [i.stop - i.start for i in self._index(dim)]
        tree = self.work.tree((name, None) for name in self.work.names)
        wanted = tenth(tree) if what == "tenth" else tree
        return {
            g: {name: self._leaf(self.torch.empty(shape), dim) for name in group} for g, group in wanted.items()
        }

    def _index(self, dim: int) -> tuple[slice, ...]:
        """Return the region that this process holds of an array sharded along a dimension."""
        index = [slice(0, n) for n in self.work.shape]
        if len(index) > 1:
            size = self.work.shape[dim] // self.count
            index[dim] = slice(self.number * size, (self.number + 1) * size)
        return tuple(index)

    def _leaf(self, local: Any, dim: int) -> Any:
        if local.ndim == 1:
            return local
        return self.tensor.DTensor.from_local(local, self.mesh, [self.tensor.Shard(dim)], run_check=False)

    def _local(self, leaf: Any) -> Any:
        return leaf if leaf.ndim == 1 else leaf.to_local()


class TStoreTorch(TorchState, TStore):
    """`tstore.torch`."""

    title = "tstore.torch"
    module = "tstore.sync.torch"

    def prepare(self) -> None:
        TorchState.prepare(self)
        TStore.prepare(self)

    def targets(self, what: str) -> dict[str, Any]:
        return {"target": self.target(what)}


class CheckpointFiles(TorchState):
    """`torch.distributed.checkpoint` with its own files and default planners."""

    title = "torch DCP"
    stagings = ("memory",)

    def prepare(self) -> None:
        super().prepare()
        import torch.distributed.checkpoint

        self.dcp: Any = torch.distributed.checkpoint

    def save(self, step: int, durable: bool) -> None:
        writer = self.dcp.FileSystemWriter(self.folder / str(step), sync_files=durable)
        self.dcp.save(self.state, storage_writer=writer)

    def begin_save(self, step: int, staging: str) -> Callable[[], Any]:
        return self.dcp.async_save(self.state, checkpoint_id=self.folder / str(step)).result  # type: ignore[no-any-return]

    def restore(self, step: int, what: str) -> Tree:
        target = self.target(what)
        self.dcp.load(target, checkpoint_id=self.folder / str(step))
        return target
