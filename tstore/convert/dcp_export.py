"""Export of checkpoints to folders of torch.distributed.checkpoint (DCP), with PyTorch's own writer.

The writer gets a state dict of meta tensors, which have no memory. It requests the values of each tensor only when
it writes that tensor.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.checkpoint.structure import unflatten
from tstore.convert.exporting import ExportReport, ProgressCallback, snapshot_to_export
from tstore.convert.files import StrPath, refuse_existing
from tstore.convert.names import attributes_in, below, subtree_of
from tstore.core.array import Array
from tstore.core.data.casting import TORCH_DTYPES
from tstore.core.format.tree_document import TreeDocument, host_places
from tstore.core.runtime.pool import run
from tstore.core.snapshot import Snapshot
from tstore.core.storage.local.atomic_file import new_folder
from tstore.core.storage.objects import mapped_errors
from tstore.core.store import Store, opened
from tstore.errors import InvalidArgument, parsing

__all__ = ["export_dcp"]

ReadArray = Callable[[str], npt.NDArray[Any]]

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


async def export_dcp(
    store: StrPath | Store,
    folder: StrPath,
    *,
    at: int | str | None = None,
    step: int | None = None,
    subtree: str = "",
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write a checkpoint, or its part `subtree`, to a new folder that torch.distributed.checkpoint loads.

    Return a summary. The tree becomes a state dict: tuples of arrays are lists there, and keys are text. One
    tensor at a time is in memory. Raise `InvalidArgument` (PyTorch is not installed, or lacks a dtype; two
    leaves have the same name; the tree is not a dict), `AlreadyExists`, and the errors of reading.
    """
    path = os.fspath(folder)
    try:
        import torch  # noqa: F401 - the writer is PyTorch's
    except ImportError as error:
        raise InvalidArgument(f"{path}: a DCP folder is written by PyTorch; run pip install torch") from error
    async with opened(store, "r") as opened_store:
        snapshot = await snapshot_to_export(opened_store, at, step)
        document, paths = subtree_of(snapshot, subtree)
        arrays = {leaf: await snapshot.array(leaf) for leaf in paths}
        total, done = sum(array.nbytes for array in arrays.values()), 0
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def read(leaf: str) -> npt.NDArray[Any]:
            nonlocal done
            if task is not None and task.cancelling():  # the cancelled task waits for this call to end
                raise asyncio.CancelledError
            work: Coroutine[Any, Any, npt.NDArray[Any]] = arrays[leaf].read()
            values = np.ascontiguousarray(asyncio.run_coroutine_threadsafe(work, loop).result())
            done += values.nbytes
            if progress is not None:
                loop.call_soon_threadsafe(progress, done, total)
            return values.reshape(arrays[leaf].shape)

        refuse_existing(path)
        await run(_write_folder, path, _state_dict(snapshot, document, subtree, arrays), read)
    return ExportReport(snapshot.version, len(arrays), total, 1, attributes_in(snapshot, subtree))


class _Leaf:
    """An array of the checkpoint, in the place of the state dict where its tensor will be."""

    def __init__(self, path: str, array: Array) -> None:
        self.path, self.array = path, array

    def __getitem__(self, key: tuple[()]) -> _Leaf:  # `unflatten` indexes a 0-d array with ()
        return self


def _state_dict(
    snapshot: Snapshot, document: TreeDocument | None, subtree: str, arrays: dict[str, Array]
) -> dict[Any, Any]:
    """Return the tree of a checkpoint with `_Leaf` in place of arrays; raise `InvalidArgument` if not a dict."""
    leaves: dict[str, Any] = {path: _Leaf(path, array) for path, array in arrays.items()}
    if document is None:
        return {below(path, subtree): leaf for path, leaf in leaves.items()}
    for path, place in host_places(leaves).items():  # the bytes of each host, by their names
        leaves.setdefault(place, {})[path.rpartition("/")[2]] = leaves[path]
    with parsing(f"version {snapshot.version}: its structure"):
        tree = unflatten(document, leaves)
    if not isinstance(tree, dict):
        what = "one array" if isinstance(tree, _Leaf) else f"a {type(tree).__name__}"
        raise InvalidArgument(
            f"version {snapshot.version} is {what}, but a state dict is a dict; save the tree in a dict"
        )
    return tree


def _write_folder(path: str, tree: dict[Any, Any], read: ReadArray) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    state_dict, paths = _with_tensors(tree)
    planner = _planner(paths, read)
    with mapped_errors("write", path), new_folder(path) as temporary:
        writer = FileSystemWriter(temporary)
        try:
            planner.set_up_planner(state_dict, writer.storage_meta(), is_coordinator=True)
        except ValueError as error:  # two values get one name
            raise InvalidArgument(f"{path}: {error}; rename the keys and save the checkpoint again") from error
        writer.set_up_storage_writer(True)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([plan])
        [plan] = writer.prepare_global_plan(plans)
        results = writer.write_data(planner.finish_plan(plan), planner)
        writer.finish(metadata, [results.wait()])


def _with_tensors(tree: dict[Any, Any]) -> tuple[dict[str, Any], dict[int, str]]:
    """Return a state dict with meta tensors in place of leaves, and the path of each by the tensor's id."""
    import torch

    paths: dict[int, str] = {}

    def convert(value: Any) -> Any:
        match value:
            case _Leaf():
                dtype = _torch_dtype(value.path, value.array.dtype)
                tensor = torch.empty(value.array.shape, dtype=dtype, device="meta")
                paths[id(tensor)] = value.path
                return tensor
            case dict():
                entries = {str(key): convert(item) for key, item in value.items()}
                if len(entries) < len(value):
                    raise InvalidArgument(
                        f"a dict has the keys {', '.join(map(repr, value))}, of which several are the same as "
                        "text; rename them and save the checkpoint again"
                    )
                return entries
            case list() | tuple():
                converted = [convert(item) for item in value]
                unchanged = all(new is old for new, old in zip(converted, value, strict=True))
                # DCP finds tensors in lists only
                return value if unchanged and isinstance(value, tuple) else converted
        return value

    return convert(tree), paths


def _planner(paths: dict[int, str], read: ReadArray) -> Any:
    """Return a planner that takes the values of tensors from `read`."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import WriteItemType

    class Planner(DefaultSavePlanner):
        """A planner that reads the values of a tensor when the tensor is written."""

        def resolve_data(self, write_item: Any) -> Any:
            if write_item.type == WriteItemType.BYTE_IO:
                return super().resolve_data(write_item)
            tensor = self.lookup_object(write_item.index)
            return _tensor_of(read(paths[id(tensor)]), tensor.dtype)

    return Planner()


def _torch_dtype(path: str, dtype: np.dtype[Any]) -> Any:
    """Return the torch dtype of a NumPy dtype; raise `InvalidArgument` if there is none."""
    import torch

    torch_dtype = getattr(torch, _NAMES.get(dtype, ""), None)
    if torch_dtype is None:
        raise InvalidArgument(f"{path} is {dtype}, which PyTorch {torch.__version__} lacks; convert it first")
    return torch_dtype


def _tensor_of(array: npt.NDArray[Any], dtype: Any) -> Any:
    """Return a tensor of this dtype with the bytes of a contiguous array, in the same memory."""
    import torch

    flat = array.reshape(-1).view(np.uint8)
    if not flat.size:
        return torch.empty(array.shape, dtype=dtype)
    return torch.from_numpy(flat).view(dtype).reshape(array.shape)
