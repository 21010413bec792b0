"""Restoring checkpoints as tensors, into tensors, and into modules and optimizers."""

from __future__ import annotations

import os
from collections.abc import Coroutine
from typing import Any

import torch.distributed as dist

from tstore.checkpoint import restore as core
from tstore.checkpoint.structure import unflatten
from tstore.errors import InvalidArgument, TStoreError
from tstore.format.tree_document import stored_document
from tstore.runtime import pool
from tstore.snapshot import Snapshot
from tstore.steps import chosen_snapshot
from tstore.store import Store, opened
from tstore.torch.leaves import Target, from_values
from tstore.torch.processes import Processes
from tstore.torch.stateful import Stored, load, state_tree
from tstore.torch.tensors import torch_dtype

__all__ = ["restore"]


def restore(
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    target: Any = None,
    only: str | list[str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Coroutine[Any, Any, Any]:
    """Return a checkpoint as a tree of tensors: a step, a version or tag (`at`), by default the newest step.

    With neither a step nor `at`, every process of the process group makes this call, and all restore the same
    step, even if a newer one is saved meanwhile. Otherwise each process restores by itself.

    Parameters
    ----------
    target
        The tree to restore into, in place: tensors, `DTensor`s on any mesh, and objects with a `state_dict`, such
        as modules and optimizers, for example `{"model": model, "optimizer": optimizer, "epoch": 0}`. Each process
        reads only what its tensors hold. The target must fit: one `StructureMismatch` lists every path that is
        missing or unexpected, or has another shape or dtype. It is returned, with the scalars of the checkpoint.
        Without a target the result is a nested dict of whole tensors on the CPU.
    only
        A pattern such as "model/**", or a list of patterns: only tensors with a matching path are restored.
    group
        The process group whose processes restore the same step, by default all.

    Raises
    ------
    As `tstore.restore`. If a read fails, a target may have old and new values.
    """
    processes = Processes.of(group) if step is None and at is None else Processes(0, 1, None, None)
    return _restore(store, step, at, target, only, processes)


async def _restore(
    store: str | os.PathLike[str] | Store,
    step: int | None,
    at: int | str | None,
    target: Any,
    only: str | list[str] | None,
    processes: Processes,
) -> Any:
    if step is not None and at is not None:
        raise InvalidArgument("step=… and at=… both name a version; pass one of them")
    async with opened(store, "r") as source:
        if target is None and processes.hosts == 1:
            return from_values(await core.restore(source, step, at=at, only=only))
        snapshot = await _agreed_snapshot(source, step, at, processes)
        if target is None:
            return from_values(await core.restore(source, at=snapshot.version, only=only))
        state = Target(state_tree(target, _stored_tree(snapshot)))
        restored = await core.restore(source, at=snapshot.version, target=state.tree, only=only)
        return load(target, state.finish(restored))


async def _agreed_snapshot(
    source: Store, step: int | None, at: int | str | None, processes: Processes
) -> Snapshot:
    """Return the snapshot to restore, of the version that the first process chose."""
    if processes.hosts == 1:
        return await chosen_snapshot(source, step, at)
    chosen: int | TStoreError | None = None
    if processes.host == 0:
        try:
            chosen = (await chosen_snapshot(source, step, at)).version
        except TStoreError as error:
            chosen = error
    version = (await pool.run(processes.gather, chosen))[0]
    if isinstance(version, TStoreError):
        raise version
    return await source.snapshot(version)


def _stored_tree(snapshot: Snapshot) -> Any:
    """Return the saved tree with `Stored` for each array, {} if another program has changed its arrays."""
    document = stored_document(snapshot.reserved_attributes().get("structure"), snapshot.paths())
    if document is None:
        return {}
    nodes = snapshot.tree.nodes
    arrays = {}
    for path in snapshot.paths():
        meta = nodes[path].meta
        arrays[path] = Stored(meta.shape, torch_dtype(path, meta.dtype))
    return unflatten(document, arrays)
