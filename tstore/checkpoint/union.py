"""The union of trees that differ from host to host, as in pipeline parallelism; pure, no I/O.

The hosts of a save must pass the same structure, and write each region once. If hosts have different layers, or
several teams of hosts have the same array, every host sends its `Outline` to the others, with checksums of its
values, which must be equal where several hosts have them. Each then saves the union of the trees, in which an
array that it does not write is a `Shards` without parts, and a `PerHost` of other hosts holds None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from tstore.checkpoint.leaves import PerHost, Shards
from tstore.checkpoint.replicated import array_checksums
from tstore.checkpoint.structure import flatten, path_part, unflatten
from tstore.core.format.tree_document import (
    TreeDocument,
    expanded,
    paths_in,
    per_host_path,
    scalar_value,
    value_path,
)
from tstore.core.transactions.agreement import check_replicated
from tstore.errors import Inconsistent

__all__ = ["Outline", "united"]


class _ArraySpec(NamedTuple):
    """An array without its values; `shard_shape` is None if every host that has the array has all of it."""

    shape: tuple[int, ...]
    dtype: str
    shard_shape: tuple[int, ...] | None

    def __str__(self) -> str:
        shards = "" if self.shard_shape is None else f" in shards of {list(self.shard_shape)}"
        return f"{self.dtype}{list(self.shape)}{shards}"


class Outline(NamedTuple):
    """A tree without its values, as one host holds it.

    `arrays` has the spec of each array by path. `teams` has a team number by path of `Shards`: the hosts with the
    same number divide the array among them, and only one of the teams writes it. If the outlines of hosts differ
    otherwise, `checksums` has those of the NumPy arrays by path, since `save` compares only what all hosts have.
    """

    document: TreeDocument
    arrays: dict[str, _ArraySpec]
    teams: dict[str, int]
    checksums: dict[str, bytes]

    @staticmethod
    def of(tree: Any, teams: Mapping[str, int]) -> Outline:
        """Return the outline of a tree of NumPy arrays, `Shards` and scalars."""
        document, leaves = flatten(tree)
        arrays = {path: _array_spec(leaf) for path, leaf in leaves.items() if not isinstance(leaf, PerHost)}
        return Outline(document, arrays, dict(teams), {})

    def with_checksums(self, tree: Any) -> Outline:
        """Return the outline of this tree with the checksums of its values."""
        return self._replace(checksums=array_checksums(flatten(tree)[1]))

    def digest(self) -> bytes:
        """Return a checksum that differs between different outlines."""
        return xxhash.xxh3_128_digest(msgspec.json.encode(self))


def united(
    tree: Any, own_outline: Outline, outlines: Sequence[Outline], hosts_of: Sequence[Sequence[int]], host: int
) -> Any:
    """Return the tree that `host` saves so that all hosts pass the same structure and write each region once.

    `own_outline` is the outline of this host's tree. `outlines` are the distinct outlines of all hosts, and
    `hosts_of` has the hosts of each outline. Raise `Inconsistent`, with the paths, if hosts have different arrays
    or values at the same path.
    """
    _, leaves = flatten(tree)
    document, specs = _merged_documents(outlines), _merged_specs(outlines)
    check_replicated(zip(hosts_of, (outline.checksums for outline in outlines), strict=True), "")
    places = {value_path(path) for path in paths_in(document)}
    result: dict[str, Any] = {path: leaves.get(path, PerHost(None)) for path in places - specs.keys()}
    for path, spec in specs.items():
        leaf, path_hash = leaves.get(path), xxhash.xxh3_64_intdigest(path.encode())  # spreads arrays over hosts
        holders = [i for i, outline in enumerate(outlines) if path in outline.arrays]
        if spec.shard_shape is not None:
            teams = sorted({outlines[i].teams.get(path, 0) for i in holders})
            writes = leaf is not None and own_outline.teams.get(path, 0) == teams[path_hash % len(teams)]
            result[path] = leaf if writes else Shards(spec.shape, spec.dtype, shard_shape=spec.shard_shape)
        elif len(holders) == len(outlines):
            result[path] = leaf
        else:  # one of the hosts that have the array writes it
            hosts = hosts_of[holders[path_hash % len(holders)]]
            whole = tuple(slice(0, n) for n in spec.shape)
            parts = [(whole, leaf)] if host == hosts[path_hash % len(hosts)] else []
            result[path] = Shards(spec.shape, spec.dtype, parts, shard_shape=spec.shape)
    return unflatten(_without_scalars(document), result)


def _array_spec(leaf: Any) -> _ArraySpec:
    shard_shape = leaf.shard_shape if isinstance(leaf, Shards) else None
    return _ArraySpec(tuple(leaf.shape), np.dtype(leaf.dtype).name, shard_shape)


def _merged_specs(outlines: Sequence[Outline]) -> dict[str, _ArraySpec]:
    specs: dict[str, _ArraySpec] = {}
    differing = []
    for outline in outlines:
        for path, spec in outline.arrays.items():
            first = specs.setdefault(path, spec)
            if first != spec:
                differing.append(f"{path}: {first} and {spec}")
    if differing:
        raise Inconsistent(
            "hosts save different arrays at the same path, or the same array in different shards", differing
        )
    return specs


def _merged_documents(outlines: Sequence[Outline]) -> TreeDocument:
    document = outlines[0].document
    differing: list[str] = []
    for outline in outlines[1:]:
        document = _merged(document, outline.document, "", differing)
    if differing:
        raise Inconsistent(
            "hosts save trees with different values at the same path; make them equal on all hosts, or pass "
            "tstore.PerHost(value) to save the value of each host",
            sorted(set(differing)),
        )
    return document


def _merged(one: TreeDocument, other: TreeDocument, path: str, differing: list[str]) -> TreeDocument:
    """Return two documents as one; a dict has the keys of both. Add the paths that differ to `differing`."""
    if one == other:
        return one
    if per_host_path(one) != per_host_path(other):  # a PerHost is stored like a dict
        differing.append(path or "the tree")
        return one
    match expanded(one), expanded(other):
        case ["dict", items], ["dict", others]:
            merged, parts = dict(items), {path_part(scalar_value(key)) for key, _ in items}
            for key, node in others:
                old = merged.get(key)
                part = path_part(scalar_value(key))
                if old is None and part in parts:  # as those of 5 and "5", whose arrays have the same path
                    differing.append(_join(path, part))
                merged[key] = node if old is None else _merged(old, node, _join(path, part), differing)
            return "dict", tuple(merged.items())
        case ["dataclass" | "namedtuple", name, items], [node_type, other_name, others]:
            if (node_type, other_name, [f for f, _ in others]) == (one[0], name, [f for f, _ in items]):
                pairs = zip(items, others, strict=True)
                fields = ((f, _merged(a, b, _join(path, f), differing)) for (f, a), (_, b) in pairs)
                return node_type, name, tuple(fields)
        case ["list" | "tuple", items], [node_type, others]:
            if node_type == one[0] and len(items) == len(others):
                numbered = enumerate(zip(items, others, strict=True))
                return node_type, tuple(_merged(a, b, _join(path, str(i)), differing) for i, (a, b) in numbered)
    differing.append(path or "the tree")
    return one


def _without_scalars(node: TreeDocument) -> TreeDocument:
    """Return a document with an array in place of each NumPy scalar, because not every host passes that scalar."""
    match node:
        case ["scalar", path]:
            return "array", path
        case ["list" | "tuple", items]:
            return node[0], tuple(map(_without_scalars, items))
        case ["dict" | "dataclass" | "namedtuple", *_, items]:
            return *node[:-1], tuple((key, _without_scalars(item)) for key, item in items)
    return node


def _join(path: str, part: str) -> str:
    return f"{path}/{part}" if path else part
