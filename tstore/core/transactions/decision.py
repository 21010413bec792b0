"""The decision to commit a cooperative transaction: the claim to its top level, created once.

    content                    meaning
    7                          the transaction may be committed; host 7 was the first to see the full set
    withdrawn by 7             host 7 gave up before any host saw the full set; it is never committed
    withdrawn by 7 without 3,4 the same, and the fragments of hosts 3 and 4 were absent then

A power failure may lose a claim to commit (see `cooperative`), or leave it empty. A withdrawal is durable.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from tstore.core.storage.base import Storage
from tstore.core.storage.objects import Durability
from tstore.core.transactions.membership import Membership
from tstore.errors import AlreadyExists, Corrupt, DeadlineExceeded, NotFound

__all__ = ["Decision", "Withdrawal", "withdrawal_in"]

_MAX_NAMED = 1000  # absent hosts in a withdrawal
_CLAIM = re.compile(rb"(withdrawn by )?([0-9]{1,10})(?(1)(?: without ([0-9]{1,10}(?:,[0-9]{1,10}){0,999}))?)")


class Withdrawal(NamedTuple):
    """The host that gave up a transaction, and hosts that had not delivered their fragments by then."""

    host: int
    absent: list[int]


def withdrawal_in(claim: bytes) -> Withdrawal | None:
    """Return the withdrawal in the content of a claim, or None if the transaction may be committed.

    Raise `Corrupt` if the content is not that of a claim.
    """
    match = _CLAIM.fullmatch(claim)
    if match is None:
        raise Corrupt("expected the number of a host in decimal digits, or 'withdrawn by' and that number")
    absent = [int(number) for number in match[3].split(b",")] if match[3] else []
    return Withdrawal(int(match[2]), absent) if match[1] else None


class Decision:
    """Whether a cooperative transaction may be committed, as one host makes or reads the decision."""

    def __init__(self, storage: Storage, member: Membership, durability: Durability) -> None:
        self._storage = storage
        self._member = member
        self._durability = durability
        self._key = member.claim_key(member.top, 0)

    async def commit(self) -> bool:
        """Decide that the transaction may be committed; return whether this host was the first to do so.

        Raise `DeadlineExceeded` if a host has withdrawn the transaction.
        """
        claim = str(self._member.host).encode()
        try:
            await self._storage.create(self._key, claim, Durability.NONE)
        except AlreadyExists:
            existing = await self._storage.get(self._key)
            self._check(existing)
            return existing == claim  # this host's own claim, if an earlier response was lost
        return True

    async def check(self) -> None:
        """Raise `DeadlineExceeded` if a host has withdrawn the transaction."""
        try:
            claim = await self._storage.get(self._key)
        except NotFound:
            return
        self._check(claim)

    async def withdraw(self, absent: Sequence[int] = ()) -> bool:
        """Decide that the transaction is never committed; return False if the opposite has been decided.

        `absent` are the hosts that have not delivered their fragments.
        """
        text = f"withdrawn by {self._member.host}"
        named = ",".join(map(str, absent[:_MAX_NAMED]))
        claim = (f"{text} without {named}" if named else text).encode()
        try:
            await self._storage.create(self._key, claim, self._durability)
        except AlreadyExists:
            return self._withdrawal(await self._storage.get(self._key)) is not None
        return True

    def _check(self, claim: bytes) -> None:
        withdrawal = self._withdrawal(claim)
        if withdrawal is None:
            return
        host, absent = withdrawal
        waiting = "" if absent in ([], [host]) else f" waiting for hosts {absent}"
        raise DeadlineExceeded(
            f"{self._storage.url}: transaction {self._member.name!r} is not committed: host {host} of "
            f"{self._member.hosts} gave up{waiting} and withdrew it; save again on every host",
            absent,
        )

    def _withdrawal(self, claim: bytes) -> Withdrawal | None:
        if not claim.strip(b"\0"):
            return None  # left by a power failure; a withdrawal appears only after its bytes are durable
        try:
            return withdrawal_in(claim)
        except Corrupt as error:
            raise Corrupt(f"{self._storage.url}/{self._key}: {error}") from error
