"""Checkpoints: a nested structure of arrays as one commit, saved by any number of hosts and restored by others.

The checkpoint of step 100 is the commit with the tag `step/100`. Its tree consists of the arrays alone; the root
group's attributes hold the structure document (`structure`). Chunks equal to those of the newest step before it
are referenced, not written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tstore.chunks.grid import Selection, default_chunks
from tstore.chunks.metadata import ArrayMeta, Codecs
from tstore.chunks.packed import is_packed
from tstore.chunks.writer import WriteJob
from tstore.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    SnapshotExpired,
    SourceCondemned,
    StructureMismatch,
)
from tstore.group import checked_timeout, detected_attempt
from tstore.policy import Bits, CodecRules, MinSqnr, Rules, Target
from tstore.quantization.plan import rules_for
from tstore.shards import Shards
from tstore.snapshot import Snapshot, snapshot_of
from tstore.store import Store, opened
from tstore.structure import (
    compile_patterns,
    flatten,
    paths_in,
    scalars_in,
    unflatten,
    unflatten_like,
)

__all__ = [
    "chosen_snapshot",
    "restore",
    "save",
    "step_tag",
    "steps",
    "structure_attributes",
]


_OVERTAKEN = 8
"""As often may newer steps and gcs overtake the reading of the newest step."""


def step_tag(step: int) -> str:
    """The tag of the checkpoint of a step."""
    return f"step/{step}"


async def save(
    where: str | os.PathLike[str] | Store,
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
    """The version of the one commit that holds the tree; it is durable on return.

    `tree` nests dicts, lists, tuples and dataclasses; its leaves are NumPy arrays, `Shards`, and scalars.
    Many hosts call with the same tree structure, `step`, `hosts` and `attempt` (see the README) and each its
    own `host`; an array that is no `Shards` is the same on every host and written by one of them.
    `codecs`: None, "lossless", an eXmY format for all float arrays, or rules by path pattern, first match first,
    where chunks have exponent offsets of their own; or, of one host, `MinSqnr(30)` or `Bits(5)`: see `quantize`.
    `metrics` go into the history, `attributes` (JSON) into the root group.

    Raises `AlreadyExists` (the step is saved already), `Inconsistent` (hosts disagree), `DeadlineExceeded`
    (names the absent hosts), `NotFinite`, `InvalidArgument`, `StorageFull`, `CommitOutcomeUnknown`. After an
    error the step is not saved and what was saved before still is.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise InvalidArgument(f"step {step!r}: expected a whole number from 0 on")
    checked_timeout(timeout)  # before any data is written
    document, leaves = flatten(tree)
    rules = await _rules(codecs, leaves, hosts)
    structure = {**(attributes or {}), **structure_attributes(document)}
    tag = step_tag(step)

    async def once(store: Store, attempt: str | None, *, anew: bool) -> int:
        tx = store.transaction(
            message,
            tag,
            durability=durability,
            name=tag if hosts > 1 or host != 0 else None,
            host=host,
            hosts=hosts,
            attempt=attempt,
            facts={"step": step, **({"metrics": dict(metrics)} if metrics else {})},
        )
        try:
            base = await tx.base()  # not a snapshot of its own: a rival's commit of this step is then a conflict
            if tag in base.tags:
                return await _saved_already(store, step, base.tags[tag], tx.id)
            prior = None if anew else await _newest_step(store, base.tags, base.version)
            jobs = _jobs(leaves, rules.codecs, prior, host, hosts)
            await tx.replace_all(xxhash.xxh3_128_digest(msgspec.json.encode(structure)))
            if host == 0:
                await tx.create_group("", structure)
            await tx.write_arrays(jobs)
            return await tx.commit(timeout)
        except BaseException:
            await tx.abort()
            raise

    async with opened(where) as store:
        try:
            return await once(store, attempt, anew=False)
        except SourceCondemned:  # every host of a group learns this, as the gc's record stands for good
            token = attempt if attempt is not None else detected_attempt(os.environ)
            return await once(store, None if token is None else f"{token}.anew", anew=True)


async def _rules(codecs: CodecRules | Target, leaves: Mapping[str, Any], hosts: int) -> Rules:
    """The codecs of every leaf, by rules or by its data; `InvalidArgument` for a rule that matches none."""
    if not isinstance(codecs, MinSqnr | Bits):
        rules = Rules(codecs)
        rules.check(leaves)
        return rules
    if hosts > 1 or any(isinstance(leaf, Shards) for leaf in leaves.values()):
        raise InvalidArgument(
            f"codecs={codecs}: the choice depends on all values of an array, and a host of a group sees only its "
            "own; save with rules or without codecs, and then call tstore.quantize"
        )
    return await rules_for(codecs, {path: np.asarray(leaf) for path, leaf in leaves.items()})


async def _saved_already(store: Store, step: int, version: int, transaction: str) -> int:
    """The version, if it is this very transaction's: the group committed, and this host calls again."""
    if (await store.log.record(version)).transaction == transaction:
        return version
    raise AlreadyExists(
        f"{store.url}: step {step} is saved already, as version {version}; it was left as it is. Save under "
        "another step"
    )


def _jobs(
    leaves: Mapping[str, Any],
    chosen: Callable[[str, np.dtype[Any]], Codecs],
    prior: Snapshot | None,
    host: int,
    hosts: int,
) -> list[WriteJob]:
    """What this host writes of every leaf, to be compared with the same arrays of the prior step."""
    metas: dict[Any, ArrayMeta] = {}
    jobs = []
    for path, leaf in leaves.items():
        job = _job(path, leaf, chosen(path, leaf.dtype), metas, host, hosts)
        node = prior.tree.nodes.get(path) if prior is not None else None
        if node is not None and node.document == job.meta.document and job.pieces:
            job.prior = node
        jobs.append(job)
    return jobs


def structure_attributes(document: list[Any]) -> dict[str, Any]:
    """The attributes of the root group that keep a structure document."""
    return {"tstore": {"structure": document}}


def _job(path: str, leaf: Any, codecs: Codecs, metas: dict[Any, ArrayMeta], host: int, hosts: int) -> WriteJob:
    """What this host writes of a leaf."""
    if isinstance(leaf, Shards):
        meta = _meta(metas, leaf.shape, leaf.dtype, leaf.shard_shape, codecs)
        return WriteJob(path, meta, list(_shard_pieces(path, leaf, meta)))
    values = np.asarray(leaf)
    try:
        meta = _meta(metas, values.shape, values.dtype, None, codecs)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from None
    owner = xxhash.xxh3_64_intdigest(path.encode()) % hosts if hosts > 1 else host
    mine = owner == host and meta.chunk_count > 0
    return WriteJob(path, meta, [((0,) * values.ndim, values)] if mine else [])


def _meta(
    metas: dict[Any, ArrayMeta],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    shard_shape: tuple[int, ...] | None,
    codecs: Codecs,
) -> ArrayMeta:
    key = (shape, dtype, shard_shape, codecs if codecs is None or isinstance(codecs, str) else repr(codecs))
    found = metas.get(key)
    if found is None:
        chunks = default_chunks(shape, dtype.itemsize, shard_shape)
        found = metas[key] = ArrayMeta.of(shape, dtype, chunks, codecs)
    return found


def _shard_pieces(path: str, leaf: Shards, meta: ArrayMeta) -> Iterator[tuple[tuple[int, ...], Any]]:
    for index, values in leaf.parts:
        if values is None:
            raise InvalidArgument(f"{path}: the shard at {index} has no values; only a restore fills such")
        if values.size == 0:
            continue
        for s, n, c in zip(index, meta.shape, meta.chunks, strict=True):
            if s.start % c or (s.stop % c and s.stop != n):
                raise InvalidArgument(
                    f"{path}: the shard at {index} does not lie on chunks of {meta.chunks}, so another host "
                    "would write the same chunk; pass shard_shape=…, the shape of a full shard, on every host"
                )
        yield tuple(s.start // c for s, c in zip(index, meta.chunks, strict=True)), values


async def _newest_step(store: Store, tags: Mapping[str, int], newest: int) -> Snapshot | None:
    found = _steps(tags)
    try:
        return await snapshot_of(store.log, tags[step_tag(found[-1])], newest) if found else None
    except SnapshotExpired:  # a gc came between, and left a newer step
        return None


def _steps(tags: Mapping[str, int]) -> list[int]:
    return sorted(int(m[1]) for tag in tags if (m := re.fullmatch(r"step/(\d+)", tag)))


async def steps(where: str | os.PathLike[str] | Store) -> list[int]:
    """The steps that are saved, in increasing order."""
    async with opened(where, "r") as store:
        return _steps(await store.tags())


async def restore(
    where: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    target: Any = None,
    only: str | list[str] | None = None,
    packed: bool = False,
) -> Any:
    """The tree of a checkpoint, as NumPy arrays: of a step, a version or tag (`at`), or the newest step.

    `target` (leaves with `shape` and `dtype`, or `Shards` for a part of an array) gives the structure that is
    returned, and must fit: every path, shape and dtype that does not is listed in one `StructureMismatch`.
    Without it, dataclasses come back as dicts. `only="params/**"` restores the paths that match; the target's
    other leaves stay as they are. Only the chunks that are needed are read. With `packed`, arrays in eXmY come
    back as `exmy.Quantized`, as they are stored, without decoding.
    Where newer steps and a gc overtake the reading of the newest step, a newer one is read.
    Raises `NotFound`, `SnapshotExpired` (a gc removed the version), `Corrupt`, `StructureMismatch`,
    `InvalidArgument`.
    """
    if step is not None and at is not None:
        raise InvalidArgument("step=… and at=… both name a version; pass one of them")
    async with opened(where, "r") as store:
        for _ in range(1 if step is not None or at is not None else _OVERTAKEN):
            try:
                return await _restored(await chosen_snapshot(store, step, at), target, only, packed)
            except SnapshotExpired as error:
                expired = error
        raise expired


async def _restored(snapshot: Snapshot, target: Any, only: str | list[str] | None, packed: bool) -> Any:
    name = snapshot.where
    document = _document(snapshot)
    wanted = list(paths_in(document))
    if only is not None:
        matches = compile_patterns(only)
        wanted = [p for p in wanted if matches(p)]
        if not wanted:
            raise NotFound(f"{name}: no array matches only={only!r}; see `tstore ls` for what there is")
    if target is None:
        return unflatten(document, await _read(snapshot, dict.fromkeys(wanted), packed))
    given, leaves = flatten(target)
    if only is not None:
        leaves = {p: v for p, v in leaves.items() if matches(p)}
    scalars = _check_fit(name, snapshot, document, wanted, given, leaves, partial=only is not None)
    return unflatten_like(target, await _read(snapshot, leaves, packed), scalars)


async def chosen_snapshot(store: Store, step: int | None, at: int | str | None) -> Snapshot:
    """The snapshot of a step, of a version or tag, or else of the newest step (or version, without steps)."""
    if at is not None:
        return await store.snapshot(at)
    newest = await store.snapshot()
    found = _steps(newest.tags)
    if step is not None:
        if step not in found:
            raise NotFound(f"{store.url} has no step {step}; its steps are: {found[-10:] or 'none'}")
        return await snapshot_of(store.log, newest.tags[step_tag(step)], newest.version)
    if found:
        return await snapshot_of(store.log, newest.tags[step_tag(found[-1])], newest.version)
    if newest.version == 0:
        raise NotFound(f"{store.url} holds no commit yet; save one first")
    return newest


def _document(snapshot: Snapshot) -> list[Any]:
    """The structure that was saved; nested dicts by path where there is none or arrays came or went since."""
    saved = snapshot.attributes().get("tstore", {}).get("structure")
    if saved is not None and sorted(paths_in(saved)) == snapshot.paths():
        return list(saved)
    root: dict[str, Any] = {}
    for path in snapshot.paths():
        *heads, last = path.split("/")
        group = root
        for head in heads:
            group = group.setdefault(head, {})
        group[last] = ["array", path]

    def node(group: Any) -> list[Any]:
        if isinstance(group, list):
            return group
        return ["dict", [[["str", k], node(v)] for k, v in group.items()]]

    return node(root)


async def _read(snapshot: Snapshot, leaves: Mapping[str, Any], packed: bool) -> dict[str, Any]:
    """The arrays at these paths; a `Shards` leaf gets its parts, any other the whole array."""
    nodes = snapshot.tree.nodes
    results: dict[str, Any] = {}
    wanted: list[tuple[str, Selection | None, npt.NDArray[Any]]] = []
    shards: list[tuple[str, Shards, list[npt.NDArray[Any]]]] = []
    for path, leaf in leaves.items():
        meta = nodes[path].meta
        if packed and is_packed(meta):
            if isinstance(leaf, Shards):
                raise InvalidArgument(f"{path}: packed=True gives whole arrays, not Shards; leave one of them out")
            results[path] = await snapshot.read_packed(path)
        elif not isinstance(leaf, Shards):
            out = results[path] = np.empty(meta.shape, meta.dtype)
            wanted.append((path, None, out))
        else:
            outs = []
            for index, _ in leaf.parts:
                out = np.empty(tuple(s.stop - s.start for s in index), meta.dtype)
                wanted.append((path, Selection(tuple(range(s.start, s.stop) for s in index)), out))
                outs.append(out)
            shards.append((path, leaf, outs))
    await snapshot.read_many(wanted)
    results.update({path: leaf.filled(outs) for path, leaf, outs in shards})
    return results


def _check_fit(
    name: str,
    snapshot: Snapshot,
    document: list[Any],
    wanted: list[str],
    given: list[Any],
    leaves: Mapping[str, Any],
    *,
    partial: bool,
) -> dict[str, Any]:
    """The stored Python scalars by path; raises one `StructureMismatch` for all that does not fit."""
    stored, asked = scalars_in(document), {} if partial else scalars_in(given)
    kept = {} if partial else stored
    there = {*wanted, *kept}
    missing = [p for p in (*leaves, *asked) if p not in there]
    unexpected = [p for p in (*wanted, *kept) if p not in leaves and p not in asked]
    mismatched = []
    for path in wanted:
        if path not in leaves:
            continue
        meta, leaf = snapshot.tree.nodes[path].meta, leaves[path]
        shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype).newbyteorder("=")
        if shape != meta.shape or dtype != meta.dtype:
            mismatched.append(f"{path}: stored {meta.dtype}{list(meta.shape)}, target {dtype}{list(shape)}")
    for path, value in asked.items():
        if path in kept and type(kept[path]) is not type(value):
            mismatched.append(f"{path}: stored a {type(kept[path]).__name__}, target a {type(value).__name__}")
    if missing or unexpected or mismatched:
        raise StructureMismatch(name, missing, unexpected, mismatched)
    return stored
