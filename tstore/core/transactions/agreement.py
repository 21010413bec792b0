"""Whether the hosts of a cooperative transaction made the same call, with the same values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tstore.core.format.objects.records import Fragment
from tstore.errors import Inconsistent

__all__ = ["check_agreement", "check_replicated"]

_MUST_AGREE = {
    "tags": "tag",
    "replaces": "kind of commit",
    "structure": "structure of the tree, or in a value that is not an array",
    "durable": "durability",
    "metadata": "metrics (pass those of the whole job, such as a mean over the hosts), or in other metadata",
}
"""The fields in which all fragments must agree, and their names in errors."""


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
    """Return the checksums of all hosts by path; `checksums` are those of one host, or of several with the same.

    Raise `Inconsistent` if hosts passed different values at the same path, of which one would be stored.
    """
    first: dict[str, tuple[bytes, int]] = {}
    differing: dict[str, list[int]] = {}
    reference: Mapping[str, bytes] | None = None
    for hosts, found in checksums:
        if found == reference:
            continue
        reference = found if reference is None else reference
        for path, checksum in found.items():
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
