"""The cost of listing many names."""

from __future__ import annotations

import json
import os

from tests.attacks.case import Case, check
from tests.attacks.harness import Harness
from tests.attacks.scopes import request
from tests.attacks.target import HOSTILE

__all__ = ["CASES"]

NAMES = 60_000
LISTED = 8.0
"""The CPU seconds that the server may spend on a list of all of them."""


async def many_names(harness: Harness) -> None:
    """List a folder of many names, page by page, and check what that costs the server."""
    folder = harness.target.place / "txn" / "many-names"
    folder.mkdir()
    (folder / "pack-0").write_bytes(b"")
    for number in range(1, NAMES):
        os.link(folder / f"pack-{(number - 1) // 10_000 * 10_000}", folder / f"pack-{number}")
        if number % 10_000 == 0:  # file systems limit the number of links to a file
            (folder / f"pack-{number}").unlink()
            (folder / f"pack-{number}").write_bytes(b"")
    before, after, listed = harness.meter.cpu, "", 0
    while after is not None:
        message = request("GET", f"?list&prefix=txn/many-names/&limit=1000&after={after}", b"", HOSTILE)
        status, body = await harness.target.ask(message)
        check(status == 200, f"a page behind {after!r} is answered {status}")
        page = json.loads(body)
        listed, after = listed + len(page["entries"]), page["next"]
        spent = harness.meter.cpu - before
        check(spent <= LISTED, f"{listed} of {NAMES} names took {spent:.1f} s of the server's CPU time")
    check(listed == NAMES, f"the list has {listed} of {NAMES} names")


CASES = [Case("many names", f"lists {NAMES} names by pages", f"{LISTED:g} s of CPU time suffice", many_names)]
