"""Restoring a checkpoint, or parts of it, as a tree of arrays."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from tstore.checkpoint.leaves import Shards, dtype_of
from tstore.checkpoint.structure import flatten, scalars_in, unflatten, unflatten_like
from tstore.data.exmy_chunks import is_packed
from tstore.data.reader import new_values
from tstore.errors import InvalidArgument, NotFound, SnapshotExpired, StructureMismatch, parsing
from tstore.format.arguments import quote
from tstore.format.grid import Selection
from tstore.format.patterns import compile_patterns
from tstore.format.tree_document import paths_in, stored_document
from tstore.snapshot import Snapshot
from tstore.steps import chosen_snapshot
from tstore.store import Store, opened

__all__ = ["restore"]

_ATTEMPTS = 8
"""How many times to read if garbage collection removes the newest step meanwhile."""


async def restore(
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    target: Any = None,
    only: str | list[str] | None = None,
    packed: bool = False,
) -> Any:
    """Return a checkpoint as a tree of NumPy arrays: a step, a version or tag (`at`), by default the newest step.

    Only the chunks that are needed are read. If garbage collection removes the newest step during the read, the
    step that is newest by then is restored instead.

    Parameters
    ----------
    target
        The structure to return, with leaves that have `shape` and `dtype`, or `Shards` for a part of an array. It
        must fit the checkpoint: one `StructureMismatch` lists every path, shape and dtype that does not. Without a
        target, dataclasses and namedtuples become dicts.
    only
        A pattern such as "params/**", or a list of patterns: only arrays with a matching path are restored. The
        target's other leaves are returned unchanged.
    packed
        Return arrays in eXmY formats as `exmy.Quantized`, without decoding; 0-d arrays are decoded.

    Raises
    ------
    `NotAStore`, `NotFound`, `SnapshotExpired` (garbage collection removed the version), `Corrupt`,
    `StructureMismatch`, `InvalidArgument`.
    """
    if step is not None and at is not None:
        raise InvalidArgument("step=… and at=… both name a version; pass one of them")
    async with opened(store, "r") as source:
        for _ in range(1 if step is not None or at is not None else _ATTEMPTS):
            try:
                return await _restore_snapshot(await chosen_snapshot(source, step, at), target, only, packed)
            except SnapshotExpired as error:
                expired = error
        raise expired


async def _restore_snapshot(snapshot: Snapshot, target: Any, only: str | list[str] | None, packed: bool) -> Any:
    document = _saved_structure(snapshot)
    paths = list(paths_in(document))
    if only is not None:
        if not isinstance(only, str | list | tuple) or not all(isinstance(pattern, str) for pattern in only):
            raise InvalidArgument(f"only={quote(only)}: expected a pattern such as 'layers/**', or a list of them")
        matches = compile_patterns(only)
        paths = [p for p in paths if matches(p)]
        if not paths:
            advice = _advice(only, list(paths_in(document)))
            raise NotFound(f"{snapshot.location}: no array matches only={quote(only)}; {advice}")
    if target is None:
        arrays = await _read(snapshot, dict.fromkeys(paths), packed)
        with parsing(f"{snapshot.location}: its structure"):
            return unflatten(document, arrays)
    target_document, leaves = flatten(target)
    if only is not None:
        leaves = {p: v for p, v in leaves.items() if matches(p)}
    with parsing(f"{snapshot.location}: its structure"):
        scalars = scalars_in(document)
    if only is None:
        _check_fit(snapshot, paths, leaves, scalars, scalars_in(target_document))
    else:
        _check_fit(snapshot, paths, leaves, {}, {})
    return unflatten_like(target, await _read(snapshot, leaves, packed), scalars)


def _advice(only: str | list[str], paths: list[str]) -> str:
    """Say how to select a group whose path was passed where a pattern is expected."""
    for pattern in [only] if isinstance(only, str) else only:
        group = pattern.strip("/")
        if any(path.startswith(f"{group}/") for path in paths):
            return f"{group!r} is a group; for all arrays below it pass only='{group}/**'"
    return "`tstore ls` lists the paths of all arrays"


def _saved_structure(snapshot: Snapshot) -> list[Any]:
    """Return the saved structure, or nested dicts by path if it is absent or does not fit the arrays."""
    document = stored_document(snapshot.reserved_attributes().get("structure"), snapshot.paths())
    if document is not None:
        return document
    root: dict[str, Any] = {}
    for path in snapshot.paths():
        *parents, name = path.split("/")
        group = root
        with parsing(f"{snapshot.location}: the path {path!r}"):  # another program may have put it below an array
            for parent in parents:
                group = group.setdefault(parent, {})
            group[name] = ["array", path]

    def node(group: Any) -> list[Any]:
        if isinstance(group, list):
            return group
        return ["dict", [[["str", k], node(v)] for k, v in group.items()]]

    return node(root)


async def _read(snapshot: Snapshot, leaves: Mapping[str, Any], packed: bool) -> dict[str, Any]:
    """Return the arrays at these paths: the parts for a `Shards` leaf, the whole array for any other."""
    nodes = snapshot.tree.nodes
    results: dict[str, Any] = {}
    reads: list[tuple[str, Selection | None, npt.NDArray[Any]]] = []
    shards: list[tuple[str, Shards, list[npt.NDArray[Any]]]] = []
    for path, leaf in leaves.items():
        meta = nodes[path].meta
        if packed and meta.shape and is_packed(meta):
            if isinstance(leaf, Shards):
                raise InvalidArgument(
                    f"{path}: packed=True restores whole arrays, not Shards; leave out packed or the Shards"
                )
            results[path] = await snapshot.read_packed(path)
        elif not isinstance(leaf, Shards):
            out = results[path] = new_values(path, meta.shape, meta.dtype)
            reads.append((path, None, out))
        else:
            outs = []
            for index, _ in leaf.parts:
                out = new_values(path, tuple(s.stop - s.start for s in index), meta.dtype)
                reads.append((path, Selection(tuple(range(s.start, s.stop) for s in index)), out))
                outs.append(out)
            shards.append((path, leaf, outs))
    await snapshot.read_many(reads)
    results.update({path: leaf.with_values(outs) for path, leaf, outs in shards})
    return results


def _check_fit(
    snapshot: Snapshot,
    paths: Sequence[str],
    leaves: Mapping[str, Any],
    scalars: Mapping[str, Any],
    target_scalars: Mapping[str, Any],
) -> None:
    """Raise one `StructureMismatch` for all differences between the checkpoint and the target.

    `paths` and `scalars` are the arrays and Python scalars of the checkpoint, `leaves` and `target_scalars` those
    of the target.
    """
    stored = {*paths, *scalars}
    missing = [p for p in (*leaves, *target_scalars) if p not in stored]
    unexpected = [p for p in (*paths, *scalars) if p not in leaves and p not in target_scalars]
    mismatched = []
    for path in (p for p in paths if p in leaves):
        meta, leaf = snapshot.tree.nodes[path].meta, leaves[path]
        shape, dtype = tuple(leaf.shape), dtype_of(path, leaf)
        if shape != meta.shape or dtype != meta.dtype:
            mismatched.append(f"{path}: stored {meta.dtype}{list(meta.shape)}, target {dtype}{list(shape)}")
    for path, value in target_scalars.items():
        if path in scalars and type(scalars[path]) is not type(value):
            mismatched.append(f"{path}: stored {type(scalars[path]).__name__}, target {type(value).__name__}")
    if missing or unexpected or mismatched:
        raise StructureMismatch(snapshot.location, missing, unexpected, mismatched)
