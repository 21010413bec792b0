"""Thresholds of tstore, such as the length of a page, that a test lowers by name, wherever the code uses them."""

from __future__ import annotations

import contextlib

from tstore.lab.simulation.scenario import override_constants

__all__ = ["Thresholds"]


class Thresholds(contextlib.ExitStack):
    """Changes thresholds until the end of a test: `thresholds(PAGE_BYTES=100)`."""

    def __call__(self, **values: float) -> None:
        self.enter_context(override_constants(**values))
