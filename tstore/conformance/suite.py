"""The suite: every check run against one storage.

A check raises `AssertionError` if the storage breaks a promise, `unittest.SkipTest` if that can't be tested, and
the storage's error if it is full or does not respond. It works in a new folder below `txn/`, under names of a
store's layout, so that it harms no store at that URL, and deletes what it created.

A check can find a fault, but not prove that there is none. So a race is run many times.
"""

from __future__ import annotations

import time
import unittest
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from tstore.conformance.promises import CHECKS
from tstore.conformance.subject import Check, Subject
from tstore.errors import StorageFull, Unavailable

__all__ = ["Finding", "judge"]


class Finding(NamedTuple):
    """The result of a check."""

    check: str
    promise: str
    outcome: Literal["holds", "fails", "skipped", "unknown"]
    """Unknown if the storage was full or did not respond: repeat the check."""
    detail: str
    seconds: float


async def judge(
    subject: Subject, checks: Iterable[Check] | None = None, progress: Callable[[str], None] = lambda name: None
) -> list[Finding]:
    """Run the checks (by default all) one after the other; call `progress` with the name of each before it."""
    findings = []
    for check in CHECKS if checks is None else checks:
        progress(check.name)
        begun = time.monotonic()
        outcome: Literal["holds", "fails", "skipped", "unknown"] = "holds"
        detail = ""
        try:
            await check(subject)
        except unittest.SkipTest as reason:
            outcome, detail = "skipped", str(reason)
        except AssertionError as fault:
            outcome, detail = "fails", str(fault)
        except (StorageFull, Unavailable) as error:
            outcome, detail = "unknown", str(error)
        findings.append(Finding(check.name, check.promise, outcome, detail, time.monotonic() - begun))
    return findings
