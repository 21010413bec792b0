"""The coordinator's additions to the plans of a DCP save: paths, shapes of shards, and the tree's structure."""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from tstore.checkpoint.structure import flatten
from tstore.core.format.tree_document import TreeDocument, expanded
from tstore.core.runtime import world
from tstore.errors import InvalidArgument
from tstore.sharding import Index, common_shard_shape
from tstore.torch.tensors import numpy_dtype

__all__ = ["Assignment", "Entry", "index_of", "structure_and_entries", "with_assignments", "with_documents"]


class Assignment(NamedTuple):
    """The coordinator's addition to the plan of a process, as `storage_data`.

    `arrays` has, by DCP's name of each item, the path of its array and the shape of a shard. `reserved` has the
    structure of the tree and the paths of the pickled objects; only host 0 gets them. `digest` is the checksum of
    what host 0 gets.
    """

    host: int
    hosts: int
    attempt: str
    arrays: dict[str, tuple[str, tuple[int, ...]]]
    digest: bytes
    reserved: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of a state dict with the regions that processes write, or a pickled object with None as regions."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    regions: list[Index] | None


def index_of(item: WriteItem) -> Index:
    """Return the region of the whole tensor that an item of a plan saves."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))


def with_assignments(plans: Sequence[SavePlan], attempt: str | None, coordinator: int) -> list[SavePlan]:
    """Return the plans with their assignments; plans that DCP left out because it caches them are added again.

    The process of rank `coordinator` becomes host 0, whose transaction `finish` commits, and others follow.
    If DCP's cache leaves out all plans, every process still has its plan and assignment from the previous save.
    """
    if not any(plan.usable for plan in plans):
        return list(plans)
    plans = _completed(plans)
    document, entries = structure_and_entries(plans)
    reserved = {
        "structure": document,
        "dcp": {"bytes": [p for p, entry in entries.items() if entry.regions is None]},
    }
    digest = xxhash.xxh3_128_digest(msgspec.json.encode(reserved))
    token = world.token(12) if attempt is None else attempt
    arrays = {
        entry.name: (path, (0,) if entry.regions is None else common_shard_shape(entry.shape, entry.regions))
        for path, entry in entries.items()
    }
    return [
        dataclasses.replace(
            plan,
            storage_data=Assignment(
                host,
                len(plans),
                token,
                {item.index.fqn: arrays[item.index.fqn] for item in plan.items},
                digest,
                {} if host else reserved,
            ),
        )
        for rank, plan in enumerate(plans)
        for host in [(rank - coordinator) % len(plans)]
    ]


def with_documents(reserved: Mapping[str, Any], documents: Mapping[str, TreeDocument]) -> dict[str, Any]:
    """Return the reserved attributes with documents in place of the pickled objects at these paths."""

    def replaced(node: TreeDocument) -> TreeDocument:
        match expanded(node):
            case ["array", path]:
                return documents.get(path, node)
            case ["dict", items]:
                return ["dict", [[key, replaced(child)] for key, child in items]]
            case ["list", items]:
                return ["list", [replaced(child) for child in items]]
        return node

    pickled = [path for path in reserved["dcp"]["bytes"] if path not in documents]
    return {"structure": replaced(reserved["structure"]), "dcp": {"bytes": pickled}}


def structure_and_entries(plans: Sequence[SavePlan]) -> tuple[TreeDocument, dict[str, Entry]]:
    """Return the structure of the state dict that the plans save, and its entries by path."""
    entries: dict[str, Entry] = {}
    for item in (item for plan in plans for item in plan.items):
        name, data = item.index.fqn, item.tensor_data
        if data is None:
            entries[name] = Entry(name, (0,), np.dtype(np.uint8), None)
            continue
        dtype = numpy_dtype(name, data.properties.dtype)
        entry = entries.setdefault(name, Entry(name, tuple(data.size), dtype, []))
        assert entry.regions is not None
        entry.regions.append(index_of(item))
    keys = ChainMap(*(plan.planner_data for plan in plans if isinstance(plan.planner_data, dict)))
    return flatten(_nested(entries, keys))


def _nested(entries: Mapping[str, Entry], keys: Mapping[str, Sequence[str | int]]) -> Any:
    """Return the state dict with an entry in place of each value.

    `keys` has the keys that lead to the value of each name; a name without keys is itself a key of the root.
    """
    root: dict[str | int, Any] = {}
    for name, entry in entries.items():
        *above, last = keys.get(name, (name,))
        group = root
        for key in above:
            group = group.setdefault(key, {})
        group[last] = entry
    return _with_lists(root)


def _with_lists(group: Any) -> Any:
    """Return a tree with lists in place of the dicts whose keys are numbers."""
    if not isinstance(group, dict):
        return group
    if group and all(isinstance(key, int) for key in group):
        return [_with_lists(group.get(i)) for i in range(max(group) + 1)]
    return {key: _with_lists(value) for key, value in group.items()}


def _completed(plans: Sequence[SavePlan]) -> Sequence[SavePlan]:
    """Return the plans of all processes; those that have not changed are only in the planner's cache."""
    if all(plan.usable for plan in plans):
        return plans
    cached: Mapping[str, list[SavePlan]] = getattr(SavePlanner, "_cached_global_plan", {})
    for complete in cached.values():
        if len(complete) == len(plans) and all(
            plan is full or not plan.usable for plan, full in zip(plans, complete, strict=True)
        ):
            return complete
    raise InvalidArgument(
        "the planner left out plans that it has not cached; use DefaultSavePlanner, or a planner without a cache"
    )
