"""The live part of the view Run: cooperative transactions under way, and the state of each of their hosts."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tstore.page.views import Document, Query, shell_command
from tstore.transactions.pending import PendingTransaction

__all__ = ["load"]

_SHORTEST_POLL, _LONGEST_POLL = 2.0, 60.0  # seconds between polls of a browser
_SHARE = 20  # a poll may take this share of the time between polls
_INTERVAL, _MAX_RATE = 10.0, 100.0
"""A host renews its heartbeat every ten seconds, or less often if the hosts would renew more than 100 a second."""
_MOST_SQUARES = 1024  # hosts that are drawn; of more, only the counts and the numbers of those missing are shown


async def load(query: Query) -> Document:
    """Return the newest version and the transactions under way, with the seconds until the next poll.

    A host has `delivered` its part, is `working` (its heartbeat is recent), `silent` for a number of seconds, or
    `missing`: it has neither written nor renewed a heartbeat.
    """
    second = int(time.monotonic())  # browsers that poll within a second share one answer
    return await query.results.get("hosts", (query.store.uuid, second), lambda: _load(query), most=2)


async def _load(query: Query) -> Document:
    started = time.monotonic()
    version = (await query.store.snapshot()).version
    pending = [_describe(transaction) for transaction in await query.store.pending()]
    seconds = time.monotonic() - started
    return {
        "command": shell_command("ls", [query.address], ["--pending"]),
        "python": f"import tstore.sync as tstore\n\nprint(tstore.open({query.address!r}, 'r').pending())",
        "version": version,
        "pending": pending,
        "poll_seconds": round(min(_LONGEST_POLL, max(_SHORTEST_POLL, _SHARE * seconds)), 1),
    }


def _describe(transaction: PendingTransaction) -> Document:
    delivered = set(transaction.delivered)
    recent = 2.5 * max(_INTERVAL, transaction.hosts / _MAX_RATE)
    states = []
    for host in range(transaction.hosts):
        states.append(_state(host, delivered, transaction.heartbeats, recent))
    counts = {name: states.count(name) for name in ("delivered", "working", "silent", "missing")}
    return {
        "transaction": transaction.transaction,
        "name": transaction.name,
        "hosts": transaction.hosts,
        "active": any(age <= recent for age in transaction.heartbeats.values()),
        "withdrawn_by": transaction.withdrawn_by,
        "counts": counts,
        "states": states[:_MOST_SQUARES],
        "heartbeats": {str(host): round(age, 1) for host, age in sorted(transaction.heartbeats.items())},
        "missing": [host for host, state in enumerate(states) if state == "missing"][:100],
        "silent": [[h, round(transaction.heartbeats[h])] for h, s in enumerate(states) if s == "silent"][:100],
    }


def _state(host: int, delivered: set[int], heartbeats: Mapping[int, float], recent: float) -> str:
    if host in delivered:
        return "delivered"
    if host not in heartbeats:
        return "missing"
    return "working" if heartbeats[host] <= recent else "silent"
