"""The suite: every check run against one storage.

A check raises `AssertionError` where the storage breaks a promise, and `unittest.SkipTest` where it can't be
judged; where the storage has no room or does not answer, its own error. It works in a folder of its own below
`txn/`, under names that a store's layout has, so that it harms no store that lies there, and removes what it made.

A check can only find a fault; it can't prove that there is none. A race is run many times for that reason.
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
    """What a check has found."""

    check: str
    promise: str
    outcome: Literal["holds", "fails", "skipped", "unknown"]
    """Unknown where the storage had no room, or did not answer; to be asked again."""
    detail: str
    seconds: float


async def judge(
    subject: Subject, checks: Iterable[Check] | None = None, tell: Callable[[str], None] = lambda name: None
) -> list[Finding]:
    """The findings of the checks (by default all), made one after the other; `tell` hears what comes next."""
    findings = []
    for check in CHECKS if checks is None else checks:
        tell(check.name)
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
