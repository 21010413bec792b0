"""Whether a storage keeps the promises that a store rests on, for whoever writes one.

With pytest and pytest-asyncio (`connect` makes one more client of the same place at each call; it returns a
`Backend`, or `Objects` of which a backend is then made):

    from tstore import conformance

    @pytest.mark.parametrize("check", conformance.CHECKS, ids=str)
    async def test_mine(check: conformance.Check) -> None:
        await check(conformance.Subject(lambda: MyObjects("mine://host/folder")))

and for users as `tstore probe URL`.

1. `suite`: run all checks against a storage. `promises`: the checks. `subject`: the storage that is judged.
2. `racers`: processes that race to create one object. `relay`: replies lost between client and server.
3. `faults`: objects behind a bad network. `faulty`: a backend that fails where it is told to.
"""

from __future__ import annotations

from tstore.conformance.promises import CHECKS
from tstore.conformance.subject import Check, Subject
from tstore.conformance.suite import Finding, judge

__all__ = ["CHECKS", "Check", "Finding", "Subject", "judge"]
