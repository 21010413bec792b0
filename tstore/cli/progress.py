"""Progress of a command: a status line on standard error if that is a terminal, milestones on standard output."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

from tstore.cli.text import plain

__all__ = ["Progress"]


class Progress:
    """A status line on the terminal; with `milestones` they are printed on standard output."""

    def __init__(self, milestones: bool = False) -> None:
        self._milestones = milestones
        self._console = Console(stderr=True, markup=False, emoji=False) if sys.stderr.isatty() else None
        self._status: Status | None = None

    def doing(self, what: str) -> None:
        """Show the current work in the status line."""
        if self._console is None:
            return
        if self._status is None:
            spinner = "line" if self._console.options.ascii_only else "dots"
            self._status = self._console.status(Text(plain(what)), spinner=spinner)
            self._status.start()
        else:
            self._status.update(Text(plain(what)))

    def done(self, what: str) -> None:
        """Clear the status line and print a milestone."""
        self.stop()
        if self._milestones:
            print("•", plain(what), flush=True)

    def stop(self) -> None:
        """Clear the status line."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
