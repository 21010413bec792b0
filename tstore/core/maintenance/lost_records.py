"""Roots that vouch for lost records: the tree of such a root has the changes of the lost records.

A record that can't be read is lost, but a later root has the whole tree of its version, with the effect of all
records before it. So the tree is known from that version on; only those of the versions in between are not. A root
vouches if all of this holds:
1. Its bytes are intact.
2. It has the checksum of its version's record. If that is lost too, this is the checksum that the link of a later
   record names, or a root that vouches and continues this one, or the end of the damaged bytes.
3. The root that it continues vouches too, or is older than all lost records, or its tree follows from one that
   vouches.

A root that was written without a lost record, or by a store of another history, has another checksum.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping

from tstore.core.format.frame import SHORTEST_FRAME, check_of, link_of, unseal
from tstore.core.format.layout import ROOT_EVERY, first_link
from tstore.core.format.objects.encoding import decode
from tstore.core.format.objects.records import Record, Root
from tstore.core.log.expiry import changes_nothing
from tstore.core.log.reader import LogReader
from tstore.core.log.records import OtherHistory
from tstore.core.maintenance.replay import UNREADABLE
from tstore.core.runtime.concurrency import batched, together

__all__ = ["named_checks", "resumptions"]


async def named_checks(log: LogReader, records: Mapping[int, bytes]) -> dict[int, set[bytes]]:
    """Return the checksums by which later records may refer to versions to be voided, by version.

    These are the checksums of `records`, which are empty if they are missing. If one is damaged, missing or in the
    place of another one, those that later records name are accepted too. A record of another history has none:
    what refers to it belongs to that history. If a version was voided before, and its record restored, the repair
    may refer to the void record.
    """
    named = {
        version: {check_of(data)} if len(data) >= SHORTEST_FRAME else set() for version, data in records.items()
    }
    for batch in batched(sorted({v for version in records for v in range(first_link(version) or 1, version)})):
        await log.records.short_records(batch)  # so that each record is compared with those before it
    readable, foreign = set[int](), set[int]()
    for version in records:
        try:
            named[version] |= (await log.record(version)).replaced
            readable.add(version)
        except OtherHistory:
            foreign.add(version)
        except UNREADABLE:
            pass
    later = {v for version in records for v in range(version + 1, first_link(version + 1) + ROOT_EVERY + 1)}
    for batch in batched(sorted(later - (records.keys() - readable))):
        for data in await together(functools.partial(_bytes, log), batch):
            with contextlib.suppress(*UNREADABLE):
                unseal(data, b"R")
                link = link_of(data)
                if link.version in records and (
                    link.version not in readable or link.version in decode(data, Record).voids
                ):
                    named[link.version].add(link.check)
    return {version: set() if version in foreign else checks for version, checks in named.items()}


async def _bytes(log: LogReader, version: int) -> bytes:
    with contextlib.suppress(*UNREADABLE):
        return await log.commits.get(version)
    return b""


async def resumptions(log: LogReader, named: Mapping[int, set[bytes]], stop: int, newest: int) -> dict[int, int]:
    """Return for each lost version the next version below `stop` whose root vouches for it, 0 for none.

    `named` has the checksums by which others may name each lost record; those that roots name are added. `newest`
    is the newest version: there must be a commit from the root's version on that is not lost.
    """
    if not named:
        return {}
    stop = min(stop, await _last_change(log, named, newest) + 1)
    first = -(-min(named) // ROOT_EVERY) * ROOT_EVERY
    roots: dict[int, Root] = {}
    for number in range(first, stop, ROOT_EVERY):
        with contextlib.suppress(*UNREADABLE):
            roots[number] = await log.objects.whole_root(number)
        if number in roots and number >= max(named):
            vouching = await _vouching(log, named, roots)
            if number in vouching:
                break
    else:  # no root has all lost changes, but some may have earlier ones
        vouching = await _vouching(log, named, roots)
    return {version: min((root for root in vouching if root >= version), default=0) for version in named}


async def _last_change(log: LogReader, lost: Mapping[int, set[bytes]], newest: int) -> int:
    """Return the newest version that changes the head and is not lost."""
    for version in range(newest, 0, -1):
        with contextlib.suppress(*UNREADABLE):
            if version not in lost:
                record = await log.record(version)
                if not (changes_nothing(record) or record.source):
                    return version
    return 0


async def _vouching(log: LogReader, named: Mapping[int, set[bytes]], roots: Mapping[int, Root]) -> set[int]:
    """Return which of these roots vouch; add to `named` the checksums that they name."""
    confirmed = set[int]()
    for number in sorted(roots, reverse=True):
        root = roots[number]
        with contextlib.suppress(*UNREADABLE):
            if number in named:
                is_own = root.record_check in named[number]
            else:
                is_own = (await log.stored(number)).has_root(root)
            if is_own and root.parent in named:
                named[root.parent].add(root.parent_check)
            elif root.parent:
                is_own = is_own and (await log.stored(root.parent)).accepts(root.parent_check)
            if is_own and root.version == number:
                confirmed.add(number)
    vouching, known = set[int](), set[int]()
    for number in range(min(roots, default=0), max(roots, default=0) + 1, ROOT_EVERY):
        if number in confirmed and (roots[number].parent < min(named) or roots[number].parent in known):
            vouching.add(number)
        if number in vouching or (number - ROOT_EVERY in known and await _intact(log, named, number)):
            known.add(number)
    return vouching


async def _intact(log: LogReader, lost: Mapping[int, set[bytes]], root: int) -> bool:
    """Return whether no record between a root and the one before it is lost, now or before."""
    versions = range(root - ROOT_EVERY + 1, root + 1)
    if not lost.keys().isdisjoint(versions):
        return False
    return not any([record.resumes async for _, record in log.each_record(versions)])
