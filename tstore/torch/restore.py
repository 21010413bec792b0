"""Restore checkpoints as tensors, into tensors, and into modules and optimizers."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash

from tstore.checkpoint.leaves import PerHost
from tstore.checkpoint.reading import Reading
from tstore.checkpoint.request import Cast, Missing, PerHostRule, Request
from tstore.checkpoint.source import Source
from tstore.checkpoint.structure import flatten, path_part, scalars_in, unflatten
from tstore.core.data.reader import new_values
from tstore.core.hints import hinting
from tstore.core.runtime import pool
from tstore.core.snapshot import Snapshot
from tstore.core.steps import check_one_version, chosen_snapshot
from tstore.core.store import Store, opened
from tstore.errors import InvalidArgument, SnapshotExpired, TStoreError, parsing
from tstore.torch.leaves import Target, restored_value
from tstore.torch.memory import Stored
from tstore.torch.processes import ALONE, Processes
from tstore.torch.stateful import holds_stateful, load, state_tree
from tstore.torch.tensors import numpy_dtype, torch_dtype

__all__ = ["pickled_paths", "restore", "restore_among"]

_ATTEMPTS = 8
"""The number of attempts if garbage collection removes the newest step meanwhile."""


@hinting
def restore(
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    target: Any = None,
    only: str | list[str] | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: Cast | torch.dtype | Mapping[str, torch.dtype] = None,
    missing: Missing = "error",
    per_host: PerHostRule = "same",
    group: dist.ProcessGroup | None = None,
    hosts: int | None = None,
) -> Coroutine[Any, Any, Any]:
    """Return the checkpoint of a step (by default the newest), or of a version or tag (`at`), as tensors.

    Every process of the process group makes this call. All restore the same step, even if another is saved
    meanwhile, and each reads only what its target holds.

    Parameters
    ----------
    target
        The tree to restore into, in place: tensors, `DTensor`s on any mesh, and objects with a `state_dict`, such
        as modules and optimizers, as in `{"model": model, "optimizer": optimizer, "epoch": 0}`. It is returned,
        with the scalars of the checkpoint. Together the targets of all processes must match the checkpoint; each
        pipeline stage may have a part. One `StructureMismatch` lists every path that is missing or unexpected, or
        has another shape or dtype. A tensor on the meta device is replaced by one on the CPU. Without a target the
        result is a nested dict of whole tensors on the CPU.
    only, rename, missing, per_host
        As in `tstore.restore`.
    dtype
        The dtype of floating-point tensors, "target" for that of the target, or dtypes by path pattern.
    group, hosts
        The process group whose processes restore the same step, by default all. With `hosts=1` this process
        restores alone, without the others.

    Raises
    ------
    As `tstore.restore`. If a read fails, the target may have a mix of old and new values.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> import torch
    >>> _ = tstore.torch.save("memory://of-torch-restore", {"model": torch.nn.Linear(3, 2)}, step=7)
    >>> model = torch.nn.Linear(3, 2)
    >>> _ = tstore.torch.restore("memory://of-torch-restore", target={"model": model})  # in place
    >>> tstore.torch.restore("memory://of-torch-restore")["model"]["weight"].equal(model.weight)
    True
    """
    if hosts not in (None, 1):
        raise InvalidArgument(
            f"hosts={hosts!r}: expected None, for the processes of the group, or 1, for this one"
        )
    processes = ALONE if hosts == 1 else Processes.of(group)
    return restore_among(
        processes,
        store,
        step,
        at=at,
        target=target,
        only=only,
        rename=rename,
        dtype=dtype,
        missing=missing,
        per_host=per_host,
    )


@hinting
async def restore_among(
    processes: Processes,
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    target: Any = None,
    only: str | list[str] | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: Cast | torch.dtype | Mapping[str, torch.dtype] = None,
    missing: Missing = "error",
    per_host: PerHostRule = "same",
) -> Any:
    """Restore as `restore` does, with these processes."""
    check_one_version(step, at)
    request = Request(only, rename, _numpy_cast(dtype), missing, per_host, processes.host, processes.hosts)
    async with opened(store, "r") as opened_store:
        mixes = missing == "keep"  # a tensor that another step lacks would keep values of this one
        is_newest = step is None and at is None
        attempts_left = _ATTEMPTS if is_newest and processes.hosts == 1 and not mixes else 1
        while True:
            snapshot = await _agreed_snapshot(opened_store, step, at, processes)
            try:
                return await _restore_snapshot(snapshot, target, request, processes)
            except SnapshotExpired:
                attempts_left -= 1
                if not attempts_left:
                    raise


async def _restore_snapshot(snapshot: Snapshot, target: Any, request: Request, processes: Processes) -> Any:
    if target is None:
        source = await Source.read(snapshot, request)
        arrays = await _read(source, request, source.leaves(None, request))
        return await source.tree({path: restored_value(path, value) for path, value in arrays.items()})
    destination, failure, stored = None, None, None
    try:
        source = await Source.read(snapshot, request)
        stateful = holds_stateful(target)
        if stateful:
            stored = _stored_tree(source, request)
            if request.renames:  # a renamed tree has only dicts
                stored = _nested_like(state_tree(target), stored)
        tree = state_tree(target, stored, _kept_tree(target, request)) if stateful else target
        destination = Target(tree, request.matches)
    except Exception as error:  # reported to the others
        failure = error
    all_paths = await pool.run(_exchanged_paths, destination, failure, processes)
    assert destination is not None
    arrays = await _read(source, request, source.leaves(destination.tree, request, all_paths, destination.tied))
    restored = destination.finish(arrays, source.scalars)
    return load(target, restored, stored) if stateful else restored


async def _read(source: Source, request: Request, leaves: Mapping[str, Any]) -> dict[str, Any]:
    reading = Reading(source, request, new_values)
    for path, leaf in leaves.items():
        reading.add(path, leaf)
    return await reading.read()


async def _agreed_snapshot(store: Store, step: int | None, at: int | str | None, processes: Processes) -> Snapshot:
    """Return the snapshot to restore, of the version that the first process chose."""
    if processes.hosts == 1:
        return await chosen_snapshot(store, step, at)
    chosen: int | TStoreError | None = None
    if processes.host == 0:
        try:
            chosen = (await chosen_snapshot(store, step, at)).version
        except TStoreError as error:
            chosen = error
    version = (await pool.run(processes.gather, chosen))[0]
    if isinstance(version, TStoreError):
        raise version
    return await store.snapshot(version)


def _exchanged_paths(destination: Target | None, failure: Exception | None, processes: Processes) -> set[str]:
    """Return the paths of all processes' targets, or none if all targets have the same paths.

    Raise in all processes if one has a `failure`.
    """
    paths: list[str] = []
    if destination is not None and processes.hosts > 1:
        document, leaves = flatten(destination.tree)
        paths = [*leaves, *scalars_in(document)]
    digests = processes.exchange(xxhash.xxh3_128_digest("\0".join(paths).encode()), failure)
    if len(set(digests)) == 1:
        return set()
    is_first = digests.index(digests[processes.host]) == processes.host  # first with the same paths
    return {path for other in processes.gather(paths if is_first else []) for path in other}


def _stored_tree(source: Source, request: Request) -> Any:
    """Return the tree to restore, with a `Stored` for each array in its restored dtype."""
    arrays: dict[str, Any] = {}
    pickled = pickled_paths(source.snapshot)
    for path, stored_path in source.stored.items():
        if path in source.places:
            arrays[source.places[path]] = PerHost(None)
        elif request.matches(path):
            meta = source.node(path).meta
            dtype = torch_dtype(path, request.dtype(path, meta.dtype, None))
            arrays[path] = Stored(meta.shape, dtype, stored_path in pickled)
        else:
            arrays[path] = Stored((), torch.uint8)  # it is left out below; its metadata may not have been read
    with parsing(f"{source.snapshot.location}: its structure"):
        tree = unflatten(source.document, arrays)  # with scalars
    return tree if request.only is None else _matching(tree, [], request.selects)


def pickled_paths(snapshot: Snapshot) -> set[str]:
    """Return the paths of the objects that DCP has pickled."""
    with parsing(f"{snapshot.location}: the attributes of DCP"):
        attributes = msgspec.json.decode(snapshot.reserved_attribute("dcp")) or {}
        return set(attributes.get("bytes", []))


def _kept_tree(target: Any, request: Request) -> Any:
    """Return the target's own state that the restore must not change where the checkpoint has no other."""
    if request.keeps_missing:
        return state_tree(target)
    if request.only is None:
        return None
    return _matching(state_tree(target), [], lambda path: not request.selects(path))


def _nested_like(tree: Any, stored: Any) -> Any:
    """Return a stored tree of nested dicts with the keys and types of the containers in `tree`.

    Empty containers and None in `tree` are added, because the stored tree lacks them.
    """
    if not isinstance(stored, Mapping) or not isinstance(tree, Mapping | list | tuple):
        return stored
    items = dict(tree) if isinstance(tree, Mapping) else dict(enumerate(tree))
    keys = {path_part(key): key for key in items}
    built = {keys.get(part, part): _nested_like(items.get(keys.get(part)), node) for part, node in stored.items()}
    built |= {key: value for key, value in items.items() if key not in built and _is_empty(value)}
    if isinstance(tree, Mapping) or set(built) != set(range(len(tree))):
        return built
    values = [built[i] for i in range(len(tree))]
    return values if isinstance(tree, list) else tuple(values)


def _is_empty(value: Any) -> bool:
    """Return whether a value is None, or a container with only None."""
    if isinstance(value, Mapping | list | tuple):
        return all(map(_is_empty, value.values() if isinstance(value, Mapping) else value))
    return value is None


_LEFT_OUT = object()


def _matching(value: Any, keys: list[str], matches: Callable[[str], bool]) -> Any:
    """Return the values of a tree whose paths match; in lists and tuples, None replaces the others."""
    if isinstance(value, Stored) or not isinstance(value, Mapping | list | tuple) or not value:
        return value if matches("/".join(keys)) else _LEFT_OUT
    if isinstance(value, Mapping):
        children = {key: _matching(child, [*keys, path_part(key)], matches) for key, child in value.items()}
        return {key: child for key, child in children.items() if child is not _LEFT_OUT} or _LEFT_OUT
    values = [_matching(child, [*keys, str(i)], matches) for i, child in enumerate(value)]
    if all(child is _LEFT_OUT for child in values):
        return _LEFT_OUT
    return type(value)(None if child is _LEFT_OUT else child for child in values)


def _numpy_cast(dtype: Any) -> Any:
    if isinstance(dtype, Mapping):
        return {pattern: _numpy_cast(rule) for pattern, rule in dtype.items()}
    return numpy_dtype("dtype=…", dtype) if isinstance(dtype, torch.dtype) else dtype
