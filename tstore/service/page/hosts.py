"""The Hosts view, also a part of Run: cooperative transactions under way, and the states of their hosts."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tstore.core.format.plain_text import format_ranges
from tstore.core.transactions.pending import PendingTransaction, describe_pending, hosts_under_way
from tstore.service.page.views import Document, Query, shell_command

__all__ = ["load"]

_SHORTEST_POLL, _LONGEST_POLL = 2.0, 60.0  # seconds between polls of a browser
_SHARE = 20  # the minimum interval between polls, as a multiple of the duration of a poll
_INTERVAL, _MAX_RATE = 10.0, 100.0
"""A host renews its heartbeat every ten seconds, or less often if the hosts would renew more than 100 a second."""
_MAX_TRANSACTIONS = 32  # transactions shown, those with a heartbeat first
_MAX_SQUARES = 1024  # hosts that are drawn; of more, only the counts and the numbers of those missing are shown
_MAX_LISTED = 100  # ranges of missing hosts, and silent hosts


async def load(query: Query) -> Document:
    """Return the newest version and the transactions under way, with the seconds until the next poll.

    A host has `delivered` its part, is `working` (its heartbeat is recent), `silent` for a number of seconds, or
    `missing`: it has neither written nor renewed a heartbeat.
    """
    second = int(time.monotonic())  # browsers that poll within a second share one result
    return await query.results.get("hosts", (query.store, second), lambda: _load(query), most=2)


async def _load(query: Query) -> Document:
    started = time.monotonic()
    tags = await query.store.tags()
    log = query.store.log.reader
    under_way = await hosts_under_way(log)
    chosen = sorted(under_way.items(), key=lambda item: (not item[1]["alive"], item[0]))[:_MAX_TRANSACTIONS]
    described = [await describe_pending(log, transaction, hosts) for transaction, hosts in sorted(chosen)]
    pending = [_describe(transaction, tags.get(transaction.name)) for transaction in described]
    seconds = time.monotonic() - started
    return {
        "command": shell_command("ls", [query.address], ["--pending"]),
        "python": f"import tstore.sync as tstore\n\nprint(tstore.open({query.address!r}, 'r').pending())",
        "version": await log.newest(),
        "pending": pending,
        "more": len(under_way) - len(pending),
        "poll_seconds": round(min(_LONGEST_POLL, max(_SHORTEST_POLL, _SHARE * seconds)), 1),
    }


def _describe(transaction: PendingTransaction, committed: int | None) -> Document:
    """Return a transaction and its hosts; `committed` is the version that another attempt became."""
    delivered, beats = set(transaction.delivered), transaction.heartbeats
    recent = 2.5 * max(_INTERVAL, transaction.hosts / _MAX_RATE)
    waiting = {host: age for host, age in sorted(beats.items()) if host not in delivered}
    silent = [(host, age) for host, age in waiting.items() if age > recent]
    missing = [host for host in range(transaction.hosts) if host not in delivered and host not in beats]
    return {
        "transaction": transaction.transaction,
        "name": transaction.name,
        "hosts": transaction.hosts,
        "active": any(age <= recent for age in beats.values()),
        "withdrawn_by": transaction.withdrawn_by,
        "committed": committed,
        "counts": {
            "delivered": len(delivered),
            "working": len(waiting) - len(silent),
            "silent": len(silent),
            "missing": len(missing),
        },
        "states": [_state(host, delivered, beats, recent) for host in range(min(transaction.hosts, _MAX_SQUARES))],
        "heartbeats": {str(host): round(age, 1) for host, age in sorted(beats.items())[:_MAX_SQUARES]},
        "missing": format_ranges(missing)[:_MAX_LISTED],
        "silent": [[host, round(age)] for host, age in silent[:_MAX_LISTED]],
    }


def _state(host: int, delivered: set[int], heartbeats: Mapping[int, float], recent: float) -> str:
    if host in delivered:
        return "delivered"
    if host not in heartbeats:
        return "missing"
    return "working" if heartbeats[host] <= recent else "silent"
