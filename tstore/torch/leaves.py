"""Trees of tensors as trees of NumPy arrays and `Shards`, which the core saves and restores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from tstore.checkpoint.leaves import NO_LEAF, Destination, HostValues, PerHost, Shards
from tstore.checkpoint.per_host import naming
from tstore.checkpoint.replicated import REPLICA_WHOLE, array_checksum
from tstore.checkpoint.structure import flatten, unflatten_like
from tstore.core.runtime.budget import prefer_huge_pages
from tstore.errors import InvalidArgument
from tstore.sharding import Index
from tstore.torch.dtensors import is_dtensor, layout_of, local_tensor
from tstore.torch.tensors import (
    checked_dtype,
    empty_on_host,
    host_values,
    numpy_dtype,
    overlapping,
    same_bits,
    samples_of,
    shares_elements,
    tensor_from_values,
    values_of,
)

__all__ = ["Target", "TreeValues", "restored_value", "to_values"]


class TreeValues(NamedTuple):
    """The values of a tree in this process, with a NumPy array for each tensor, and `Shards` for each DTensor.

    `teams` has the team of each DTensor by path. `copied` says whether no array shares the memory of its tensor.
    """

    tree: Any
    teams: dict[str, int]
    copied: bool


def to_values(tree: Any) -> TreeValues:
    """Return the part of a tree that this process saves; arrays share the memory of tensors on the CPU.

    Raise `InvalidArgument`, naming the path, for a tensor whose values can't be stored.
    """
    _, leaves = flatten(tree)
    layouts = {path: layout_of(path, leaf) for path, leaf in leaves.items() if is_dtensor(leaf)}
    tensors = {
        path: local_tensor(leaf) if path in layouts else leaf
        for path, leaf in leaves.items()
        if isinstance(leaf, torch.Tensor) and (path not in layouts or layouts[path].writes)
    }
    results: dict[str, Any] = host_values(tensors)
    for path, layout in layouts.items():
        dtype = numpy_dtype(path, leaves[path].dtype)
        parts = (
            [(whole, results[path][_view_index(local)]) for whole, local in layout.parts] if layout.writes else []
        )
        results[path] = Shards(layout.shape, dtype, parts, shard_shape=layout.shard_shape)
    replicas = [path for path, layout in layouts.items() if layout.is_replica]
    samples_by_path = {path: samples_of(local_tensor(leaves[path]), REPLICA_WHOLE) for path in replicas}
    for path, samples in host_values(samples_by_path).items():
        results[path].replica_checksum = array_checksum(samples)
    for path, leaf in leaves.items():
        if isinstance(leaf, PerHost):
            with naming(path):
                results[path] = PerHost(to_values(leaf.value).tree)
    copied = all(isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" for leaf in leaves.values())
    teams = {path: layout.team for path, layout in layouts.items()}
    return TreeValues(unflatten_like(tree, results, {}), teams, copied)


def restored_value(path: str, value: Any, own: Any = None) -> Any:
    """Return what the core restores at a path with a tensor for each NumPy array, which shares the array's memory.

    An array of a `PerHost` stays one if `own`, the target's value there, has an array in its place.
    """
    if isinstance(value, PerHost):
        return PerHost(_with_tensors(value.value, own))
    return (
        HostValues(map(_with_tensors, value)) if isinstance(value, HostValues) else tensor_from_values(path, value)
    )


def _with_tensors(tree: Any, own: Any = None) -> Any:
    kept = {path for path, leaf in flatten(own)[1].items() if isinstance(leaf, np.ndarray)}
    leaves = {path: leaf for path, leaf in flatten(tree)[1].items() if path not in kept}
    return unflatten_like(tree, {path: tensor_from_values(path, leaf) for path, leaf in leaves.items()}, {})


class Target:
    """A tree of tensors into which a checkpoint is restored.

    `tree` has, in place of each tensor whose path `matches`, the regions to read and their destinations: the
    tensor's own memory, or memory on the host if the tensor is on another device, is lazily conjugated or negated,
    or shares memory with another one. A tensor on the meta device is replaced by a new one. `tied` has, for each
    path of a tensor with others in the same memory, the first of these paths.
    """

    def __init__(self, tree: Any, matches: Callable[[str], bool]) -> None:
        _, leaves = flatten(tree, refusal=NO_LEAF)
        self._tree = tree
        self._tensors: dict[str, torch.Tensor] = {
            path: _materialized(leaf)
            for path, leaf in leaves.items()
            if isinstance(leaf, torch.Tensor) and matches(path)
        }
        self._per_host = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, PerHost)}
        self._copies: dict[str, torch.Tensor] = {}  # destinations on the host, to copy from afterwards
        self._owners: dict[Any, str] = {}  # the first path of a tensor, by memory
        self._tied: dict[str, str] = {}  # the first path of the same memory, by every other path
        locals_ = {path: self._checked_local(path, tensor) for path, tensor in self._tensors.items()}
        self._overlapping = overlapping({p: local for p, local in locals_.items() if p not in self._tied})
        destinations = {path: self._destination(path, local) for path, local in locals_.items()}
        self.tree = unflatten_like(tree, destinations, {})
        self.tied = self._tied | {owner: owner for owner in self._tied.values()}

    def finish(self, arrays: Mapping[str, Any], scalars: Mapping[str, Any]) -> Any:
        """Copy values that were read into other memory to their tensors; return the tree, with restored scalars.

        Raise `InvalidArgument` if tensors that share memory have different values in the checkpoint.
        """
        for path, owner in self._tied.items():
            if path in arrays and owner in arrays and not self._same(path, owner):
                raise InvalidArgument(
                    f"{path}: is tied to {owner} in the target, but has other values in the checkpoint; untie "
                    "them, or restore one of them with only=…"
                )
        devices = set()
        for path, copy in self._copies.items():
            if path in arrays:
                local = local_tensor(self._tensors[path])
                local.copy_(copy, non_blocking=True)
                devices.add(local.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # before the copies on the host are freed
        for path in self._overlapping & arrays.keys():
            if not same_bits(local_tensor(self._tensors[path]).cpu(), self._copies[path]):
                raise InvalidArgument(
                    f"{path}: overlaps another tensor of the target in memory, which has other values in the "
                    "checkpoint; pass clones as the target, or restore one of them with only=…"
                )
        restored: dict[str, Any] = {path: t for path, t in self._tensors.items() if path in arrays}
        for path, own in self._per_host.items():
            if path in arrays:
                restored[path] = restored_value(path, arrays[path], own.value)
        return unflatten_like(self._tree, {**arrays, **restored}, scalars)

    def _checked_local(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor that this process holds, and record if it is tied to an earlier one."""
        local = local_tensor(tensor)
        checked_dtype(path, local)
        if shares_elements(local):
            raise InvalidArgument(
                f"{path}: elements of the tensor share memory, as after expand or as_strided; pass "
                "tensor.clone() as the target"
            )
        flags = (local.is_conj(), local.is_neg())
        memory = (local.device, local.data_ptr(), local.shape, local.stride(), local.dtype, *flags)
        owner = self._owners.setdefault(memory, path) if local.numel() else path
        if owner != path:
            self._tied[path] = owner
        return local

    def _destination(self, path: str, local: torch.Tensor) -> Destination:
        tensor = self._tensors[path]
        dtype, shape = numpy_dtype(path, tensor.dtype), tuple(tensor.shape)
        if is_dtensor(tensor):
            parts = layout_of(path, tensor).parts
        else:
            index = tuple(slice(0, n) for n in shape)
            parts = [(index, index)] if tensor.numel() else []
        if local.device.type != "cpu" or local.is_conj() or local.is_neg():
            local = self._copies[path] = empty_on_host(local)
        elif path in self._tied or path in self._overlapping:  # reads at the same time would mix their values
            local = self._copies[path] = torch.empty_like(local)
        values = values_of(path, local)
        if values.flags.contiguous:
            prefer_huge_pages(local.data_ptr(), values.nbytes)
        return Destination(shape, dtype, [(whole, values[_view_index(part)]) for whole, part in parts])

    def _same(self, path: str, other: str) -> bool:
        """Return whether the same bits were read for two paths."""
        values = [self._copies[p] if p in self._copies else local_tensor(self._tensors[p]) for p in (path, other)]
        return same_bits(*values)


def _view_index(index: Index) -> Any:
    """Return an index that gives a view even of a 0-d array."""
    return (*index, ...)


def _materialized(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "meta":
        return tensor
    return torch.empty_like(tensor, device="cpu", requires_grad=False)
