"""Export checkpoints to Orbax, with Orbax's own writer.

The folder is that of a step of `orbax.checkpoint.CheckpointManager`: the tree is the item `default`, and the
metrics of the step are the item `metrics`. The writer gets a tree with `ArrayLeaf` in place of arrays, and reads
one at a time. Typed PRNG keys are arrays of JAX there, because only for these does Orbax store an implementation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tstore.checkpoint.structure import join, path_part
from tstore.convert.exporting import ExportReport, ProgressCallback, snapshot_to_export
from tstore.convert.files import StrPath, fsync_files, refuse_existing
from tstore.convert.skipping import pruned
from tstore.convert.tree_export import ArrayLeaf, ArrayReader, NumberLeaf, tree_to_export
from tstore.core.format.tree_document import IMPL
from tstore.core.runtime.pool import run
from tstore.core.steps import saved_steps
from tstore.core.storage.local.atomic_file import new_folder
from tstore.core.storage.objects import mapped_errors
from tstore.core.store import Store, opened
from tstore.errors import InvalidArgument, bullet_list

__all__ = ["export_orbax"]

_TREE, _METRICS = "default", "metrics"
"""The names of a step's items, as `CheckpointManager` gives them."""

_CHUNK = 64 << 20  # bytes; a restore in another sharding reads whole chunks


async def export_orbax(
    store: StrPath | Store,
    folder: StrPath,
    *,
    at: int | str | None = None,
    step: int | None = None,
    subtree: str = "",
    skip: Sequence[str] = (),
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write a checkpoint, or its part `subtree`, to a new folder that Orbax restores; return a summary.

    The folder is one step: if its name is a number, a `CheckpointManager` of the folder above restores it, and a
    `StandardCheckpointer` restores `folder/default`. Keys become text, and classes dicts. One array at a time is
    in memory.

    Raise `InvalidArgument` if Orbax can't store values of the tree, with the paths of all of them; `skip` leaves
    out those that match these patterns. Raise it also if Orbax is not installed. Raise `AlreadyExists`, and the
    errors of reading.
    """
    path = os.fspath(folder)
    try:
        import orbax.checkpoint  # noqa: F401 - the writer is Orbax's
    except ImportError as error:
        raise InvalidArgument(
            f"{path}: an Orbax checkpoint is written by Orbax; run pip install orbax-checkpoint"
        ) from error
    async with opened(store, "r") as opened_store:
        snapshot, _ = await snapshot_to_export(opened_store, at, step, ())
        tree, arrays, left_out = await tree_to_export(snapshot, subtree)
        kept = pruned(tree, skip, subtree)
        if kept.unused:
            raise InvalidArgument(f"{snapshot.location}: skip={kept.unused} matches no path; correct it")
        reader = ArrayReader(arrays, progress)
        metrics = next((s.metrics for s in await saved_steps(opened_store) if s.version == snapshot.version), {})
        refuse_existing(path)
        exported = await run(_write_folder, path, kept.tree, reader, metrics)
    return ExportReport(snapshot.version, len(exported), reader.total, 1, kept.skipped + left_out)


def _write_folder(path: str, tree: Any, reader: ArrayReader, metrics: Mapping[str, float]) -> list[ArrayLeaf]:
    """Write the folder, and return the arrays that are in it."""
    import jax
    import orbax.checkpoint as ocp

    conversion = _Conversion(reader)
    converted = conversion.node(tree, "", "")
    if not conversion.names:
        conversion.refuse("the tree", "has no values")
    if conversion.faults:
        raise InvalidArgument(
            f"{path}: Orbax can't store values of this checkpoint; convert them, or leave them out with "
            f"skip=… (--skip):{bullet_list(conversion.faults)}"
        )
    reader.total = sum(leaf.array.nbytes for leaf in conversion.exported)  # without what is skipped
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK), converted)
    items: dict[str, Any] = {_TREE: ocp.args.PyTreeSave(converted, save_args=save_args)}
    unread: list[BaseException] = []
    type_handlers = _type_handlers(reader, unread)
    handlers: dict[str, Any] = {_TREE: ocp.PyTreeCheckpointHandler(type_handler_registry=type_handlers)}
    if metrics:
        items[_METRICS] = ocp.args.JsonSave(dict(metrics))
        handlers[_METRICS] = ocp.JsonCheckpointHandler(_METRICS)
    with mapped_errors("write", path), new_folder(path) as temporary:
        written = os.path.join(temporary, "step")
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as checkpointer:
            try:
                checkpointer.save(written, args=ocp.args.Composite(**items))
            finally:
                if unread:
                    raise unread[0]
        for name in os.listdir(written):
            os.rename(os.path.join(written, name), os.path.join(temporary, name))
        os.rmdir(written)
        fsync_files(temporary)
    return conversion.exported


class _Conversion:
    """The conversion of a tree to one that Orbax stores; `faults` lists what Orbax can't store.

    `names` has the path of each value by the name under which Orbax stores it.
    """

    def __init__(self, reader: ArrayReader) -> None:
        self.exported: list[ArrayLeaf] = []
        self.faults: list[str] = []
        self.names: dict[str, str] = {}
        self._reader = reader
        self._dtype_faults: dict[np.dtype[Any], str] = {}

    def refuse(self, path: str, reason: str) -> None:
        self.faults.append(f"{path}: {reason}")

    def node(self, value: Any, path: str, name: str) -> Any:
        """Return a node of the tree for Orbax."""
        match value:
            case dict() if len(value) == 1 and (key := self._typed_key(value, path, name)) is not None:
                return key
            case dict():
                entries = {
                    str(k): self.node(v, join(path, path_part(k)), _below(name, k)) for k, v in value.items()
                }
                if len(entries) < len(value):
                    self.refuse(path or "the tree", f"several of the keys {list(value)!r:.100} are equal as text")
                return entries
            case list() | tuple():
                return type(value)(self.node(v, join(path, str(i)), _below(name, i)) for i, v in enumerate(value))
            case None:
                return None
        self._claim(name, path)
        fault = self._array_fault(value) if isinstance(value, ArrayLeaf) else _scalar_fault(value, name)
        if fault:
            self.refuse(path, fault)
        elif isinstance(value, ArrayLeaf):
            self.exported.append(value)
        return value

    def _typed_key(self, node: Mapping[Any, Any], path: str, name: str) -> Any:
        """Return the array of JAX for typed PRNG keys, None for another dict."""
        import jax

        [(key, leaf)] = node.items()
        if not (isinstance(key, str) and key.startswith(IMPL) and isinstance(leaf, ArrayLeaf)):
            return None
        self._claim(name, path)
        self.exported.append(leaf)
        try:
            return jax.random.wrap_key_data(
                jax.numpy.asarray(self._reader.read(leaf)), impl=key.removeprefix(IMPL)
            )
        except (ValueError, TypeError) as error:
            self.refuse(path, f"JAX does not know these PRNG keys ({error!s:.100})")
            return None

    def _claim(self, name: str, path: str) -> None:
        if (other := self.names.setdefault(name, path)) != path:
            self.refuse(path, f"Orbax would store it under the name {name!r}, as {other}")

    def _array_fault(self, leaf: ArrayLeaf) -> str:
        if 0 in leaf.shape:
            return f"an array of shape {list(leaf.shape)}, without elements"
        if leaf.dtype not in self._dtype_faults:
            self._dtype_faults[leaf.dtype] = _dtype_fault(leaf.dtype)
        return self._dtype_faults[leaf.dtype]


def _below(name: str, key: Any) -> str:
    """Return the name that Orbax gives to a value at a key of the container with a name."""
    return f"{name}.{key}" if name else str(key)


def _scalar_fault(value: Any, name: str) -> str:
    """Return why Orbax can't store a Python scalar; "" if it can."""
    if isinstance(value, bool | float):
        return ""
    if isinstance(value, int):
        return "" if -(1 << 63) <= value < 1 << 64 else "an integer of more than 64 bits"
    if isinstance(value, str):
        return "text at a key with '/' or '~'" if {"/", "~"} & set(name) else ""
    return f"a Python scalar of type {type(value).__name__}"


def _dtype_fault(dtype: np.dtype[Any]) -> str:
    """Return why Orbax can't store arrays of a dtype; "" if it can."""
    import tensorstore

    spec = {"driver": "zarr", "kvstore": {"driver": "memory"}}
    try:
        tensorstore.open(spec, dtype=tensorstore.dtype(dtype), shape=(1,), create=True).result()
    except (TypeError, ValueError):
        return f"an array of {dtype}, which TensorStore does not write"
    return ""


def _type_handlers(reader: ArrayReader, unread: list[BaseException]) -> Any:
    """Return Orbax's handlers of values, with some that read the arrays of the checkpoint.

    The error of an array that can't be read is put into `unread`, because after an error of a handler other
    threads of Orbax would still write when `save` has returned.
    """
    import jax
    from orbax.checkpoint import type_handlers

    class ArrayLeafHandler(type_handlers.NumpyHandler):  # type: ignore[misc] # Orbax has no types
        """Writes arrays one at a time, so that only one is in memory."""

        def __init__(self, stored_type: str) -> None:
            super().__init__(deepcopy_host_arrays=False)
            self._stored_type = stored_type

        def typestr(self) -> str:
            return self._stored_type

        async def serialize(self, leaves: Any, infos: Any, args: Any = None) -> Sequence[Any]:
            for leaf, info, arg in zip(leaves, infos, args, strict=True):
                try:
                    values = reader.read(leaf)
                except BaseException as error:
                    unread.append(error)
                    break
                for written in await super().serialize([values], [info], [arg]):
                    written.result()
            return []

    own = ((NumberLeaf, ArrayLeafHandler("scalar")), (ArrayLeaf, ArrayLeafHandler("np.ndarray")))
    orbax = [(kind, type_handlers.get_type_handler(kind)) for kind in (int, float, str, jax.Array)]
    return type_handlers.create_type_handler_registry(*orbax, *own)
