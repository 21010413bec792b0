"""The storage of DCP's loads: each process reads exactly the regions that its plan names."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from torch.serialization import safe_globals
from torch.torch_version import TorchVersion

from tstore.checkpoint.request import Request
from tstore.checkpoint.source import Source
from tstore.core.data.pieces import ReadJob
from tstore.core.data.reader import new_values
from tstore.core.format.arguments import quote
from tstore.core.format.arrays.grid import Selection
from tstore.core.runtime.event_loops import BACKGROUND
from tstore.core.snapshot import Snapshot
from tstore.core.steps import check_one_version, chosen_snapshot
from tstore.core.store import open
from tstore.errors import InvalidArgument, Unavailable, bullet_list
from tstore.torch.dcp.identifiers import is_step, step_from
from tstore.torch.restore import pickled_paths
from tstore.torch.tensors import numpy_dtype, overlapping, shares_elements, torch_dtype, values_of

__all__ = ["Reader"]

_EVERYTHING = Request(None, None, None, "error")
_FIRST_SAFE_TORCH = "2.10"  # before, torch.load(weights_only=True) ran code of crafted pickles


class Reader(StorageReader):
    """Loads a checkpoint with `dcp.load(state_dict, storage_reader=Reader(url))`, by default the newest step.

    It loads checkpoints of `dcp.save` with a `Writer`, of `tstore.torch.save`, and any other whose dtypes torch
    has, but not the values of a `PerHost`, which `tstore.torch.restore` restores. All processes load the version
    that the coordinator chooses, even if a newer step is saved meanwhile.

    `set_state_dict` of PyTorch casts the state of an optimizer to the dtypes of its parameters: it rounds float32
    moments and masters of bfloat16 parameters. `tstore.torch.restore(url, target={"model": model, "optimizer":
    optimizer})` restores the same checkpoints into the objects exactly.

    Parameters
    ----------
    store, step, at
        As in `tstore.torch.restore`; the store is a URL or a path.
    pickles
        "trusted" loads pickled objects that may run code, "safe" refuses them.
    dtype
        "target" casts floating-point tensors to the dtypes of the state dict, as DCP's own readers do. Without
        it, a tensor of another dtype than the saved one is refused; other dtypes than floats always are, because
        DCP would cast 300.3 to a uint8 of 44.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        step: int | None = None,
        *,
        at: int | str | None = None,
        pickles: Literal["safe", "trusted"] = "safe",
        dtype: Literal["target"] | None = None,
    ) -> None:
        check_one_version(step, at)
        if pickles not in ("safe", "trusted"):
            raise InvalidArgument(f"pickles={quote(pickles)}: expected 'safe' or 'trusted'")
        if dtype not in (None, "target"):
            raise InvalidArgument(f"dtype={quote(dtype)}: expected None or 'target'")
        self._pickles = pickles
        self._dtype = dtype
        self._url = store
        self._step = step
        self._at = at
        self._paths: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        self._version = 0
        self._metadata = Metadata({})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether an identifier is that of a step."""
        return is_step(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load; `checkpoint_id` names its step, such as "100", in place of the constructor's."""
        if checkpoint_id is not None:
            self._step, self._at = step_from(checkpoint_id), None

    def read_metadata(self) -> Metadata:
        """Return DCP's metadata of the checkpoint, with each tensor as one chunk."""
        return BACKGROUND.run(self._read_metadata())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `read_metadata` has chosen the version."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Add to each plan the version that the coordinator has chosen."""
        return [dataclasses.replace(plan, storage_data=self._version) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this process into their tensors."""
        BACKGROUND.run(self._read(plan, planner))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    async def _read_metadata(self) -> Metadata:
        async with await open(self._url, "r") as store:
            snapshot = await chosen_snapshot(store, self._step, self._at)
            return self._load_metadata(await Source.read(snapshot, _EVERYTHING))

    def _load_metadata(self, source: Source) -> Metadata:
        """Return DCP's metadata of a version, and prepare to read this version."""
        pickled = pickled_paths(source.snapshot)
        placeholders: dict[str, _Placeholder] = {}
        for path in source.stored:
            meta = source.node(path).meta
            tensor = torch.empty(meta.shape, dtype=torch_dtype(path, meta.dtype), device="meta")
            placeholders[path] = _Placeholder(tensor)
        tree = _with_tensors(source.unflatten(placeholders))
        values, keys = _flat(source.snapshot.location, tree)
        path_of = {id(placeholder.tensor): path for path, placeholder in placeholders.items()}
        self._version = source.snapshot.version
        self._paths = {name: path_of[id(value)] for name, value in values.items() if id(value) in path_of}
        self._values = {name: value for name, value in values.items() if name not in self._paths}
        state_dict_metadata = {
            name: BytesStorageMetadata()
            if name in self._values or self._paths[name] in pickled
            else _tensor_metadata(value)
            for name, value in values.items()
        }
        self._metadata = Metadata(state_dict_metadata, planner_data=keys)
        return self._metadata

    async def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        pickles = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        async with await open(self._url, "r") as store:
            snapshot = await store.snapshot(self._version if plan.storage_data is None else plan.storage_data)
            if snapshot.version != self._version:
                await self._change_version(snapshot, {item.storage_index.fqn for item in plan.items})
            nodes = snapshot.tree.nodes
            read = {self._paths[item.storage_index.fqn] for item in plan.items if self._is_array(item)}
            await snapshot.read_nodes(read)
            paths = [self._paths[item.storage_index.fqn] for item in pickles if self._is_array(item)]
            stored = {path: new_values(path, nodes[path].meta.shape, nodes[path].meta.dtype) for path in paths}
            jobs = [ReadJob.of(nodes[path], out) for path, out in stored.items()]
            filled = []
            resolved = {str(number): planner.resolve_tensor(item) for number, item in enumerate(tensors)}
            shared = overlapping(resolved)
            self._check_dtypes(snapshot, tensors, resolved.values())
            for item, (number, tensor) in zip(tensors, resolved.items(), strict=True):
                path = self._paths[item.storage_index.fqn]
                local = _local(path, tensor, nodes[path].meta.dtype, number in shared)
                filled.append((item, tensor, local))
                if local.numel():
                    jobs.append(ReadJob.of(nodes[path], values_of(path, local), _selection(item)))
            await snapshot.read_jobs(jobs)
        for item in pickles:
            name = item.storage_index.fqn
            if not self._is_array(item):
                stream = _pickled(_checked_value(name, self._values[name]))
            else:
                stream = io.BytesIO(stored[self._paths[name]].data)
                if self._pickles == "safe":  # the planner unpickles without checks
                    stream = _pickled(_loaded(name, stream))
            planner.load_bytes(item, stream)
        for item, tensor, local in filled:
            if local.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(local)
            planner.commit_tensor(item, tensor)

    def _check_dtypes(
        self, snapshot: Snapshot, items: Iterable[ReadItem], tensors: Iterable[torch.Tensor]
    ) -> None:
        """Raise `InvalidArgument`, naming all paths, for tensors to which the stored values would be cast."""
        mismatched: dict[str, str] = {}
        request = Request(None, None, self._dtype, "error")
        for item, tensor in zip(items, tensors, strict=True):
            path = self._paths[item.storage_index.fqn]
            stored, wanted = snapshot.tree.nodes[path].meta.dtype, numpy_dtype(path, tensor.dtype)
            if request.dtype(path, stored, wanted) != wanted:
                mismatched[path] = f"{path}: stored {stored}, target {wanted}"
        if mismatched:
            raise InvalidArgument(
                f"the state dict does not match {snapshot.location}: {len(mismatched)} tensors have another dtype;"
                " pass Reader(…, dtype='target') to cast floats to floats, and convert others after loading:"
                f"{bullet_list(list(mismatched.values()))}"
            )

    async def _change_version(self, snapshot: Snapshot, names: set[str]) -> None:
        """Prepare to read the coordinator's version with a plan for the version that this process saw.

        Raise `Unavailable` if they differ in the shape, dtype or type of any of these values.
        """
        seen, version = self._metadata.state_dict_metadata, self._version
        chosen = self._load_metadata(await Source.read(snapshot, _EVERYTHING)).state_dict_metadata
        if differing := sorted(name for name in names if chosen.get(name) != seen[name]):
            raise Unavailable(
                f"{self._url}: version {version} was committed while the processes began to load version "
                f"{snapshot.version}, which has values of other types or shapes; load again, or pass a step to "
                f"Reader:{bullet_list(differing)}"
            )

    def _is_array(self, item: ReadItem) -> bool:
        return item.storage_index.fqn in self._paths


def _local(path: str, tensor: torch.Tensor, stored: np.dtype[Any], shared: bool) -> torch.Tensor:
    """Return a CPU tensor of the stored dtype to read into: this one, or a new one to copy from afterwards.

    Values are read into a tensor only if its memory has exactly its values, and is not `shared` with another one,
    such as a tied weight.
    """
    tensor = tensor.detach()
    is_plain = tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg() or shares_elements(tensor))
    if is_plain and not shared and numpy_dtype(path, tensor.dtype) == stored:
        return tensor
    return torch.empty(tensor.shape, dtype=torch_dtype(path, stored))


def _selection(item: ReadItem) -> Selection:
    """Return the region of the stored tensor that an item reads."""
    start = item.storage_index.offset or torch.Size([0] * len(item.lengths))
    return Selection(
        tuple(range(a + b, a + b + n) for a, b, n in zip(start, item.storage_offsets, item.lengths, strict=True))
    )


def _tensor_metadata(tensor: torch.Tensor) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * tensor.ndim), sizes=tensor.shape)
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [whole])


def _checked_value(name: str, value: Any) -> Any:
    """Return a non-tensor value; raise `InvalidArgument` for tensors in a tuple, which DCP can't load."""
    if isinstance(value, tuple) and any(isinstance(v, torch.Tensor) for v in value):
        raise InvalidArgument(f"{name}: DCP can't load tensors in a tuple; restore it with tstore.torch.restore")
    return value


def _pickled(value: Any) -> io.BytesIO:
    """Return a value that is not a tensor, as DCP pickles it."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def _loaded(name: str, stream: io.BytesIO) -> Any:
    """Return the value of a pickle; raise `InvalidArgument` if unpickling it could run code."""
    if TorchVersion(torch.__version__) < _FIRST_SAFE_TORCH:
        raise InvalidArgument(
            f"{name}: a pickled object, which can run code when PyTorch {torch.__version__} loads it "
            f"(CVE-2025-32434, CVE-2026-24747); install PyTorch {_FIRST_SAFE_TORCH} or newer, or pass "
            "Reader(…, pickles='trusted') if you trust all who can write to this store"
        )
    try:
        with safe_globals([io.BytesIO]):  # has no code, and modules have extra states in it
            return torch.load(stream, weights_only=True)
    except Exception as error:  # unpickling arbitrary data can raise any exception
        raise InvalidArgument(
            f"{name}: a pickled object that may run code when it is loaded; pass Reader(…, pickles='trusted') "
            "if you trust all who can write to this store"
        ) from error


class _Placeholder:
    """A placeholder for an array in the tree of a checkpoint: a tensor without memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, key: tuple[()]) -> _Placeholder:  # `unflatten` indexes a 0-d array with ()
        return self


def _flat(location: str, tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of a tree by DCP's names for them, and the keys that lead to each value."""
    planner = DefaultSavePlanner()
    try:
        planner.set_up_planner(tree)
    except (ValueError, AttributeError) as error:  # two values with one name, or no dict
        raise InvalidArgument(
            f"{location} is not a state dict that DCP can load ({error}); restore it with tstore.torch.restore"
        ) from error
    return planner.state_dict, planner.mappings


def _with_tensors(tree: Any) -> Any:
    """Return the tree with tensors for placeholders, and the parameters of an optimizer as lists, as in DCP."""
    if isinstance(tree, _Placeholder):
        return tree.tensor
    if isinstance(tree, list | tuple):
        return type(tree)(_with_tensors(value) for value in tree)
    if not isinstance(tree, Mapping):
        return tree
    names = tree.get("params")
    if "lr" in tree and isinstance(names, Mapping) and all(value is None for value in names.values()):
        tree = {**tree, "params": list(names)}
    return {key: _with_tensors(value) for key, value in tree.items()}
