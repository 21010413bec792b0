"""Save a tree of arrays as one commit: the arguments of `save`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Unpack

import msgspec
import xxhash

from tstore.checkpoint.checkpoint import Checkpoint
from tstore.checkpoint.jobs import StreamedArray, write_jobs
from tstore.checkpoint.leaves import PerHost, Shards, as_values
from tstore.checkpoint.options import CommitOptions, CommitSettings, SaveOptions, complete
from tstore.checkpoint.structure import flatten
from tstore.core.format.arguments import checked_index, checked_step, quote
from tstore.core.format.tree_document import host_path
from tstore.core.runtime.pool import run
from tstore.core.steps import step_tag
from tstore.core.store import Store, opened
from tstore.core.transactions.attempts import Attempt
from tstore.core.transactions.membership import Membership
from tstore.errors import InvalidArgument
from tstore.quantization.policy import Bits, MinSqnr, QuantizeRules, Rules, Target

__all__ = ["checked_order", "checkpoint_to_save", "save"]

_NOT_VALUES = (Shards, StreamedArray, PerHost)  # leaves that are not converted to a NumPy array


@complete(CommitOptions, CommitSettings)
async def checkpoint_to_save(
    tree: Any,
    step: int,
    *,
    host: int = 0,
    hosts: int = 1,
    attempt: str | None = None,
    codecs: QuantizeRules | Target = None,
    **options: Unpack[CommitOptions],
) -> Checkpoint:
    """Return the checkpoint that the arguments of `save` describe; raise `InvalidArgument` if one is invalid."""
    step, settings = checked_step(step), CommitSettings(**options)
    metadata = settings.metadata(step)
    host, hosts = checked_index("host", host), checked_index("hosts", hosts)
    if hosts != 1 or host != 0:
        Membership.from_arguments(step_tag(step), host, hosts, attempt)
    document, leaves = flatten(tree, hosts)
    leaves = {p: leaf if isinstance(leaf, _NOT_VALUES) else as_values(p, leaf) for p, leaf in leaves.items()}
    if any(isinstance(leaf, PerHost) for leaf in leaves.values()):
        leaves = dict(_of_host(path, leaf, host, hosts) for path, leaf in leaves.items())
    rules = await _rules(codecs, leaves, hosts)
    jobs = write_jobs(leaves, rules, host, hosts)  # raises for an invalid leaf; there is no store yet
    reserved = {"structure": document}
    replicated: Mapping[str, bytes] = {}
    if hosts > 1:
        from tstore.checkpoint.replicated import checksums

        replicated = await run(checksums, document, leaves)
    return Checkpoint(
        step,
        jobs,
        settings,
        metadata,
        reserved,
        xxhash.xxh3_128_digest(msgspec.json.encode([settings.attributes, reserved])),
        host,
        hosts,
        None if hosts == 1 and attempt is None else Attempt.passed_or_detected(attempt, hosts),
        replicated=replicated,
    )


@complete(SaveOptions, checkpoint_to_save)
async def save(
    store: str | os.PathLike[str] | Store,
    tree: Any,
    step: int,
    **options: Unpack[SaveOptions],
) -> int:
    """Save a tree of arrays as one atomic commit and return its version. Durable on return.

    The store is created if there is none. To save from many hosts, each calls this with the same tree structure,
    `step`, `hosts` and `attempt`, and with its own `host`.

    Parameters
    ----------
    tree
        Nested dicts, lists, tuples and dataclasses of arrays (of NumPy, or a library whose arrays NumPy can take),
        `Shards`, scalars, and `PerHost` for values that differ between hosts. All others must be equal on every
        host, and one host writes each array. Do not change the arrays before this returns.
    host, hosts, attempt
        The number of this host, the number of hosts, and a token that differs each time the job is started; by
        default it is detected under srun and under one agent of torchrun (see the guide on operation). To save
        other values as a step whose save has failed, pass another token on every host, as a `Checkpointer` does.
    codecs
        None, "lossless", an eXmY format for all float arrays, or rules by path pattern (the first match
        applies); each chunk has its own exponent offset. On one host, `MinSqnr(30)` and `Bits(5)` choose formats.
    metrics, attributes
        Numbers for the history (NaN never counts as the best), and JSON attributes of the root group. Every host
        passes the same ones.
    tags
        Names for this version, set by the same commit. A tag that is in use moves here.
    durability, timeout
        With durability "none" a power failure may undo the commit. `timeout` is how long to wait for the other
        hosts, in seconds.
    overwrite
        Whether to replace the step if it is already saved. The old checkpoint stays until the new one is
        committed, and after that in the history, as its version.
    priority
        With "low" the save uses fewer threads, and pauses while the main thread is busy; with "normal" it does
        neither. By default only a save in the background has low priority, once its values are staged.

    Raises
    ------
    `AlreadyExists` (the step is already saved), `Conflict` (another writer saved the step to be overwritten),
    `Inconsistent` (hosts disagree), `DeadlineExceeded` (names the absent hosts), `NotFinite`, `InvalidArgument`,
    `StorageFull`, `CommitOutcomeUnknown`. Earlier commits are unchanged. After an error the step is not saved, and
    never will be, with two exceptions: after `DeadlineExceeded`, absent hosts may still deliver their parts. After
    `CommitOutcomeUnknown`, repeat the save to find out: it raises `AlreadyExists` if the step is saved, or returns
    the version if it has several hosts and the same attempt.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> tree = {"layers": {0: np.zeros((4, 3), "float32")}, "epoch": 2}
    >>> tstore.save("memory://of-save", tree, step=7, metrics={"loss": 0.5})
    1
    >>> tstore.steps("memory://of-save")
    [7]
    """
    checkpoint = await checkpoint_to_save(tree, step, **options)
    async with opened(store, "a") as target:
        return (await checkpoint.save(target)).version


def _of_host(path: str, leaf: Any, host: int, hosts: int) -> tuple[str, Any]:
    """Return the path and the part of a leaf that this host saves: for a `PerHost`, the bytes of its value."""
    if not isinstance(leaf, PerHost):
        return path, leaf
    from tstore.checkpoint.per_host import encoded

    data = encoded(path, leaf.value)
    values = data if hosts == 1 else Shards(data.shape, data.dtype, [((slice(0, len(data)),), data)])
    return host_path(path, host), values


def checked_order(step: Any, tree: Any) -> int:
    """Return a step; raise `InvalidArgument` for an invalid one, with a hint if the tree was passed first."""
    try:
        return checked_step(step)
    except InvalidArgument:
        if isinstance(tree, int):
            raise InvalidArgument(f"step {quote(step)}: the step comes first, as in save({tree}, state)") from None
        raise


async def _rules(codecs: QuantizeRules | Target, leaves: Mapping[str, Any], hosts: int) -> Rules:
    """Return the rules for the codecs of the leaves.

    Raise `InvalidArgument` for a pattern that matches no leaf, and for a target if a host has only a part of an
    array.
    """
    if not isinstance(codecs, MinSqnr | Bits):
        rules = Rules({} if codecs is None else codecs)
        rules.check(leaves)
        if not rules.targets:
            return rules
    if hosts > 1 or any(isinstance(leaf, Shards) for leaf in leaves.values()):
        raise InvalidArgument(
            f"codecs={codecs}: the choice depends on all values of an array, but one of several hosts has "
            "only its own part; save with rules or without codecs, and then call tstore.quantize"
        )
    from tstore.quantization.studied_plan import rules_for

    return await rules_for(codecs, dict(leaves))
