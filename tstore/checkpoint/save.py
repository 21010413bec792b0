"""Saving a tree of arrays as one commit, which references the unchanged chunks of the newest step."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tstore.checkpoint.leaves import Shards, as_values
from tstore.checkpoint.structure import flatten
from tstore.data.writer import WriteJob
from tstore.errors import AlreadyExists, Conflict, InvalidArgument, SnapshotExpired, SourceCondemned
from tstore.format.arguments import (
    checked_attributes,
    checked_index,
    checked_metadata,
    checked_metrics,
    checked_step,
    checked_text,
)
from tstore.format.array_metadata import ArrayMeta
from tstore.format.codecs import Codecs
from tstore.format.grid import chunk_coordinates, chunk_counts, chunk_numbers, default_chunks
from tstore.format.tree import RESERVED_ATTRIBUTE
from tstore.quantization.plan import rules_for
from tstore.quantization.policy import Bits, CodecRules, MinSqnr, Rules, Target
from tstore.snapshot import Snapshot, snapshot_of
from tstore.steps import step_tag, steps_of
from tstore.storage.objects import Durability, checked_durability
from tstore.store import Store, opened
from tstore.transactions.cooperative import checked_commit_timeout
from tstore.transactions.membership import Membership, detected_attempt
from tstore.transactions.transaction import Transaction, staging_of

__all__ = ["save"]

ShardValues = tuple[tuple[int, ...], npt.NDArray[Any]]
"""The first chunk that a shard covers, and the shard's values."""

FindPrior = Callable[[Store, Mapping[str, int], int], Awaitable[Snapshot | None]]
"""Returns the snapshot whose unchanged chunks a save references, if any; takes a store, its tags, its version."""


async def save(
    store: str | os.PathLike[str] | Store,
    tree: Any,
    step: int,
    *,
    host: int = 0,
    hosts: int = 1,
    attempt: str | None = None,
    codecs: CodecRules | Target = None,
    metrics: Mapping[str, float] | None = None,
    attributes: Mapping[str, Any] | None = None,
    message: str = "",
    durability: Literal["fsync", "none"] = "fsync",
    timeout: float | None = None,
) -> int:
    """Save a tree of arrays as one atomic commit and return its version. Durable on return.

    The store is created if there is none. To save from many hosts, each calls this with the same tree structure,
    `step`, `hosts` and `attempt`, and with its own `host`.

    Parameters
    ----------
    tree
        Nested dicts, lists, tuples and dataclasses of arrays (of NumPy, or a library whose arrays NumPy can take),
        `Shards` and scalars. An array that is not a `Shards` must be equal on every host, and one host writes it.
        Do not change the arrays before this returns.
    host, hosts, attempt
        The number of this host, the number of hosts, and a token that differs each time the job is started; by
        default the token is detected from the environment (see the README).
    codecs
        None, "lossless", an eXmY format for all float arrays, or rules by path pattern (the first match
        applies); each chunk has its own exponent offset. On one host, `MinSqnr(30)` and `Bits(5)` choose formats.
    metrics, attributes
        Numbers for the history (NaN never counts as the best), and JSON attributes of the root group.
    durability, timeout
        With durability "none" a power failure may undo the commit. `timeout` is how long to wait for the other
        hosts, in seconds.

    Raises
    ------
    `AlreadyExists` (the step is saved already), `Inconsistent` (hosts disagree), `DeadlineExceeded` (names the
    absent hosts), `NotFinite`, `InvalidArgument`, `StorageFull`, `CommitOutcomeUnknown`. Earlier commits are
    unchanged. The step may still be saved after `CommitOutcomeUnknown`, or if other hosts finish this attempt.
    """
    step, message, metrics = checked_step(step), checked_text("message", message), checked_metrics(metrics)
    root_attributes = checked_attributes(attributes)
    if RESERVED_ATTRIBUTE in root_attributes:
        raise InvalidArgument(
            f"attributes[{RESERVED_ATTRIBUTE!r}] is reserved for the structure of the tree; use another key"
        )
    checked_commit_timeout(timeout)
    host, hosts = checked_index("host", host), checked_index("hosts", hosts)
    checked_durability(durability)
    if hosts != 1 or host != 0:
        Membership.from_arguments(step_tag(step), host, hosts, attempt)
    metadata = checked_metadata({"step": step, **({"metrics": metrics} if metrics else {})})
    document, leaves = flatten(tree)
    leaves = {path: leaf if isinstance(leaf, Shards) else as_values(path, leaf) for path, leaf in leaves.items()}
    rules = await _rules(codecs, leaves, hosts)
    metas: dict[Any, ArrayMeta] = {}  # the jobs come first: an invalid leaf raises before a store is created
    jobs = [_job(path, leaf, rules.codecs(path, leaf.dtype), metas, host, hosts) for path, leaf in leaves.items()]
    checkpoint = _Checkpoint(
        step, jobs, root_attributes, {"structure": document}, message, metadata, durability, host, hosts, timeout
    )
    async with opened(store, "a") as target:
        try:
            return await checkpoint.commit(target, attempt, _newest_step)
        except SourceCondemned:  # every host gets here: the record of the gc is permanent
            token = attempt if attempt is not None else detected_attempt(os.environ)
            return await checkpoint.commit(target, None if token is None else f"{token}.anew", _no_prior)


class _Checkpoint(NamedTuple):
    """One call of `save`: what this host writes, and the attributes and metadata of the commit.

    `attributes` are the caller's attributes of the root group, `reserved` those of tstore.
    """

    step: int
    jobs: Sequence[WriteJob]
    attributes: dict[str, Any]
    reserved: dict[str, Any]
    message: str
    metadata: dict[str, Any]
    durability: Literal["fsync", "none"]
    host: int
    hosts: int
    timeout: float | None

    async def commit(self, store: Store, attempt: str | None, find_prior: FindPrior) -> int:
        """Commit the checkpoint, with references to the unchanged chunks of a prior step; return its version."""
        tag = step_tag(self.step)
        tx = store.transaction(
            self.message,
            tag,
            durability=self.durability,
            name=tag if self.hosts > 1 else None,
            host=self.host,
            hosts=self.hosts,
            attempt=attempt,
            metadata=self.metadata,
        )
        try:
            staging = staging_of(tx)
            base = await staging.base()  # first, so that a concurrent save of this step conflicts
            if tag in base.tags:
                durability = checked_durability(self.durability)
                return await _repeated_commit(store, self.step, base.tags[tag], tx.id, durability)
            prior = await find_prior(store, base.tags, base.version)
            digest = xxhash.xxh3_128_digest(msgspec.json.encode([self.attributes, self.reserved]))
            await staging.replace_all(digest)
            if self.host == 0:
                await staging.set_root_attributes(self.attributes, self.reserved)
            await staging.write_arrays(_with_prior(self.jobs, prior))
            return await _commit_step(store, tx, self.step, self.timeout)
        except BaseException:
            await tx.abort()
            raise


async def _newest_step(store: Store, tags: Mapping[str, int], newest: int) -> Snapshot | None:
    steps = steps_of(tags)
    try:
        return await snapshot_of(store.log.reader, tags[step_tag(steps[-1])], newest) if steps else None
    except SnapshotExpired:  # expired by a gc after a newer step was saved
        return None


async def _no_prior(store: Store, tags: Mapping[str, int], newest: int) -> None:
    """Return None, so that every chunk is written."""


async def _rules(codecs: CodecRules | Target, leaves: Mapping[str, Any], hosts: int) -> Rules:
    """Return the rules for the codecs of the leaves; raise `InvalidArgument` for a pattern that matches none."""
    if not isinstance(codecs, MinSqnr | Bits):
        rules = Rules(codecs)
        rules.check(leaves)
        return rules
    if hosts > 1 or any(isinstance(leaf, Shards) for leaf in leaves.values()):
        raise InvalidArgument(
            f"codecs={codecs}: the choice depends on all values of an array, but one of several hosts has "
            "only its own part; save with rules or without codecs, and then call tstore.quantize"
        )
    return await rules_for(codecs, dict(leaves))


async def _commit_step(store: Store, tx: Transaction, step: int, timeout: float | None) -> int:
    """Commit and return the version; raise `AlreadyExists` if another commit of the same step came first."""
    tag = step_tag(step)
    try:
        return await tx.commit(timeout)
    except Conflict as conflict:
        version = (await store.tags()).get(tag) if f"tag {tag}" in conflict.paths else None
        if version is None:
            raise
        raise _already_exists(store, step, version) from conflict


async def _repeated_commit(store: Store, step: int, version: int, transaction: str, durability: Durability) -> int:
    """Return the version, durable, if this transaction made it; raise `AlreadyExists` if another one did."""
    if (await store.log.reader.record(version)).transaction == transaction:
        await store.log.make_durable(version, durability)
        return version
    raise _already_exists(store, step, version)


def _already_exists(store: Store, step: int, version: int) -> AlreadyExists:
    return AlreadyExists(
        f"{store.url}: step {step} is saved already, as version {version}, which is unchanged; save as "
        "another step"
    )


def _with_prior(jobs: Iterable[WriteJob], prior: Snapshot | None) -> Iterator[WriteJob]:
    """Yield the jobs, each with the same array of a prior step (if any) to compare its chunks with."""
    for job in jobs:
        node = prior.tree.nodes.get(job.path) if prior is not None else None
        same = node is not None and node.document == job.meta.document
        yield WriteJob(job.path, job.meta, job.regions, node if same else None)


def _job(path: str, leaf: Any, codecs: Codecs, metas: dict[Any, ArrayMeta], host: int, hosts: int) -> WriteJob:
    """Return the part of a leaf that this host writes."""
    if isinstance(leaf, Shards):
        meta = _meta(path, metas, leaf.shape, leaf.dtype, leaf.shard_shape, codecs)
        regions = list(_shard_regions(path, leaf, meta))
        _check_parts(path, meta, regions, alone=hosts == 1)
        return WriteJob(path, meta, regions)
    meta = _meta(path, metas, leaf.shape, leaf.dtype, None, codecs)
    owner = xxhash.xxh3_64_intdigest(path.encode()) % hosts if hosts > 1 else host
    regions = [((0,) * leaf.ndim, leaf)] if owner == host and meta.chunk_count > 0 else []
    return WriteJob(path, meta, regions)


def _meta(
    path: str,
    metas: dict[Any, ArrayMeta],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    shard_shape: tuple[int, ...] | None,
    codecs: Codecs,
) -> ArrayMeta:
    """Return the metadata of an array; arrays with the same arguments share theirs, through `metas`."""
    key = (shape, dtype, shard_shape, codecs if codecs is None or isinstance(codecs, str) else repr(codecs))
    meta = metas.get(key)
    if meta is None:
        chunks = default_chunks(shape, dtype.itemsize, shard_shape)
        try:
            meta = metas[key] = ArrayMeta.new(shape, dtype, chunks, codecs)
        except InvalidArgument as error:
            raise InvalidArgument(f"{path}: {error}") from None
    return meta


def _shard_regions(path: str, leaf: Shards, meta: ArrayMeta) -> Iterator[ShardValues]:
    """Yield the regions of the shards; raise `InvalidArgument` for a shard that covers part of a chunk."""
    for index, values in leaf.parts:
        if values is None:
            raise InvalidArgument(
                f"{path}: the shard at {index} has no values; pass its values, which only restore may leave out"
            )
        if values.size == 0:
            continue
        for s, n, c in zip(index, meta.shape, meta.chunks, strict=True):
            if s.start % c or (s.stop % c and s.stop != n):
                raise InvalidArgument(
                    f"{path}: the shard at {index} is not aligned with chunks of {meta.chunks}, so another host "
                    "would write the same chunk; pass shard_shape=…, the shape of a full shard, on every host"
                )
        yield tuple(s.start // c for s, c in zip(index, meta.chunks, strict=True)), values


def _check_parts(path: str, meta: ArrayMeta, regions: Sequence[ShardValues], *, alone: bool) -> None:
    """Raise `InvalidArgument` if parts overlap, or if the only host leaves out a part of the array."""
    chunks_of_regions = [
        chunk_numbers(
            [range(a, a + n) for a, n in zip(first, chunk_counts(values.shape, meta.chunks), strict=True)],
            meta.counts,
        )
        for first, values in regions
    ]
    numbers, times = np.unique(np.concatenate([np.empty(0, np.int64), *chunks_of_regions]), return_counts=True)
    if (times > 1).any():
        number = numbers[times > 1][0]
        overlapping = [
            _region(meta, first, v.shape)
            for (first, v), chunks in zip(regions, chunks_of_regions, strict=True)
            if number in chunks
        ]
        raise InvalidArgument(
            f"{path}: the shards at {overlapping[0]} and {overlapping[1]} overlap; pass each region once"
        )
    if alone and len(numbers) != meta.chunk_count:
        absent = np.setdiff1d(np.arange(len(numbers) + 1), numbers)[0]
        first = chunk_coordinates(absent, meta.counts)
        raise InvalidArgument(
            f"{path}: no shard covers {_region(meta, first, meta.chunks)} of shape {list(meta.shape)}; pass "
            "shards for all of the array, or hosts=… if other hosts save the rest"
        )


def _region(meta: ArrayMeta, first: Sequence[int], shape: Sequence[int]) -> str:
    """Return the index that selects a region, as text, from the region's first chunk and its shape."""
    starts = [i * c for i, c in zip(first, meta.chunks, strict=True)]
    sides = zip(starts, shape, meta.shape, strict=True)
    return "[" + ", ".join(f"{a}:{min(a + n, end)}" for a, n, end in sides) + "]"
