"""Checksums of the values that several processes of a DCP save have, and only one of them writes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner

from tstore.checkpoint.leaves import HostValues, PerHost
from tstore.checkpoint.replicated import value_checksums
from tstore.checkpoint.structure import flatten, join, path_part, scalars_in
from tstore.core.format.tree_document import SCALARS
from tstore.errors import InvalidArgument
from tstore.torch.tensors import host_values, samples_of

__all__ = ["checksums_of"]

_PLAIN = torch.Tensor, torch.nn.Parameter


def checksums_of(planner: SavePlanner, hosts: int) -> dict[str, bytes]:
    """Return the checksums of the ordinary tensors and Python scalars in a process's state dict, by path.

    The samples of a long tensor are taken on its device. The result is empty for a single process, and for a
    planner without the `state_dict` of `DefaultSavePlanner`. Raise `InvalidArgument` for a `PerHost`, since DCP
    would save the value of one process.
    """
    keys = getattr(planner, "mappings", {})
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    for name, value in getattr(planner, "state_dict", {}).items():
        path = "/".join(map(path_part, keys.get(name, (name,))))
        if _has_per_host(value):
            raise InvalidArgument(
                f"{path}: DCP would save the PerHost of one process; save its value under another key in each "
                "process, such as f'rank{rank}', or save with tstore.torch.save"
            )
        if type(value) in _PLAIN:
            tensors[path] = value.detach()
        elif type(value) in (*SCALARS, list, tuple):
            with contextlib.suppress(InvalidArgument):  # an object that DCP pickles
                scalars |= {join(path, below).strip("/"): s for below, s in scalars_in(flatten(value)[0]).items()}
    if hosts == 1:
        return {}
    return value_checksums(host_values({path: samples_of(tensor) for path, tensor in tensors.items()}), scalars)


def _has_per_host(value: Any) -> bool:
    if isinstance(value, PerHost | HostValues):
        return True
    return isinstance(value, list | tuple) and any(map(_has_per_host, value))
