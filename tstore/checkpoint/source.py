"""The checkpoint that a restore reads: its structure under the restored paths, and whether a target fits it.

A restore of few groups of a large store reads only their part of the structure, and the metadata of their arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from tstore.checkpoint.leaves import NO_LEAF, PerHost, dtype_of
from tstore.checkpoint.request import Request
from tstore.checkpoint.structure import flatten, scalars_in, unflatten, values_in
from tstore.core.format.arrays.dtypes import is_float
from tstore.core.format.paths import parents
from tstore.core.format.tree.node import Node
from tstore.core.format.tree_document import (
    TreeDocument,
    host_path,
    host_places,
    is_document,
    is_scalar,
    nested_document,
    paths_in,
    stored_document,
    value_path,
)
from tstore.core.format.tree_parts import part_of
from tstore.core.runtime.concurrency import compute
from tstore.core.snapshot import Snapshot
from tstore.errors import InvalidArgument, NotFound, StructureMismatch, bullet_list, parsing

__all__ = ["Source"]

T = TypeVar("T")

_SHORT = 1 << 18  # bytes of the metadata of the root group, which is visited in milliseconds


class _Structure(NamedTuple):
    """The saved structure of a checkpoint, or the part of it that a request needs, and the scalars in it."""

    document: TreeDocument
    scalars: dict[str, Any]
    is_part: bool = False


class Source:
    """A checkpoint under its restored paths.

    `document` is its structure, or if `is_part` the part of it that the request needs, and `stored` has the stored
    path of each array in it. `scalars` are the Python scalars that the request selects. `places` has the path of
    the value for each path of the bytes of a host.
    """

    def __init__(self, snapshot: Snapshot, request: Request, structure: _Structure) -> None:
        self.snapshot = snapshot
        self.document, self._scalars, self.is_part = structure
        self._nodes: Mapping[str, Node] = snapshot.tree.nodes
        self._matches = request.matches
        with parsing(f"{snapshot.location}: its structure"):
            self.stored = request.renamed(paths_in(self.document))
            if request.renames:
                values = dict(values_in(self.document))
                request.check_renames(dict.fromkeys((*self.stored.values(), *values)))
                renamed = request.renamed([*self.stored.values(), *self._scalars])  # none may replace another
                self._scalars = {new: self._scalars[old] for new, old in renamed.items() if old in self._scalars}
                self.document = _nested(self.stored, {request.renamed_path(p): values[p] for p in values})
        self.places = host_places(self.stored)
        self._hosts = Counter(self.places.values())
        self.scalars = {path: value for path, value in self._scalars.items() if request.matches(path)}
        self._selects = None if request.only is None else request.matches

    @staticmethod
    async def read(snapshot: Snapshot, request: Request) -> Source:
        """Read the structure of a checkpoint, and the metadata of the arrays that a request selects."""
        structure = await _part_of_structure(snapshot, request)
        if structure is None:
            await snapshot.read_nodes()
            structure = await _computed(snapshot, _whole_structure, snapshot)
        return await _computed(snapshot, Source, snapshot, request, structure)

    async def tree(self, arrays: Mapping[str, Any]) -> Any:
        """Return the restored tree with these arrays by path, without a target."""
        return await _computed(self.snapshot, self.unflatten, arrays)

    def unflatten(self, arrays: Mapping[str, Any]) -> Any:
        """Do what `tree` does, without a thread."""
        with parsing(f"{self.snapshot.location}: its structure"):
            return unflatten(self.document, arrays, self.is_part, self._selects)

    def selects(self, path: str) -> bool:
        """Return whether the request selects a path at which there is an array."""
        return path in self.stored and self._matches(path)

    def node(self, path: str) -> Node:
        """Return the node of an array that the request selects; that of another may have to be read first."""
        return self._nodes[self.stored[path]]

    def leaves(
        self,
        target: Any,
        request: Request,
        elsewhere: Container[str] = (),
        shared: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the arrays to read, by path, with the corresponding leaf of the target (None without a target).

        `elsewhere` are the paths that other processes restore; the target may lack them. `shared` has, for leaves
        in the same memory, its name; the checkpoint may lack all but one of these. Raise `NotFound` if `only`
        matches nothing. Raise `StructureMismatch` if the target does not fit.
        """
        chosen = [path for path in self.stored if request.matches(path)]
        if (
            not chosen
            and request.only is not None
            and not any(map(request.matches, dict(values_in(self.document))))
        ):
            paths = [*self.stored, *self._scalars]
            raise NotFound(f"{self.snapshot.location}: {request.advice(paths)}")
        self._nodes = self.snapshot.tree.nodes.many(list(map(self.stored.__getitem__, chosen)))
        reads = self._reads(chosen, request)
        if target is None:
            if request.per_host == "keep":
                raise InvalidArgument("per_host='keep' keeps the values in a target; pass target=…")
            return dict.fromkeys(_parts(reads, reads))
        document, leaves = flatten(target, refusal=NO_LEAF)
        leaves = {path: leaf for path, leaf in leaves.items() if request.selects(path)}
        in_target = leaves
        if request.keeps_missing:
            leaves = {path: leaf for path, leaf in leaves.items() if path in reads}
        if shared:
            filled = {shared[path] for path in leaves if path in shared and path in reads}
            leaves = {p: leaf for p, leaf in leaves.items() if p in reads or shared.get(p) not in filled}
        mismatched = [
            text for path in reads if path in leaves for text in self._mismatch(path, leaves[path], request)
        ]
        missing = [path for path in leaves if path not in reads]
        unexpected = [path for path in reads if path not in in_target and path not in elsewhere]
        target_scalars = {path: value for path, value in scalars_in(document).items() if request.matches(path)}
        if not request.keeps_missing:
            missing += [path for path in target_scalars if path not in self.scalars]
        unexpected += [path for path in self.scalars if path not in target_scalars and path not in elsewhere]
        mismatched += [
            f"{path}: stored {type(self.scalars[path]).__name__}, target {type(value).__name__}"
            for path, value in target_scalars.items()
            if path in self.scalars and type(self.scalars[path]) is not type(value)
        ]
        arrays = {
            path: type(value).__name__
            for path, value in target_scalars.items()
            if path in reads and path not in self._hosts
        }
        numbers = {
            path: type(value).__name__
            for path, value in self.scalars.items()
            if path in in_target and not isinstance(in_target[path], PerHost)
        }
        mismatched += [
            f"{p}: stored an array, target {name}; put an array into the target" for p, name in arrays.items()
        ]
        mismatched += [
            f"{p}: stored {name}, target an array; put {name} into the target" for p, name in numbers.items()
        ]
        missing, unexpected = (
            [path for path in paths if path not in arrays and path not in numbers]
            for paths in (missing, unexpected)
        )
        if missing or unexpected or mismatched:
            only = "…" if missing or mismatched else _top_patterns([*in_target, *target_scalars], unexpected)
            cures = {
                "dtype='target', which casts floats,": any(
                    self._is_cast(p, leaves.get(p), request) for p in chosen
                ),
                "missing='keep', which keeps leaves that the checkpoint lacks,": missing,
                "rename=…": missing and unexpected,
            }
            arguments = [*(cure for cure, helps in cures.items() if helps), f"only={only}"]
            raise StructureMismatch(self.snapshot.location, missing, unexpected, mismatched, arguments)
        return leaves if not self.places else {part: leaves.get(part) for part in _parts(leaves, reads)}

    def _reads(self, chosen: Sequence[str], request: Request) -> dict[str, Sequence[str] | None]:
        """Return for each value at the chosen paths what to read for it, None for the array itself.

        For a `PerHost` value, that is the path of this host, or the paths of all hosts. Raise
        `InvalidArgument` if other hosts saved it.
        """
        reads: dict[str, Sequence[str] | None] = {}
        of_hosts: dict[str, list[str]] = {}
        for path in chosen:
            if (place := self.places.get(path)) is None:
                reads[path] = None
            else:
                reads[place] = of_hosts.setdefault(place, [])
                of_hosts[place].append(path)
        if request.per_host == "all":
            return reads | {path: sorted(parts, key=lambda p: (len(p), p)) for path, parts in of_hosts.items()}
        refused = []
        for path, parts in of_hosts.items():
            saved, own = self._hosts[path], host_path(path, request.host)
            if saved != request.hosts and request.per_host == "same":
                refused.append(f"{path}: saved by {saved} hosts; this is host {request.host} of {request.hosts}")
            elif saved == request.hosts and own not in parts:
                raise NotFound(
                    f"{self.snapshot.location}: {path} has values of {saved} hosts, but that of host "
                    f"{request.host} is not selected, or not at {own}; pass per_host='all', for a list of those "
                    "that are there"
                )
            reads[path] = [own] if saved == request.hosts else []
        if refused:
            raise InvalidArgument(
                f"{self.snapshot.location}: values that each host has for itself (tstore.PerHost) were saved by "
                "another number of hosts; pass per_host='all', for a list with the value of each host, "
                "per_host='keep', for the values in the target, or only=…, without these paths (tstore.restore "
                f"also takes host=… and hosts=…):{bullet_list(sorted(refused))}"
            )
        return reads

    def _is_cast(self, path: str, leaf: Any, request: Request) -> bool:
        """Return whether the target has an array that `dtype="target"` would fit, and the request does not."""
        if leaf is None or isinstance(leaf, PerHost):
            return False
        meta, wanted = self.node(path).meta, dtype_of(path, leaf)
        if tuple(leaf.shape) != meta.shape:
            return False
        return wanted != request.dtype(path, meta.dtype, wanted) and is_float(meta.dtype) and is_float(wanted)

    def _mismatch(self, path: str, leaf: Any, request: Request) -> list[str]:
        """Return a list, with a message if the target has another shape or dtype at this path, or else empty."""
        if isinstance(leaf, PerHost) or path in self._hosts:
            wrong = isinstance(leaf, PerHost) != (path in self._hosts)
            return [f"{path}: only one of the checkpoint and the target has a tstore.PerHost there"] * wrong
        meta, wanted = self.node(path).meta, dtype_of(path, leaf)
        shape, dtype = tuple(leaf.shape), request.dtype(path, meta.dtype, wanted)
        if shape == meta.shape and wanted == dtype:
            return []
        cast = "" if dtype == meta.dtype else f" as {dtype}"
        return [f"{path}: stored {meta.dtype}{list(meta.shape)}{cast}, target {wanted}{list(shape)}"]


async def _computed(snapshot: Snapshot, call: Callable[..., T], *args: Any) -> T:
    """Call a function that visits a structure, in a way that a cancellation can end if the structure is long."""
    root = snapshot.tree.nodes.get("")
    return call(*args) if root is None or len(root.document) <= _SHORT else await compute(call, *args)


def _parts(paths: Iterable[str], reads: Mapping[str, Sequence[str] | None]) -> Iterator[str]:
    """Yield what to read for the values at these paths."""
    for path in paths:
        parts = reads[path]
        yield from (path,) if parts is None else parts


def _top_patterns(wanted: Iterable[str], unexpected: Iterable[str]) -> str:
    """Return what to pass as `only` for just the wanted paths: up to three top-level patterns, otherwise "…"."""
    groups = {path.partition("/")[0] for path in wanted}
    patterns = sorted({f"{path.partition('/')[0]}/**" if "/" in path else path for path in wanted})
    if not 0 < len(patterns) <= 3 or not groups.isdisjoint(path.partition("/")[0] for path in unexpected):
        return "…"
    return repr(patterns[0]) if len(patterns) == 1 else repr(patterns)


async def _part_of_structure(snapshot: Snapshot, request: Request) -> _Structure | None:
    """Return the part of the saved structure that a request needs, and read the metadata of its arrays.

    Return None if all of it is needed: for most arrays, for an error that lists other paths, or if the arrays in
    the extent of the request, or next to the scalars in it, differ from those of the structure.
    """
    if request.extent is None:
        return None
    await snapshot.read_nodes([""])
    stored, extent = snapshot.reserved_attribute("structure"), request.extent
    document = await _computed(snapshot, part_of, stored, extent)
    if document is None:
        return None
    with parsing(f"{snapshot.location}: its structure"):
        scalars = scalars_in(document)
    selected = list(filter(request.matches, scalars))
    if selected:
        tops = extent.with_groups({path.partition("/")[0] for path in selected})
        if (document := await _computed(snapshot, part_of, stored, tops)) is None:
            return None
        extent = extent.with_groups(_groups_of(selected, paths_in(document)))
    paths = sorted(path for path in paths_in(document) if path in extent)
    if not selected and not any(map(request.matches, paths)):
        return None
    nodes = snapshot.tree.nodes
    await snapshot.read_nodes([*extent.paths, *(p for start in extent.starts for p in nodes.around_start(start))])
    found = {path for start in extent.starts for path in nodes.starting_with(start)}
    found.update(path for path in extent.paths if path in nodes)
    is_saved = paths == sorted(path for path in found if nodes[path].is_array)
    return _Structure(document, scalars, is_part=True) if is_saved else None


def _groups_of(scalars: Iterable[str], paths: Iterable[str]) -> set[str]:
    """Return the groups whose arrays tell whether scalars were deleted, or replaced by arrays.

    For each scalar it is the innermost group around it that has arrays, else the scalar or group at the top.
    """
    groups = {above for path in paths for above in parents(path)}
    return {
        next((above for above in parents(path) if above in groups), path.partition("/")[0]) for path in scalars
    }


def _whole_structure(snapshot: Snapshot) -> _Structure:
    with parsing(f"{snapshot.location}: its structure"):
        document = _saved_structure(snapshot)
        return _Structure(document, scalars_in(document))


def _saved_structure(snapshot: Snapshot) -> TreeDocument:
    """Return the saved structure.

    If it is absent, or arrays were added or deleted since, return nested dicts of all arrays and saved scalars. A
    group that has lost all of its arrays was deleted, with its scalars; and so was a value that each host has for
    itself, if one of its arrays was, since the others would be taken for those of fewer hosts.
    """
    paths = snapshot.paths()
    stored: Any = snapshot.reserved_attributes().get("structure")
    document = stored_document(stored, paths)
    if document is not None:
        return document
    if not is_document(stored):
        return _nested(paths, {})
    arrays, groups = set(paths), {above for path in paths for above in parents(path)}
    deleted = {above for path in paths_in(stored) for above in parents(path)} - groups

    def is_kept(path: str) -> bool:
        """Return whether no array is above or below a scalar or in its place, and its groups still have arrays."""
        above = (path, *parents(path))
        return bool(path) and path not in groups and arrays.isdisjoint(above) and deleted.isdisjoint(above)

    lost = {place for path, place in host_places(paths_in(stored)).items() if path not in arrays}
    whole = [path for path in paths if value_path(path) not in lost]
    return _nested(whole, {path: node for path, node in values_in(stored) if is_kept(path)})


def _nested(arrays: Iterable[str], values: Mapping[str, TreeDocument]) -> TreeDocument:
    """Return a document of nested dicts with these arrays and values by path.

    No array or scalar may be below another one. None and empty containers give way to any of them.
    """
    nodes: dict[str, TreeDocument] = {path: ("array", path) for path in arrays}
    nodes |= {path: node for path, node in values.items() if is_scalar(node)}
    if len(empty := values.keys() - nodes.keys()):
        groups = {"", *(above for path in nodes for above in parents(path))}
        for path in filter(empty.__contains__, values):  # in their order
            if path not in groups and nodes.keys().isdisjoint(parents(path)):
                nodes[path] = values[path]
                groups.update(parents(path))
    return nested_document(nodes)
