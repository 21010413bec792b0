"""Tests of whether a storage keeps the promises that a store relies on.

To run them with pytest and pytest-asyncio, pass a function that returns a new client of the storage at each call:

    from tstore.lab import conformance

    @pytest.mark.parametrize("check", conformance.CHECKS, ids=str)
    async def test_mine(check: conformance.Check) -> None:
        await check(conformance.Subject(lambda: MyStorage("mine://host/folder")))

Users run the same checks with `tstore probe URL`.

1. `suite`: a storage under test, and running all checks against it. `promises`: the checks.
2. `racers`: processes that race to create one object.
3. `faults`: a wrapper that injects faults into a storage.
"""

from __future__ import annotations

from tstore.lab.conformance.promises import CHECKS
from tstore.lab.conformance.suite import Check, Finding, Subject, run_checks

__all__ = ["CHECKS", "Check", "Finding", "Subject", "run_checks"]
