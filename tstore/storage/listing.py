"""Listings that end, whatever a server sends.

1. Each name starts with the prefix, and the listing advances: of `BARREN` pages in a row one has a new name.
2. Names come at `SLOWEST` a second on average, after the first `GRACE` seconds.
3. All names of a listing together take at most `LISTED` bytes, each with `_OVERHEAD` bytes for its Python object.
   Callers that need names alone consume it page by page, so this bounds the memory of a listing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from tstore.errors import Corrupt, Unavailable
from tstore.storage.objects import Page

__all__ = ["BARREN", "GRACE", "LISTED", "SLOWEST", "bounded"]

BARREN = 1000
"""Pages without a new name: servers return some while they skip many deleted objects."""

LISTED = 160 << 20
"""Bytes of the names of one listing: a million names of a hundred characters, or two million short ones."""

GRACE = 300.0
"""Seconds that any listing may take."""

SLOWEST = 100
"""Names a second that a listing must reach after `GRACE`."""

_OVERHEAD = 64


async def bounded(pages: AsyncIterator[Page], prefix: str, url: str) -> AsyncIterator[Page]:
    """Yield the pages of a listing of `prefix`; raise `Corrupt` or `Unavailable` if it breaks a rule above."""
    clock, where = asyncio.get_running_loop().time, f"{url}: the list of {prefix!r}"
    began, size, count, barren, last = clock(), 0, 0, 0, ""
    async for page in pages:
        names = [entry.key for entry in page.entries] + page.folders
        strange = next((name for name in names if not name.startswith(prefix)), None)
        if strange is not None:
            raise Corrupt(f"{where} has {strange[:100]!r}, which was not requested; check the server there")
        newest = max(names, default="")
        barren = 0 if newest > last else barren + 1
        last, count = max(last, newest), count + len(names)
        size += sum(len(name) + _OVERHEAD for name in names)
        if barren > BARREN:
            raise Corrupt(f"{where} has no new name for {BARREN} pages; check the server at that URL")
        if size > LISTED:
            raise Corrupt(f"{where} is longer than {LISTED} bytes ({count} names), which no store's is")
        if clock() - began > GRACE + count / SLOWEST:
            raise Unavailable(
                f"{where} has only {count} names after {clock() - began:.0f} s; the server is too slow"
            )
        yield page
