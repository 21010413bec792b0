"""Contenders that save `jax.Array`s from one process with 8 CPU devices.

The mesh has the axes x and y. An array of two dimensions is sharded by both: it is saved from a mesh of 8×1
devices and restored on one of the same shape or of 1×8. An array of one dimension is whole on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bench.jobs.states import Piece, Tree, flat, grouped, is_sharded, tenth
from bench.save.workloads import Workload

_DEVICES = 8


class _Job:
    """The state on 8 devices."""

    processes = 1
    stagings: ClassVar[tuple[str, ...]] = ("memory",)
    durabilities: ClassVar[tuple[bool, ...]] = (True,)
    reshards = True
    parts = True

    def __init__(self, workload: Workload, host: int, hosts: int, rendezvous: Path) -> None:
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", _DEVICES)
        self.jax: Any = jax
        self.workload = workload
        self.shardings = {"same": self._sharding(_DEVICES, 1), "other": self._sharding(1, _DEVICES)}
        items = workload.items()
        self.tree = grouped(workload, ((n, jax.device_put(x, self.shardings["same"])) for n, x in items))
        jax.block_until_ready(self.tree)

    def values(self) -> Iterator[npt.NDArray[Any]]:
        for _, array in flat(self.tree):
            for shard in array.addressable_shards:
                if shard.replica_id == 0:
                    yield np.asarray(shard.data)

    def wait_for_others(self) -> None:
        """The job has one process."""

    def change_tenth(self) -> None:
        for name, array in self.tree["group0"].items():
            self.tree["group0"][name] = array + 1
        self.jax.block_until_ready(self.tree)

    def pieces(self, restored: Any) -> Iterator[Piece]:
        for name, array in flat(restored):
            for shard in array.addressable_shards:
                index = tuple(slice(*i.indices(n)[:2]) for i, n in zip(shard.index, array.shape, strict=True))
                yield name, index, np.asarray(shard.data)

    def target(self, what: str) -> Tree:
        """Return the abstract arrays that a restore takes as its target."""
        shape, sharding = self.workload.shape, self.shardings["other" if what == "other" else "same"]
        leaf = self.jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
        tree = grouped(self.workload, ((name, leaf) for name in self.workload.names))
        return tenth(tree) if what == "tenth" else tree

    def _sharding(self, x: int, y: int) -> Any:
        mesh = self.jax.sharding.Mesh(np.array(self.jax.devices()).reshape(x, y), ("x", "y"))
        spec = self.jax.sharding.PartitionSpec(*("x", "y") if is_sharded(self.workload) else ())
        return self.jax.sharding.NamedSharding(mesh, spec)


class TStore(_Job):
    """`tstore.jax`."""

    title = "tstore.jax"
    durabilities = (True, False)

    def __init__(self, workload: Workload, host: int, hosts: int, rendezvous: Path) -> None:
        super().__init__(workload, host, hosts, rendezvous)
        import tstore.sync.jax

        self.tstore: Any = tstore.sync.jax

    def save(self, folder: Path, step: int, durable: bool) -> None:
        self.tstore.save(str(folder / "store"), self.tree, step, durability="fsync" if durable else "none")

    def begin_save(self, folder: Path, step: int, staging: str) -> Callable[[], Any]:
        return self.tstore.save_async(str(folder / "store"), self.tree, step).wait  # type: ignore[no-any-return]

    def restore(self, folder: Path, step: int, what: str) -> Any:
        only = "group0/**" if what == "tenth" else None
        restored = self.tstore.restore(str(folder / "store"), step, target=self.target(what), only=only)
        return self.jax.block_until_ready(restored)


class Orbax(_Job):
    """Orbax's `AsyncCheckpointer` of pytrees, with its defaults: ocdbt, compressed by zstd, files synced."""

    title = "Orbax"
    compressed = True

    def __init__(self, workload: Workload, host: int, hosts: int, rendezvous: Path) -> None:
        super().__init__(workload, host, hosts, rendezvous)
        import orbax.checkpoint

        self.ocp: Any = orbax.checkpoint
        self.checkpointer = self.ocp.AsyncCheckpointer(
            self.ocp.PyTreeCheckpointHandler(use_compression=self.compressed)
        )

    def save(self, folder: Path, step: int, durable: bool) -> None:
        self.begin_save(folder, step, "memory")()

    def begin_save(self, folder: Path, step: int, staging: str) -> Callable[[], Any]:
        self.checkpointer.save(folder / str(step), args=self.ocp.args.PyTreeSave(self.tree))
        return self.checkpointer.wait_until_finished  # type: ignore[no-any-return]

    def restore(self, folder: Path, step: int, what: str) -> Any:
        target = self.target(what)
        args = self.ocp.args.PyTreeRestore(
            target,
            restore_args=self.ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=what == "tenth",
        )
        return self.jax.block_until_ready(self.checkpointer.restore(folder / str(step), args=args))


class OrbaxUncompressed(Orbax):
    """`Orbax` without compression."""

    title = "Orbax, uncompressed"
    compressed = False


class Levanter(_Job):
    """tensorstore as Levanter uses it: `jax.experimental.array_serialization`, zarr3 in ocdbt, files synced."""

    title = "tensorstore (Levanter)"

    def __init__(self, workload: Workload, host: int, hosts: int, rendezvous: Path) -> None:
        super().__init__(workload, host, hosts, rendezvous)
        from jax.experimental.array_serialization import serialization

        self.specs: Any = serialization.get_tensorstore_spec
        self.manager: Any = serialization.GlobalAsyncCheckpointManager()

    def save(self, folder: Path, step: int, durable: bool) -> None:
        self.begin_save(folder, step, "memory")()

    def begin_save(self, folder: Path, step: int, staging: str) -> Callable[[], Any]:
        arrays = dict(flat(self.tree))
        self.manager.serialize(list(arrays.values()), self._specs(folder / str(step), arrays))
        return self.manager.wait_until_finished  # type: ignore[no-any-return]

    def restore(self, folder: Path, step: int, what: str) -> Any:
        target = dict(flat(self.target(what)))
        shardings = [leaf.sharding for leaf in target.values()]
        arrays = self.manager.deserialize(shardings, self._specs(folder / str(step), target))
        return {"": self.jax.block_until_ready(dict(zip(target, arrays, strict=True)))}

    def _specs(self, folder: Path, names: Iterable[str]) -> list[Any]:
        return [self.specs(str(folder / name), driver="zarr3", ocdbt=True) for name in names]
