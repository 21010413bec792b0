"""One host of a cooperative transaction, and the keys of the objects that its hosts write."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from tstore.core.format.arguments import checked_index, checked_name, quote
from tstore.core.format.layout import folder_of
from tstore.core.transactions.attempts import needed_attempt
from tstore.errors import InvalidArgument

__all__ = ["FAN_IN", "Membership", "membership", "slug"]

FAN_IN = 100
"""The number of fragments that one merge reads; a power of ten, so that the keys of a block share a prefix."""

_MAX_HOSTS = 100_000
_ID = re.compile(r"(.*)\.[^.]*\.[0-9a-f]{32}-of-(\d{5,})")


class Membership(NamedTuple):
    """Host `host` of `hosts` in a cooperative transaction with the id `transaction` and the name `name`.

    Fragments are merged in a tree: the hosts are the members of level 0, each block of `FAN_IN` of them is merged
    into one member of level 1, and so on. Members of a level are numbered from 0.
    """

    transaction: str
    name: str
    host: int
    hosts: int

    @staticmethod
    def from_arguments(name: str, host: int, hosts: int, attempt: str | None) -> Membership:
        """Return the membership; raise `InvalidArgument` if an argument is invalid or the attempt is unknown."""
        name = checked_name("name", name)
        attempt = None if attempt is None else checked_name("attempt", attempt)
        host, hosts = checked_index("host", host), checked_index("hosts", hosts)
        if hosts < 1:
            raise InvalidArgument(f"hosts={hosts}: expected at least 1")
        if not 0 <= host < hosts:
            raise InvalidArgument(
                f"host {host} of {hosts} does not exist: hosts are numbered from 0 to {hosts - 1}"
            )
        if hosts > _MAX_HOSTS:
            raise InvalidArgument(
                f"{hosts} hosts are more than a transaction may have: expected at most {_MAX_HOSTS}"
            )
        if not name:
            raise InvalidArgument("a cooperative transaction needs a name that all its hosts share")
        if attempt == "":
            raise InvalidArgument("attempt='': expected a token that is new with each start of the job")
        token = attempt if attempt is not None else needed_attempt(os.environ, hosts)
        unique = xxhash.xxh3_128_hexdigest(f"{len(name)}:{name}{token}".encode())
        prefix = f"{slug(name)}.{slug(token)}.{unique}"
        return Membership(f"{prefix}-of-{hosts:05d}", name, host, hosts)

    @staticmethod
    def from_id(transaction: str) -> Membership | None:
        """Return the membership of host 0, or None if the id is not that of a cooperative transaction.

        Its `name` is the part of the name that the id contains: see `slug`.
        """
        match = _ID.fullmatch(transaction)
        hosts = int(match[2]) if match and len(match[2]) <= len(str(_MAX_HOSTS)) else 0
        return Membership(transaction, match[1], 0, hosts) if match and 0 < hosts <= _MAX_HOSTS else None

    @property
    def folder(self) -> str:
        """The folder of the objects that the hosts write."""
        return folder_of(self.transaction)

    @property
    def attempt_prefix(self) -> str:
        """The common prefix of the folders of this name and attempt, for any number of hosts."""
        return f"{folder_of(self.transaction.rpartition('-of-')[0])}-of-"

    @property
    def top(self) -> int:
        """The last level, with at most `FAN_IN` members, which the commit merges."""
        return 0 if self.hosts <= FAN_IN else 1 if self.hosts <= FAN_IN**2 else 2

    def count(self, level: int) -> int:
        """Return the number of members of a level."""
        size: int = FAN_IN**level
        return -(-self.hosts // size)

    def block(self, level: int, number: int) -> range:
        """Return the members of a level that are merged into member `number` of the next."""
        return range(number * FAN_IN, min((number + 1) * FAN_IN, self.count(level)))

    def block_prefix(self, level: int, block: int) -> str:
        """Return the prefix of the keys of a block's fragments, and of no other keys."""
        name = f"merge-{level}" if level else "part"
        return f"{self.folder}/{name}-{block:03d}"

    def fragment_key(self, level: int, number: int) -> str:
        """Return the key of a host's fragment (level 0) or of a merged one."""
        return f"{self.block_prefix(level, number // FAN_IN)}{number % FAN_IN:02d}-of-{self.hosts:05d}"

    def claim_key(self, level: int, block: int) -> str:
        """Return the key of the object that names the host merging a block; see `decision` for the top level."""
        return f"{self.folder}/merging-{level}-{block:05d}-of-{self.hosts:05d}"

    def heartbeat_key(self, host: int) -> str:
        """Return the key of a host's heartbeat."""
        return f"{self.folder}/alive-{host:05d}-of-{self.hosts:05d}"


def slug(text: str) -> str:
    """Replace each run of characters other than letters, digits, "_" and "-" by "-"; cut to 40 characters."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text)[:40]


def membership(
    name: str | None,
    host: int,
    hosts: int,
    attempt: str | None,
    isolation: str,
    drop_tag: str | Sequence[str] | None,
) -> Membership | None:
    """Return the membership of a host in a cooperative transaction, None for a transaction of one process."""
    if name is None:
        if hosts != 1:
            raise InvalidArgument(f"a transaction of {quote(hosts)} hosts needs a name that all of them share")
        if host:
            raise InvalidArgument(f"host={quote(host)} without a name; pass name and hosts to commit with others")
        return None
    if isolation == "serializable":
        raise InvalidArgument(
            f"transaction {name!r} can't be serializable, because a fragment does not list the reads of its "
            "host; read and write in a transaction of one process, without a name"
        )
    if drop_tag is not None:
        raise InvalidArgument(
            f"transaction {name!r} can't drop a tag, because a fragment does not carry that; drop {drop_tag!r} in "
            "a transaction of one process, without a name"
        )
    return Membership.from_arguments(name, host, hosts, attempt)
