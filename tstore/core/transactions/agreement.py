"""Checks that the hosts of a cooperative transaction made the same call, with the same values.

If hosts pass different values of `hosts` for one name and attempt, all of them get an error, and at most one of
the transactions commits: each value has a separate folder. A host that notices this before it delivers withdraws
the transaction with its value, so that the hosts waiting in that folder stop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tstore.core.format.objects.records import Fragment
from tstore.core.storage.base import Storage
from tstore.core.transactions.decision import Decision
from tstore.core.transactions.membership import FAN_IN, Membership
from tstore.errors import Inconsistent, TStoreError

__all__ = ["NumberOfHosts", "check_agreement", "check_replicated"]

_MUST_AGREE = {
    "tags": "tag",
    "replaces": "kind of commit",
    "structure": "structure of the tree, or in a value that is not an array",
    "durable": "durability",
    "metadata": "metrics (pass those of the whole job, such as a mean over the hosts), or in other metadata",
}
"""The fields that must be equal in all fragments, and their names in errors."""


def check_agreement(name: str, fragments: Sequence[Fragment]) -> None:
    """Raise `Inconsistent` if the calls of hosts differ; `name` is that of the transaction."""
    first = fragments[0]
    for field, label in _MUST_AGREE.items():
        values = [msgspec.msgpack.encode(getattr(f, field), order="sorted") for f in fragments]  # NaN equals NaN
        differing = [f.host for f, value in zip(fragments, values, strict=True) if value != values[0]]
        if differing:
            other = next(f for f in fragments if f.host == differing[0])
            raise Inconsistent(
                f"transaction {name!r}: hosts {differing} differ from host {first.host} in the {label}; every "
                "host must make the same call",
                _differing_metrics(first, other) if field == "metadata" else [],
            )


def check_replicated(
    checksums: Iterable[tuple[Sequence[int], Mapping[str, bytes]]], subject: str
) -> dict[str, bytes]:
    """Merge the checksums of all hosts, by path; each item of `checksums` holds for one or several hosts.

    Raise `Inconsistent` if hosts passed different values at the same path, because only one would be stored.
    """
    first: dict[str, tuple[bytes, int]] = {}
    differing: dict[str, list[int]] = {}
    reference: Mapping[str, bytes] | None = None
    for hosts, by_path in checksums:
        if by_path == reference:
            continue
        reference = by_path if reference is None else reference
        for path, checksum in by_path.items():
            if first.setdefault(path, (checksum, hosts[0]))[0] != checksum:
                differing.setdefault(path, []).extend(hosts)
    if differing:
        raise Inconsistent(
            f"{subject}hosts have different values at the same path, and only one of them would be stored; make "
            "them equal on all hosts, or pass tstore.PerHost(value) to save the value of each host (with DCP, "
            "pass a key for each)",
            [f"{p or 'the tree'}: hosts {hosts} differ from host {first[p][1]}" for p, hosts in differing.items()],
        )
    return {path: checksum for path, (checksum, _) in first.items()}


def _differing_metrics(one: Fragment, other: Fragment) -> list[str]:
    metrics, others = (dict(f.metadata.get("metrics") or {}) for f in (one, other))
    return [
        f"{key}: {metrics.get(key)} on host {one.host}, {others.get(key)} on host {other.host}"
        for key in sorted(metrics.keys() | others.keys())
        if repr(metrics.get(key)) != repr(others.get(key))  # NaN equals NaN
    ]


class NumberOfHosts:
    """One host's search for hosts that passed another `hosts`; a check raises `Inconsistent` if it finds one."""

    def __init__(self, storage: Storage, member: Membership, decision: Decision) -> None:
        self._storage = storage
        self._member = member
        self._decision = decision
        self._searches = member.hosts <= FAN_IN or member.host % FAN_IN == 0  # one host of each block is enough

    async def check_before_delivery(self) -> None:
        """Look for delivered fragments; if there are any, withdraw the transaction of this host."""
        try:
            if self._searches:
                await self._check("part-")
        except Inconsistent:
            with contextlib.suppress(TStoreError):
                await self._decision.withdraw()
            raise

    async def check_while_waiting(self) -> None:
        """Look for any object, and withdraw the transaction unless the decision to commit it has been made."""
        try:
            if self._searches:
                await self._check("")
        except Inconsistent:
            if await self._decision.withdraw():
                raise

    async def check_before_commit(self) -> None:
        """Look for the fragment of host 0, which every transaction has, so that only one of them commits."""
        await self._check("part-00000")

    async def _check(self, prefix: str) -> None:
        member = self._member
        for hosts in await self._storage.folders(member.attempt_prefix):
            if int(hosts) == member.hosts:
                continue
            keys = await self._storage.list(f"{member.attempt_prefix}{hosts}/{prefix}")
            if keys:
                raise Inconsistent(
                    f"{self._storage.url}: transaction {member.name!r} has hosts={member.hosts} here, but another "
                    f"host passed hosts={int(hosts)}; pass the same number on every host, and another attempt",
                    [],
                )
