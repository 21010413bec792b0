"""States of `jax.Array`s in one process with 8 CPU devices: tstore, Orbax and tensorstore as Levanter uses it.

The mesh has the axes x and y. An array of two dimensions is sharded by both: it is saved from a mesh of 8×1
devices and restored on one of the same shape or of 1×8. An array of one dimension is whole on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bench.contender import Contender, Piece
from bench.peers.tstore import TStore
from bench.workloads import Tree, Values, flat, tenth

_DEVICES = 8


class JaxState(Contender):
    """The state on 8 devices."""

    durabilities = (True,)
    stagings = ("memory",)
    reshards = True
    parts = True

    def prepare(self) -> None:
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", _DEVICES)
        self.jax: Any = jax
        self.shardings = {"same": self._sharding(_DEVICES, 1), "other": self._sharding(1, _DEVICES)}

    @cached_property
    def state(self) -> Tree:
        sharding = self.shardings["same"]
        tree: Tree = self.work.tree((n, self.jax.device_put(x, sharding)) for n, x in self.work.items())
        return self.jax.block_until_ready(tree)  # type: ignore[no-any-return]

    def values(self) -> Iterator[Values]:
        for _, array in flat(self.state):
            for shard in array.addressable_shards:
                if shard.replica_id == 0:
                    yield np.asarray(shard.data)

    def change_tenth(self) -> None:
        for name, array in self.state["group0"].items():
            self.state["group0"][name] = array + 1
        self.jax.block_until_ready(self.state)

    def restore(self, step: int, what: str) -> Tree:
        return self.jax.block_until_ready(self.load(step, what))  # type: ignore[no-any-return]

    def load(self, step: int, what: str) -> Tree:
        """Restore, perhaps in the background."""
        raise NotImplementedError

    def pieces(self, restored: Tree) -> Iterator[Piece]:
        for name, array in flat(restored):
            for shard in array.addressable_shards:
                index = tuple(slice(*i.indices(n)[:2]) for i, n in zip(shard.index, array.shape, strict=True))
                yield name, index, np.asarray(shard.data)

    def target(self, what: str) -> Tree:
        """Return the abstract arrays that a restore takes as its target."""
        sharding = self.shardings["other" if what == "other" else "same"]
        leaf = self.jax.ShapeDtypeStruct(self.work.shape, np.float32, sharding=sharding)
        tree: Tree = self.work.tree((name, leaf) for name in self.work.names)
        return tenth(tree) if what == "tenth" else tree

    def _sharding(self, x: int, y: int) -> Any:
        mesh = self.jax.sharding.Mesh(np.array(self.jax.devices()).reshape(x, y), ("x", "y"))
        axes = ("x", "y") if len(self.work.shape) > 1 else ()
        return self.jax.sharding.NamedSharding(mesh, self.jax.sharding.PartitionSpec(*axes))


class TStoreJax(JaxState, TStore):
    """`tstore.jax`."""

    title = "tstore.jax"
    durabilities = (True, False)
    module = "tstore.sync.jax"

    def prepare(self) -> None:
        JaxState.prepare(self)
        TStore.prepare(self)

    def load(self, step: int, what: str) -> Tree:
        return TStore.restore(self, step, what)

    def targets(self, what: str) -> dict[str, Any]:
        return {"target": self.target(what)}


class Orbax(JaxState):
    """Orbax's `AsyncCheckpointer` of pytrees, with its defaults: ocdbt, compressed by zstd, files synced."""

    title = "Orbax"
    compressed = True

    def prepare(self) -> None:
        super().prepare()
        import orbax.checkpoint

        self.ocp: Any = orbax.checkpoint
        handler = self.ocp.PyTreeCheckpointHandler(use_compression=self.compressed)
        self.checkpointer = self.ocp.AsyncCheckpointer(handler)

    def save(self, step: int, durable: bool) -> None:
        self.begin_save(step, "memory")()

    def begin_save(self, step: int, staging: str) -> Callable[[], Any]:
        self.checkpointer.save(self.folder / str(step), args=self.ocp.args.PyTreeSave(self.state))
        return self.checkpointer.wait_until_finished  # type: ignore[no-any-return]

    def load(self, step: int, what: str) -> Tree:
        target = self.target(what)
        args = self.ocp.args.PyTreeRestore(
            target,
            restore_args=self.ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=what == "tenth",
        )
        return self.checkpointer.restore(self.folder / str(step), args=args)  # type: ignore[no-any-return]


class OrbaxUncompressed(Orbax):
    """`Orbax` without compression."""

    title = "Orbax, uncompressed"
    compressed = False


class Levanter(JaxState):
    """tensorstore as Levanter uses it: `jax.experimental.array_serialization`, zarr3 in ocdbt, files synced."""

    title = "tensorstore (Levanter)"

    def prepare(self) -> None:
        super().prepare()
        from jax.experimental.array_serialization import serialization

        self.specs: Any = serialization.get_tensorstore_spec
        self.manager: Any = serialization.GlobalAsyncCheckpointManager()

    def save(self, step: int, durable: bool) -> None:
        self.begin_save(step, "memory")()

    def begin_save(self, step: int, staging: str) -> Callable[[], Any]:
        arrays = dict(flat(self.state))
        self.manager.serialize(list(arrays.values()), self._specs(self.folder / str(step), arrays))
        return self.manager.wait_until_finished  # type: ignore[no-any-return]

    def load(self, step: int, what: str) -> Tree:
        target = dict(flat(self.target(what)))
        shardings = [leaf.sharding for leaf in target.values()]
        arrays = self.manager.deserialize(shardings, self._specs(self.folder / str(step), target))
        return {"": dict(zip(target, arrays, strict=True))}

    def _specs(self, folder: Path, names: Iterable[str]) -> list[Any]:
        return [self.specs(str(folder / name), driver="zarr3", ocdbt=True) for name in names]
