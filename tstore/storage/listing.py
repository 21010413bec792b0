"""Lists of a server's objects, which end: however long a server goes on.

1. Each name is one that was asked for, and a list goes on: of `BARREN` pages in a row one has a new name.
2. Names come at `SLOWEST` a second at least, beyond the first `RETRY_POLICY` seconds.
3. All names of a list together take `LISTED` bytes at most, each with `_BESIDE` bytes for what keeps it. Who asks
   for names alone takes them page by page, so that this is about what a list takes in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from tstore.errors import Corrupt, Unavailable
from tstore.storage.objects import Objects, Page

__all__ = ["BARREN", "LISTED", "RETRY_POLICY", "SLOWEST", "listed"]

BARREN = 1000
"""Pages without a name: servers give some where they look at many objects that were deleted."""

LISTED = 160 << 20
"""Bytes of the names of one list: a million names of a hundred characters, or two million short ones."""

RETRY_POLICY = 300.0
"""Seconds that a list may take, whatever it has."""

SLOWEST = 100
"""Names a second that a list has beyond that."""

_BESIDE = 64


async def listed(objects: Objects, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
    """Yield the pages of a list of what begins with the prefix; `Corrupt` and `Unavailable` by the rules above."""
    clock, where = asyncio.get_running_loop().time, f"{objects.url}: the list of {prefix!r}"
    began, size, count, barren, last = clock(), 0, 0, 0, ""
    async for page in objects.pages(prefix, delimiter):
        names = [entry.key for entry in page.entries] + page.folders
        strange = next((name for name in names if not name.startswith(prefix)), None)
        if strange is not None:
            raise Corrupt(f"{where} has {strange[:100]!r}, which was not asked for; check what answers there")
        newest = max(names, default="")
        barren = 0 if newest > last else barren + 1
        last, count = max(last, newest), count + len(names)
        size += sum(len(name) + _BESIDE for name in names)
        if barren > BARREN:
            raise Corrupt(f"{where} has no new name for {BARREN} pages, and goes on; check what answers there")
        if size > LISTED:
            raise Corrupt(f"{where} is longer than {LISTED} bytes ({count} names), which no store's is")
        if clock() - began > RETRY_POLICY + count / SLOWEST:
            raise Unavailable(
                f"{where} has only {count} names after {clock() - began:.0f} s; the server is too slow"
            )
        yield page
