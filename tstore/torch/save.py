"""Save trees of tensors, modules and optimizers from all processes of a process group."""

from __future__ import annotations

import os
from collections.abc import Coroutine
from typing import Any, NamedTuple, Unpack

import torch.distributed as dist

from tstore.checkpoint import background
from tstore.checkpoint import save as core
from tstore.checkpoint.background import BackgroundSave, InFlight, StagingChoice
from tstore.checkpoint.options import SharedOptions, complete
from tstore.checkpoint.save import checkpoint_to_save
from tstore.checkpoint.union import Outline, united
from tstore.core.format.arguments import quote
from tstore.core.runtime import world
from tstore.core.store import Store
from tstore.errors import InvalidArgument
from tstore.torch.leaves import to_values
from tstore.torch.processes import Processes
from tstore.torch.stateful import state_tree

__all__ = ["Plan", "plan_save", "save", "save_async"]


@complete(SharedOptions, checkpoint_to_save)
def save(
    store: str | os.PathLike[str] | Store,
    tree: Any,
    step: int,
    *,
    group: dist.ProcessGroup | None = None,
    host: int | None = None,
    hosts: int | None = None,
    attempt: str | None = None,
    **options: Unpack[SharedOptions],
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
        that hold it. A tensor subclass is saved as its inner tensors, as `__tensor_flatten__` names them, and a
        `BytesIO` as an array of bytes. Any other tensor must be equal in every process that has its path, and one
        of these writes it; processes may have different paths, as pipeline stages do. State that differs between
        processes, such as that of a random number generator or a data loader, goes into a `tstore.PerHost`.
        Do not change the tensors before this returns.
    group
        The process group whose processes save together, by default all.
    host, hosts, attempt
        By default from the process group, with a new random attempt for each save. With `hosts=1` this process
        saves alone, without the others.
    options
        `codecs` and all others as in `tstore.save`.

    Raises
    ------
    As `tstore.save`, and `InvalidArgument`, with the path, for a tensor without values (`Partial`, meta device),
    with a layout other than strided, or of a dtype without whole bytes.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> tstore.torch.save("memory://of-torch-save", {"model": model, "optimizer": optimizer}, step=7)
    1
    """
    plan = _checked_plan(tree, group, host, hosts, attempt)
    return core.save(
        store,
        plan.tree,
        step,
        host=plan.host,
        hosts=plan.hosts,
        attempt=plan.attempt,
        **options,
    )


@complete(SharedOptions, checkpoint_to_save)
def save_async(
    store: str | os.PathLike[str] | Store,
    tree: Any,
    step: int,
    *,
    group: dist.ProcessGroup | None = None,
    host: int | None = None,
    hosts: int | None = None,
    attempt: str | None = None,
    staging: StagingChoice = "memory",
    in_flight: InFlight = "queue",
    **options: Unpack[SharedOptions],
) -> Coroutine[Any, Any, BackgroundSave]:
    """Start a save in the background; return its `BackgroundSave` once the tensors may be changed.

    The arguments are those of `save`, and `staging` and `in_flight` those of `tstore.save_async`. Tensors of a GPU
    are copied to the host in a separate stream. If all tensors are on GPUs, nothing is copied twice.

    Raise as `tstore.save_async` does, and `InvalidArgument` as `save` does.
    """
    plan = _checked_plan(tree, group, host, hosts, attempt)
    return background.save_async(
        store,
        plan.tree,
        step,
        host=plan.host,
        hosts=plan.hosts,
        attempt=plan.attempt,
        staging="reference" if plan.copied and staging == "memory" else staging,
        in_flight=in_flight,
        **options,
    )


class Plan(NamedTuple):
    """The input of one process for the core's `save`; `copied` says whether its tensors may be changed already.

    `failures` has for each process why an earlier save failed, or "".
    """

    tree: Any
    host: int
    hosts: int
    attempt: str | None
    copied: bool
    failures: list[str]


def plan_save(tree: Any, processes: Processes, attempt: str | None, failure: str = "") -> Plan:
    """Convert this process's part of a tree, agree on the tree with the other processes, and return the plan.

    If the conversion of the tree raises in one process, this raises in all. `failure` is why an earlier save of
    this process failed.
    """
    if processes.group is None or processes.hosts == 1:
        values = to_values(state_tree(tree))
        return Plan(values.tree, processes.host, processes.hosts, attempt, values.copied, [])
    outline, error = None, None
    try:
        values = to_values(state_tree(tree))
        outline = Outline.of(values.tree, values.teams)
    except Exception as raised:  # reported to the others
        error = raised
    token = world.token(12) if attempt is None else attempt
    proposals = processes.exchange((b"" if outline is None else outline.digest(), token, failure), error)
    assert outline is not None
    united_tree = values.tree
    if len({digest for digest, _, _ in proposals}) > 1:
        outline = outline.with_checksums(values.tree)
        hosts_by_digest: dict[bytes, list[int]] = {}
        for number, digest in enumerate(processes.gather(outline.digest())):
            hosts_by_digest.setdefault(digest, []).append(number)
        is_first = processes.host in [hosts[0] for hosts in hosts_by_digest.values()]  # sends the outline
        outlines = [o for o in processes.gather(outline if is_first else None) if o is not None]
        united_tree = united(values.tree, outline, outlines, list(hosts_by_digest.values()), processes.host)
    failures = [reason for _, _, reason in proposals]
    return Plan(united_tree, processes.host, processes.hosts, proposals[0][1], values.copied, failures)


def _checked_plan(
    tree: Any, group: dist.ProcessGroup | None, host: int | None, hosts: int | None, attempt: str | None
) -> Plan:
    if isinstance(tree, str | os.PathLike):
        raise InvalidArgument(f"the tree is {quote(tree)}; the store comes first, as in save(url, tree, step)")
    if host is None and hosts is None:
        return plan_save(tree, Processes.of(group), attempt)
    return plan_save(tree, Processes(host or 0, 1 if hosts is None else hosts, None, None), attempt)
