"""Choose the version to compare another with: a copy's source, the step before, or the version before."""

from __future__ import annotations

import os

from tstore.core.log.expiry import living_versions
from tstore.core.steps import step_tag, steps_of
from tstore.core.store import Store, opened
from tstore.errors import NotFound

__all__ = ["baseline"]


async def baseline(store: str | os.PathLike[str] | Store, at: int | str | None = None) -> int:
    """Return the version to compare another with (by default the head).

    It is the source of a copy, the step before a step, or else the living version before, except copies. If the
    source has expired, its number is returned anyway. Raise `NotFound` if there is no earlier version.
    """
    async with opened(store, "r") as target:
        log, head = target.log.reader, await target.snapshot()
        version = head.version if at is None else (await target.snapshot(at)).version
        if version == 0:
            raise NotFound(f"{target.url} has no commit yet; save one first")
        if source := (await log.record(version)).source:
            return source
        tags = head.tags
        saved = [tags[step_tag(step)] for step in steps_of(tags)]
        before = [earlier for earlier in saved if earlier < version]
        if version in saved and before:
            return before[-1]
        alive, last_gc = await living_versions(log, head.version)
        for earlier in range(version - 1, 0, -1):
            if (earlier > last_gc or earlier in alive) and not (await log.record(earlier)).source:
                return earlier
        raise NotFound(f"{target.url}: no version before {version} is alive; pass the one to compare with")
