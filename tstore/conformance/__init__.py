"""Tests of a storage: whether it keeps the promises on which a store relies.

With pytest and pytest-asyncio (the function returns one more client of the same storage at each call):

    from tstore import conformance

    @pytest.mark.parametrize("check", conformance.CHECKS, ids=str)
    async def test_mine(check: conformance.Check) -> None:
        await check(conformance.Subject(lambda: MyStorage("mine://host/folder")))

and for users as `tstore probe URL`.

1. `suite`: run all checks against a storage. `promises`: the checks. `subject`: the storage under test.
2. `racers`: processes that race to create one object. `relay`: responses lost between client and server.
3. `faults`: a storage that fails by rules, or by chance as behind a bad network.
"""

from __future__ import annotations

from tstore.conformance.promises import CHECKS
from tstore.conformance.subject import Check, Subject
from tstore.conformance.suite import Finding, judge

__all__ = ["CHECKS", "Check", "Finding", "Subject", "judge"]
