"""Cooperative transactions: many hosts, one commit; no coordinator, no barrier.

1. All hosts use one transaction name, one `attempt`, and know `hosts`. The id of the transaction is made of name
   and attempt, so that two incarnations of a job never meet in one transaction.
2. Each writes its packs and then one fragment `txn/<id>/part-<host>-of-<hosts>`, created if absent; a second,
   different one of the same host is refused, and so is another number of hosts.
3. A host whose fragment is durable looks whether all are there. Whoever sees the full set merges it: same
   metadata and structure, no chunk twice, every chunk present. Then it appends the record, reading every record
   from the lowest base among the fragments on, so that a late finisher meets an earlier commit of the same
   transaction and never makes a second. Creation is exclusive, so several may try.
4. A host that completed the set itself commits at once; the others give it a moment before they take over.
5. Every wait has a deadline, whose error names the absent hosts. A group that lost a host never commits.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from tstore import world
from tstore.codec import ArrayMeta
from tstore.errors import AlreadyExists, Conflict, DeadlineExceeded, Inconsistent, InvalidArgument
from tstore.kv.base import Durability
from tstore.log import Log
from tstore.manifest import INLINE_MANIFEST, Fragment, Manifest, ObjectRef, Record, encode, reference
from tstore.pool import uncancelled
from tstore.tree import Changes, Node, Tree

__all__ = ["Membership", "commit_group", "detected_attempt"]

DEFAULT_TIMEOUT = 300.0
_POLL_FIRST, _POLL_MOST = 0.005, 0.2
_GRACE = 0.25


class Membership(NamedTuple):
    """The place of one host in a group."""

    transaction: str
    name: str
    host: int
    hosts: int

    @staticmethod
    def of(name: str, host: int, hosts: int, attempt: str | None) -> Membership:
        """The membership; `InvalidArgument` where the host is out of range or the attempt is not known."""
        if hosts < 1 or not 0 <= host < hosts:
            raise InvalidArgument(
                f"host {host} of {hosts} does not exist: hosts are numbered from 0 to hosts - 1 = {hosts - 1}"
            )
        if not name:
            raise InvalidArgument("a cooperative transaction needs a name that all its hosts share")
        token = attempt if attempt is not None else detected_attempt(os.environ)
        if not token:
            raise InvalidArgument(
                f"transaction {name!r} of {hosts} hosts needs attempt=…: a token that is the same on every host "
                "and was never used by an earlier start of the job (job id and restart count); without it two "
                "incarnations of the job could mix in one checkpoint"
            )
        unique = xxhash.xxh3_128_hexdigest(f"{len(name)}:{name}{token}".encode())
        return Membership(f"{_slug(name)}.{_slug(token)}.{unique}", name, host, hosts)

    def part_key(self, host: int) -> str:
        """The key of a host's fragment."""
        return f"txn/{self.transaction}/part-{host:05d}-of-{self.hosts:05d}"


def detected_attempt(environment: Mapping[str, str]) -> str | None:
    """What names this incarnation of the job: from SLURM's and torchelastic's variables, else None.

    torchelastic restarts its workers within one SLURM job, so where both are set, both are in the name.
    """
    found = []
    if "SLURM_JOB_ID" in environment:
        parts = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        found.append("slurm-" + ".".join(environment.get(p, "0") for p in parts))
    run, count = environment.get("TORCHELASTIC_RUN_ID", "none"), environment.get("TORCHELASTIC_RESTART_COUNT")
    if count is not None and (found or run != "none"):
        found.append(f"elastic-{run}.{count}")
    return "-".join(found) or None


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text)[:40]


async def commit_group(
    log: Log, member: Membership, fragment: Fragment, durability: Durability, timeout: float | None
) -> int:
    """The version that the group's transaction became, by the steps at the top of this file."""
    limit = DEFAULT_TIMEOUT if timeout is None else timeout
    if limit <= 0:
        raise InvalidArgument(f"a timeout of {timeout} seconds leaves no time: expected more than 0")
    clock = asyncio.get_running_loop().time
    deadline = clock() + limit
    await _deliver(log, member, fragment, durability)
    present = await _present(log, member)
    if len(present) == member.hosts:
        return await uncancelled(_finish(log, member, durability))
    seen, pause, takeover = fragment.base, _POLL_FIRST, 0.0
    while True:
        newest = await log.newest()  # asked first: what commits after this is looked at in the next round
        version = await log.find(fragment.transaction, seen)
        if version is not None:
            await log.backend.settle("commits", durability)  # its creator may not have got to it
            return version
        seen = max(seen, newest)
        now = clock()
        if len(present) < member.hosts:
            present = await _present(log, member)
            takeover = now + _GRACE * world.uniform(1, 2)
        elif now >= min(takeover, deadline):
            return await uncancelled(_finish(log, member, durability))
        if now >= deadline and len(present) < member.hosts:
            absent = [h for h in range(member.hosts) if h not in present]
            raise DeadlineExceeded(
                f"{log.backend.url}: transaction {member.name!r} waited {limit:g} s for hosts {absent} of "
                f"{member.hosts}; it is not committed, and will be only if they still deliver. Start the job "
                "again with another attempt, or give them more time",
                absent,
            )
        await asyncio.sleep(min(pause * world.uniform(0.5, 1), max(0.001, deadline - now)))
        pause = min(_POLL_MOST, pause * 1.5)


async def _deliver(log: Log, member: Membership, fragment: Fragment, durability: Durability) -> None:
    key = member.part_key(member.host)
    data = encode(fragment)
    others = await log.backend.list(f"txn/{member.transaction}/part-")
    strange = [k for k in others if not k.endswith(f"-of-{member.hosts:05d}")]
    if strange:
        raise Inconsistent(
            f"{log.backend.url}: transaction {member.name!r} was begun with another number of hosts than "
            f"{member.hosts}; a group of another size needs another attempt",
            strange,
        )
    try:
        await log.backend.create(key, data, durability)
    except AlreadyExists:
        if await log.backend.get(key) == data:
            return
        raise Inconsistent(
            f"{log.backend.url}: host {member.host} has already delivered a different fragment of transaction "
            f"{member.name!r}; was it started twice? A restarted job needs another attempt",
            [key],
        ) from None


async def _present(log: Log, member: Membership) -> set[int]:
    keys = set(await log.backend.list(f"txn/{member.transaction}/part-"))
    return {h for h in range(member.hosts) if member.part_key(h) in keys}


async def _finish(log: Log, member: Membership, durability: Durability) -> int:
    keys = [member.part_key(h) for h in range(member.hosts)]
    fragments = list(await asyncio.gather(*[log.read(k, Fragment) for k in keys]))
    manifests = list(await asyncio.gather(*[log.manifest(f.manifest) for f in fragments]))
    record, merged = _merged(member, fragments, manifests)
    data = encode(merged)
    if len(data) > INLINE_MANIFEST:
        key = f"txn/{member.transaction}/manifest"
        try:
            await log.backend.create(key, data, durability)
        except AlreadyExists:
            await log.backend.settle(f"txn/{member.transaction}", durability)  # another finisher, same bytes
        record = _with_manifest(record, reference(key, data))
    changes = Changes.of(record, [merged])

    async def validate(version: int, other: Record) -> Record:
        overlap = changes.overlap(Changes.of(other, await log.manifests(other)))
        met = [*overlap.fatal, *overlap.chunks]
        if met:
            raise Conflict(
                f"{log.backend.url}: version {version} changed the same as transaction {member.name!r}; nothing "
                "of it was committed",
                met,
            )
        return record

    return await log.append(record, validate, durability)


def _merged(
    member: Membership, fragments: Sequence[Fragment], manifests: Sequence[Manifest]
) -> tuple[Record, Manifest]:
    """The record and the one manifest of all fragments; `Inconsistent` where they contradict each other."""
    first = fragments[0]
    _check_agreement(member, fragments)
    _check_nodes(member, manifests)
    record = Record(
        transaction=first.transaction,
        base=min(f.base for f in fragments),
        time=world.now(),
        message=first.message,
        tags=first.tags,
        replaces=first.replaces,
        deleted=tuple(dict.fromkeys(d for f in fragments for d in f.deleted)),
        bytes_added=sum(f.bytes_added for f in fragments),
        facts=first.facts,
        durable=first.durable,
    )
    tree = Tree(0, {}, {}).after(1, record, manifests)
    fresh = {path: f for m in manifests for path, _, f, _ in m.nodes()}
    merged = Manifest.of([(p, n.document, fresh[p], n.spans) for p, n in tree.nodes.items()])
    _check_chunks(member, tree, manifests, merged)
    record = msgspec.structs.replace(record, reused=merged.reused(first.transaction))
    return _with_manifest(record, merged), merged


def _with_manifest(record: Record, manifest: ObjectRef | Manifest) -> Record:
    return msgspec.structs.replace(record, manifests=(manifest,))


_AGREED = {
    "tags": "tag",
    "replaces": "kind of commit",
    "structure": "structure",
    "durable": "durability",
}


def _check_agreement(member: Membership, fragments: Sequence[Fragment]) -> None:
    first = fragments[0]
    for field, what in _AGREED.items():
        odd = [f.host for f in fragments if getattr(f, field) != getattr(first, field)]
        if odd:
            raise Inconsistent(
                f"transaction {member.name!r}: hosts {odd} differ from host 0 in the {what}; every host must "
                "make the same call with a tree of the same structure",
                [],
            )


def _check_nodes(member: Membership, manifests: Sequence[Manifest]) -> None:
    documents: dict[str, tuple[int, bytes]] = {}
    differing = []
    for host, manifest in enumerate(manifests):
        for path, document, _, _ in manifest.nodes():
            other, found = documents.setdefault(path, (host, document))
            if found != document:
                differing.append(f"{path}: host {other} has {_short(found)}, host {host} has {_short(document)}")
    if differing:
        raise Inconsistent(
            f"transaction {member.name!r}: hosts disagree on the metadata of arrays; nothing was committed",
            differing,
        )


def _check_chunks(member: Membership, tree: Tree, manifests: Sequence[Manifest], merged: Manifest) -> None:
    twice, missing = [], []
    written: dict[str, int] = {}
    for manifest in manifests:
        for path, _, _, span in manifest.nodes():
            written[path] = written.get(path, 0) + span.stop - span.start
    for path, document, fresh, span in merged.nodes():
        count = span.stop - span.start
        if written[path] != count:
            twice.append(f"{path}: chunks {_twice(tree.nodes[path])}")
        node = tree.nodes[path]
        if fresh and node.is_array:
            meta = ArrayMeta.parse(document)
            if count != meta.chunk_count and not meta.sparse:
                missing.append(f"{path}: {meta.chunk_count - count} of {meta.chunk_count} chunks")
    if twice:
        raise Inconsistent(
            f"transaction {member.name!r}: several hosts wrote the same chunks; each must have one writer",
            twice,
        )
    if missing:
        raise Inconsistent(
            f"transaction {member.name!r}: chunks were written by no host; nothing was committed", missing
        )


def _twice(node: Node) -> list[tuple[int, ...]]:
    numbers, times = np.unique(np.concatenate([s.chunks().index for s in node.spans]), return_counts=True)
    counts = node.meta.counts
    return [tuple(int(i) for i in np.unravel_index(n, counts)) for n in numbers[times > 1][:5].tolist()]


def _short(document: bytes) -> str:
    node = Node(document, ())
    if not node.is_array:
        return "a group"
    meta = node.meta
    codec = meta.codecs[0].get("configuration", {}).get("format", "")
    return f"{meta.dtype}{list(meta.shape)} chunks={list(meta.chunks)} {codec}".strip()
