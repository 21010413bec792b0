"""Continue from an earlier step, after removing the later steps."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tstore.checkpoint.request import Missing
from tstore.core.steps import chosen_snapshot, step_tag, steps_of
from tstore.core.storage.watch import Watch
from tstore.core.store import Store, opened
from tstore.core.tags import last_removal, later_steps, remove_steps_after
from tstore.errors import Corrupt, DeadlineExceeded, InvalidArgument, NotAStore, NotFound, Unavailable

__all__ = ["Rollback", "check_fallback", "check_newest", "check_order", "is_damaged", "roll_back"]

_MIN_POLL, _MAX_POLL = 0.05, 2.0  # seconds between checks for the commit of host 0


class Rollback(NamedTuple):
    """The version of the step that is now the newest, and that of the commit that removed later steps, if any."""

    step_version: int
    removal: int | None


async def roll_back(store: Store, step: int, host: int, timeout: float) -> Rollback:
    """Make a step the newest; only host 0 commits, and all hosts return the same.

    Raise `NotFound` if there is no such step, `DeadlineExceeded` if host 0 has not committed after `timeout`.
    """
    await chosen_snapshot(store, step, None)
    if host == 0:
        await remove_steps_after(store, step)
    else:
        await _wait_removed(store, step, timeout)
    step_version = (await chosen_snapshot(store, step, None)).version  # raises if a gc removed it meanwhile
    return Rollback(step_version, await last_removal(store, step, step_version))


def check_fallback(hosts: int, is_agreed: bool, missing: Missing | None) -> None:
    """Raise `InvalidArgument` if a restore that falls back could mix the values of two steps."""
    if hosts > 1 and not is_agreed:
        raise InvalidArgument(
            f"fallback=True: {hosts} hosts could restore different steps; pass agree=… to the Checkpointer, a "
            "function that returns whether any host passed True"
        )
    if missing == "keep":
        raise InvalidArgument(
            "fallback=True, missing='keep': arrays that an earlier step lacks could keep values of the damaged "
            "one; omit either, and after a Corrupt call rollback and restore into new arrays"
        )


async def is_damaged(store: str | os.PathLike[str] | Store, step: int, error: BaseException | None) -> bool:
    """Return whether a restore of a step failed with an error because the step is damaged.

    What describes the arrays of the step may be missing, which is a `NotFound`, as are `only=` patterns without a
    match.
    """
    if not isinstance(error, NotFound):
        return isinstance(error, Corrupt)
    try:
        async with opened(store, "r") as source:
            await (await chosen_snapshot(source, step, None)).read_nodes()
    except (Corrupt, NotFound):
        return True
    return False


async def _wait_removed(store: Store, step: int, timeout: float) -> None:
    deadline, pause = asyncio.timeout(timeout), _MIN_POLL
    try:
        async with deadline, Watch(store.log.storage, "commits") as watch:
            while later_steps(await store.tags(), step):
                await watch.wait(pause)
                pause = min(2 * pause, _MAX_POLL)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise DeadlineExceeded(
            f"{store.url}: host 0 has not removed the steps after {step} in {timeout:g} s; every host must call "
            f"rollback({step})",
            [0],
        ) from error


async def check_order(
    store: str | os.PathLike[str] | Store, step: int, last: int | None, pending: Iterable[int]
) -> None:
    """Raise what `check_newest` raises, before a step is saved; `last` is the step saved last, if any.

    The steps of the store are read only before the first save, and for a step before the last, which may have been
    removed since; `pending` are the steps whose saves are under way. The save reads them too, but beside its
    caller, which would learn of the wrong order at its next call.
    """
    if last is not None and step >= last:
        return
    tags = dict.fromkeys(map(step_tag, pending), 0)
    with contextlib.suppress(NotAStore, Unavailable):  # the save creates the store, or raises the error
        async with opened(store, "r") as source:
            tags = {**tags, **await source.tags()}
    check_newest(store.url if isinstance(store, Store) else os.fspath(store), step, tags)


def check_newest(url: str, step: int, tags: Mapping[str, int]) -> None:
    """Raise `InvalidArgument` if a step comes before the newest step among the tags of a store."""
    saved = steps_of(tags)
    if not saved or step >= saved[-1]:
        return
    earlier = [number for number in saved if number < step]
    advice = (
        "there is no earlier step for rollback; to start again, use another URL, or remove the later steps first "
        f"(tstore rm {url} --step {saved[-1]})"
    )
    if earlier:
        advice = f"to go on from an earlier step, call rollback first, as in rollback({earlier[-1]})"
    raise InvalidArgument(
        f"{url}: step {step} comes before step {saved[-1]}, the newest, which a restarted job would restore; "
        f"{advice}"
    )
