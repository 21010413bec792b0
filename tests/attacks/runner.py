"""Run groups of cases, and count which properties held and which broke."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.attacks.case import Broken, Case
from tests.attacks.harness import Harness

__all__ = ["Group", "Result", "run", "share", "untried"]

LONGEST = 200.0
"""The seconds after which a case counts as broken."""


class Group(NamedTuple):
    """Cases that attack the same thing in the same setting."""

    name: str
    cases: Sequence[Case]
    subject: Callable[[Harness], Any]
    """What its cases take."""
    bare: bool = False
    """Whether its cases need the small folder that `lay_out` makes instead of a whole store."""
    tls: bool = False
    together: int = 0
    """The number of concurrent cases, if they need no server."""
    each: float = 1.0
    """The seconds that a case takes on two busy cores."""

    @property
    def expected(self) -> float:
        """The seconds that all its cases take on such a machine."""
        return self.each * len(self.cases) / max(1, self.together)


def share(left: float, expected: float, later: float) -> float:
    """Return the seconds that a group may take, of those left for it and later ones.

    If more is left than all groups are expected to take, the group may use half of the surplus.
    """
    spare = left - expected - later
    return expected + spare / 2 if spare >= 0 else left * expected / (expected + later)


@dataclass
class Result:
    """The outcome of a group."""

    name: str
    held: int = 0
    broken: list[tuple[Case, str]] = field(default_factory=list)
    untried: int = 0
    seconds: float = 0.0
    server_memory: int = 0
    server_files: int = 0
    client_memory: int = 0
    requests: int = 0
    kept: int = 0

    @property
    def tried(self) -> int:
        """The number of cases that ran."""
        return self.held + len(self.broken)

    def document(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "group": self.name,
            "tried": self.tried,
            "held": self.held,
            "broken": [{"case": c.name, "does": c.does, "held": c.held, "found": m} for c, m in self.broken],
            "untried": self.untried,
            "seconds": round(self.seconds, 1),
            "server_peak_bytes": self.server_memory,
            "server_peak_files": self.server_files,
            "client_peak_bytes": self.client_memory,
            "honest_requests": self.requests,
            "honest_requests_kept": self.kept,
        }


def untried(results: Sequence[Result], seconds: float) -> str:
    """Return a sentence about the cases that did not run, or "" if all did."""
    left = ", ".join(f"{result.untried} of {result.name}" for result in results if result.untried)
    return f"Not tried within {seconds:g} s: {left}. Allow more with --seconds." if left else ""


async def run(
    group: Group, harness: Harness, seconds: float, result: Result, tell: Callable[[Case, str], None]
) -> None:
    """Run the cases of a group until the time is over, and call `tell` for each that breaks."""
    began = time.monotonic()
    harness.children.memory = 0
    try:
        turns = asyncio.Semaphore(max(1, group.together))

        async def run_case(case: Case) -> None:
            async with turns:
                if time.monotonic() - began > seconds:
                    result.untried += 1
                elif error := await _error_of(case, group, harness):
                    result.broken.append((case, error))
                    tell(case, error)
                else:
                    result.held += 1

        async with asyncio.TaskGroup() as tasks:
            for case in group.cases:
                tasks.create_task(run_case(case))
    finally:
        harness.close()
        result.seconds += time.monotonic() - began
        result.server_memory = max(result.server_memory, harness.memory)
        result.server_files = max(result.server_files, harness.files)
        result.client_memory = max(result.client_memory, harness.children.memory)
        result.requests += harness.requests
        result.kept += harness.kept


async def _error_of(case: Case, group: Group, harness: Harness) -> str:
    """Run a case and return what it broke, or ""."""
    try:
        async with asyncio.timeout(LONGEST):
            if group.together:
                await case.run(group.subject(harness))
                return ""
            if harness.worn:
                harness.fresh()
            async with harness.watched():
                await case.run(group.subject(harness))
            harness.check_log()
        return ""
    except Broken as broken:
        harness.worn = True
        if group.together:
            return str(broken)
        return f"{broken} [server: {harness.meter.memory >> 20} MiB, {harness.meter.files} files]"
    except Exception as error:  # a case that raises counts as broken
        harness.worn = True
        return f"{type(error).__name__}: {error}"
