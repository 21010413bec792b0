"""Saving trees of tensors, modules and optimizers from the processes of a process group."""

from __future__ import annotations

import os
from collections.abc import Coroutine, Mapping
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from tstore.checkpoint import save as core
from tstore.checkpoint.union import Outline, united
from tstore.quantization.policy import CodecRules, Target
from tstore.runtime import world
from tstore.store import Store
from tstore.torch.leaves import to_values
from tstore.torch.processes import Processes
from tstore.torch.stateful import state_tree

__all__ = ["save"]


def save(
    store: str | os.PathLike[str] | Store,
    tree: Any,
    step: int,
    *,
    group: dist.ProcessGroup | None = None,
    host: int | None = None,
    hosts: int | None = None,
    attempt: str | None = None,
    codecs: CodecRules | Target = None,
    metrics: Mapping[str, float] | None = None,
    attributes: Mapping[str, Any] | None = None,
    message: str = "",
    durability: Literal["fsync", "none"] = "fsync",
    timeout: float | None = None,
) -> Coroutine[Any, Any, int]:
    """Save a tree of tensors as one atomic commit and return its version. Durable on return.

    Every process of the process group calls this with its own part of the state. The processes agree through the
    group before anything is written, so an invalid tree in one of them is an error in all.

    Parameters
    ----------
    tree
        Nested dicts, lists and tuples of tensors, scalars, and objects with a `state_dict`: modules (FSDP2 and
        tensor parallel ones too), optimizers, schedulers. The state of an optimizer is saved under the names that
        its parameters have in a module of the tree. Each region of a `DTensor` is written by one of the processes
        that hold it. Any other tensor must be equal in every process that has its path, and one of these writes
        it; processes may have different paths, as pipeline stages do. Do not change the tensors before this
        returns.
    group
        The process group whose processes save together, by default all.
    host, hosts, attempt
        By default from the process group, with a new random attempt for each save. With `hosts=1` this process
        saves alone, without the others.
    codecs, metrics, attributes, message, durability, timeout
        As in `tstore.save`.

    Raises
    ------
    As `tstore.save`, and `InvalidArgument`, with the path, for a tensor without values (`Partial`, meta device),
    in another layout than strided, or of a dtype without whole bytes.
    """
    plan = _plan(tree, group, host, hosts, attempt)
    return core.save(
        store,
        plan.tree,
        step,
        host=plan.host,
        hosts=plan.hosts,
        attempt=plan.attempt,
        codecs=codecs,
        metrics=metrics,
        attributes=attributes,
        message=message,
        durability=durability,
        timeout=timeout,
    )


class _Plan(NamedTuple):
    """What this process passes to the core's `save`."""

    tree: Any
    host: int
    hosts: int
    attempt: str | None


def _plan(
    tree: Any, group: dist.ProcessGroup | None, host: int | None, hosts: int | None, attempt: str | None
) -> _Plan:
    """Return the tree of NumPy arrays to save and the processes that save it, on which they have agreed."""
    if hosts is not None or host is not None:
        return _Plan(to_values(state_tree(tree))[0], host or 0, 1 if hosts is None else hosts, attempt)
    processes = Processes.of(group)
    if processes.hosts == 1:
        return _Plan(to_values(state_tree(tree))[0], 0, 1, None)
    values, outline, failure = None, None, None
    try:
        values, teams = to_values(state_tree(tree))
        outline = Outline.of(values, teams)
    except Exception as error:  # the others must learn of it
        failure = error
    token = world.token(12) if attempt is None else attempt
    proposals = processes.exchange((b"" if outline is None else outline.digest(), token), failure)
    assert outline is not None
    members: dict[bytes, list[int]] = {}
    for number, (digest, _) in enumerate(proposals):
        members.setdefault(digest, []).append(number)
    if len(members) > 1:
        first = processes.host in [hosts[0] for hosts in members.values()]
        outlines = [o for o in processes.gather(outline if first else None) if o is not None]
        values = united(values, outline, outlines, list(members.values()), processes.host)
    return _Plan(values, processes.host, processes.hosts, proposals[0][1])
