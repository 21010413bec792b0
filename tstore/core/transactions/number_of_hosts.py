"""Hosts that pass different numbers of hosts for one name and attempt: all are told, and one number can commit.

Each number has a folder of its own. A host that is refused before it delivers withdraws the transaction with its
number, so that hosts which wait in the other one find that.
"""

from __future__ import annotations

import contextlib

from tstore.core.storage.base import Storage
from tstore.core.transactions.decision import Decision
from tstore.core.transactions.membership import FAN_IN, Membership
from tstore.errors import Inconsistent, TStoreError

__all__ = ["NumberOfHosts"]


class NumberOfHosts:
    """The search of one host for hosts that pass another number; each check raises `Inconsistent` for one."""

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
        """Look for any object, and withdraw the transaction; do nothing if it is decided to commit it."""
        try:
            if self._searches:
                await self._check("")
        except Inconsistent:
            if await self._decision.withdraw():
                raise

    async def check_before_commit(self) -> None:
        """Look for the fragment of host 0, which takes part in every run, so that no two numbers are committed."""
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
