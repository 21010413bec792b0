"""Export of checkpoints to folders of torch.distributed.checkpoint (DCP), with PyTorch's own writer.

The writer gets a state dict of meta tensors, which have no memory. It requests the values of each tensor only when
it writes that tensor.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.checkpoint.structure import join, path_part
from tstore.convert.exporting import ExportReport, ProgressCallback, snapshot_to_export
from tstore.convert.files import StrPath, refuse_existing
from tstore.convert.tree_export import ArrayLeaf, ArrayReader, tree_to_export
from tstore.core.data.casting import TORCH_DTYPES
from tstore.core.runtime.pool import run
from tstore.core.storage.local.atomic_file import new_folder
from tstore.core.storage.objects import mapped_errors
from tstore.core.store import Store, opened
from tstore.errors import InvalidArgument

__all__ = ["export_dcp"]

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


async def export_dcp(
    store: StrPath | Store,
    folder: StrPath,
    *,
    at: int | str | None = None,
    step: int | None = None,
    subtree: str = "",
    skip: Sequence[str] = (),
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
        snapshot, skipped = await snapshot_to_export(opened_store, at, step, skip)
        tree, arrays, left_out = await tree_to_export(snapshot, subtree)
        reader = ArrayReader(arrays, progress)
        refuse_existing(path)
        empty = await run(_write_folder, path, tree, reader)
    return ExportReport(snapshot.version, len(arrays), reader.total, 1, empty + left_out + skipped)


def _write_folder(path: str, tree: dict[Any, Any], reader: ArrayReader) -> list[str]:
    """Write the folder, and return the paths of the empty dicts, which DCP does not store."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    state_dict, leaves, empty = _with_tensors(tree)
    planner = _planner(leaves, reader)
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
    return empty


def _with_tensors(tree: dict[Any, Any]) -> tuple[dict[str, Any], dict[int, ArrayLeaf], list[str]]:
    """Return a state dict with meta tensors for leaves, each leaf by its tensor's id, and paths of empty dicts."""
    import torch

    leaves: dict[int, ArrayLeaf] = {}
    empty: list[str] = []

    def convert(value: Any, path: str) -> Any:
        match value:
            case ArrayLeaf():
                dtype = _torch_dtype(value.path, value.dtype)
                tensor = torch.empty(value.shape, dtype=dtype, device="meta")
                leaves[id(tensor)] = value
                return tensor
            case dict():
                entries = {str(key): convert(item, join(path, path_part(key))) for key, item in value.items()}
                empty.extend([] if value else [path])
                if len(entries) < len(value):
                    raise InvalidArgument(
                        f"a dict has the keys {', '.join(map(repr, value))}, of which several are the same as "
                        "text; rename them and save the checkpoint again"
                    )
                return entries
            case list() | tuple():
                count = len(empty)
                converted = [convert(item, join(path, str(i))) for i, item in enumerate(value)]
                # DCP finds tensors and dicts in lists only, and stores other tuples whole
                if isinstance(value, tuple) and all(map(operator.eq, map(id, converted), map(id, value))):
                    del empty[count:]
                    return value
                return converted
        return value

    return convert(tree, ""), leaves, empty


def _planner(leaves: dict[int, ArrayLeaf], reader: ArrayReader) -> Any:
    """Return a planner that takes the values of tensors from a reader."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import WriteItemType

    class Planner(DefaultSavePlanner):
        """A planner that reads the values of a tensor when the tensor is written."""

        def resolve_data(self, write_item: Any) -> Any:
            if write_item.type == WriteItemType.BYTE_IO:
                return super().resolve_data(write_item)
            tensor = self.lookup_object(write_item.index)
            return _tensor_of(reader.read(leaves[id(tensor)]), tensor.dtype)

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
