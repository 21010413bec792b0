"""The saves of a `Checkpointer`: those under way, and the outcome of each that has ended.

An error of a save or of what follows it (the report, garbage collection) is raised at the next call of the
`Checkpointer`, or with `on_error="warn"` logged at once. Errors of a wrong call
(`InvalidArgument`, `Misuse`) are always raised.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal, get_args

from tstore.checkpoint.background import SaveReport, SaveWork
from tstore.checkpoint.background_store import BackgroundStore
from tstore.core.format.arguments import checked_choice, checked_function
from tstore.core.format.tree.retention import Keep
from tstore.core.runtime.event_loops import BACKGROUND
from tstore.core.runtime.pool import run
from tstore.errors import DeadlineExceeded, InvalidArgument, Misuse, Unavailable

__all__ = ["OnError", "OnSaved", "SaveSeries"]

OnError = Literal["raise", "warn"]
OnSaved = Callable[[SaveReport], object]

_log = logging.getLogger("tstore.checkpoint")


class SaveSeries:
    """The saves of one `Checkpointer`, which adds each as it begins and learns here of their errors.

    `keep` says what to keep once a save is committed; None collects nothing. `unsaved` has the errors of the saves
    that have failed since the last successful one, by step, if they are not raised.
    """

    def __init__(self, keep: Keep | None, on_error: OnError, on_saved: OnSaved | None) -> None:
        checked_choice("on_error", on_error, get_args(OnError))
        checked_function("on_saved", on_saved)
        self.unsaved: dict[int, BaseException] = {}
        self._keep = keep
        self._on_error = on_error
        self._on_saved = on_saved
        self._saves: list[SaveWork] = []  # under way, or not yet known to have succeeded
        self._end_lock = asyncio.Lock()  # reports come one after the other, and so do collections
        self._late_error: BaseException | None = None  # of a report or a collection

    def add(self, save: SaveWork) -> None:
        """Add a save that has begun."""
        self._saves.append(save)

    @property
    def pending(self) -> list[int]:
        """The steps whose saves are under way."""
        return [save.step for save in self._saves if not save.committed.done()]

    def tolerates(self, error: BaseException) -> bool:
        """Return whether an error of a save is logged in place of being raised."""
        raised = InvalidArgument, Misuse
        return self._on_error == "warn" and isinstance(error, Exception) and not isinstance(error, raised)

    async def end(self, save: SaveWork, store: BackgroundStore) -> None:
        """Report a save that has ended, and if it was committed, collect the steps that are not to be kept."""
        if (report := save.report) is None:
            error = save.committed.exception()
            if error is not None and self.tolerates(error):
                save.mark_seen()
                self.unsaved[save.step] = error
                _log.warning("%s: step %d is not saved; the job goes on: %s", save.url, save.step, _named(error))
            return
        for step in [step for step in self.unsaved if step <= save.step]:
            del self.unsaved[step]
        _log.info("%s: %s", save.url, report)
        async with self._end_lock:
            if self._on_saved is not None:
                try:
                    await run(self._on_saved, report)
                except (Exception, KeyboardInterrupt, SystemExit) as error:
                    message = f"on_saved failed for step {save.step}, which is saved: {_named(error)}"
                    if isinstance(error, Exception):
                        self._fail_late(message, error)
                    else:  # it would end the event loop of all saves, here and where it is raised
                        self._fail_late(
                            message, Misuse(f"{message}; raise an Exception, or end the job elsewhere")
                        )
            if self._keep is not None:
                await self._collect(report.version, self._keep, store)

    def raise_error(self, returned: SaveWork | None = None) -> None:
        """Raise the error of a failed save, report or collection that nobody has seen yet.

        `returned` is a save that the caller is about to get, which reports its error itself.
        """
        for save in [save for save in self._saves if save is not returned and save.ended.done()]:
            self._saves.remove(save)
            if (error := save.unseen_error) is not None:
                save.mark_seen()
                raise error
        if self._late_error is not None:
            error, self._late_error = self._late_error, None
            BACKGROUND.withdraw(self)
            raise error

    def unseen_error(self) -> BaseException | None:
        """Return what `raise_error` would raise."""
        errors = (save.unseen_error for save in self._saves if save.ended.done())
        return next((error for error in errors if error is not None), self._late_error)

    def raise_unsaved(self, url: str) -> None:
        """Raise `Unavailable` if the last saves have failed, with errors that were only logged."""
        if self.unsaved:
            steps = ", ".join(map(str, self.unsaved))
            error = self.unsaved[max(self.unsaved)]
            self.unsaved = {}
            raise Unavailable(f"{url}: step {steps} is not saved, nor any after it: {_named(error)}") from error

    def forget_unsaved_after(self, step: int) -> None:
        """Forget the failed saves of later steps, which a rollback to a step has given up."""
        self.unsaved = {number: error for number, error in self.unsaved.items() if number <= step}

    def has_failed(self, step: int | None) -> bool:
        """Return whether the save of a step has failed, even if that has not been reported yet."""
        return any(save.has_failed and save.step == step for save in self._saves)

    async def wait_ended(self, timeout: float | None) -> bool:
        """Wait until nothing is under way; return False if that takes longer than the timeout."""
        completions = [asyncio.wrap_future(save.ended) for save in self._saves]
        return not completions or not (await asyncio.wait(completions, timeout=timeout))[1]

    async def abandon(self, reason: str) -> None:
        """Cancel what is under way, except a commit that has begun, and wait for its end."""
        for save in self._saves:
            save.abandon(reason)
        await self.wait_ended(None)

    def unfinished(self) -> str:
        """Return which saves have not ended, as a part of a message."""
        steps = ", ".join(str(save.step) for save in self._saves if not save.ended.done())
        return f"the save of step {steps} has not ended"

    async def _collect(self, version: int, keep: Keep, store: BackgroundStore) -> None:
        what = f"the garbage collection after version {version}"
        try:
            await (await store.opened()).collect(keep)
        except asyncio.CancelledError:
            message = f"{what} was abandoned; the next one collects the same steps"
            self._fail_late(message, DeadlineExceeded(message))
        except Exception as error:  # also that of a storage of the caller's
            self._fail_late(f"{what} failed: {_named(error)}", error)

    def _fail_late(self, message: str, error: BaseException) -> None:
        """Keep the error of what follows a commit for the next call, or log it."""
        if self.tolerates(error):
            _log.warning("%s; the job goes on", message)
            return
        self._late_error = error
        BACKGROUND.report_at_exit(self, message)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
