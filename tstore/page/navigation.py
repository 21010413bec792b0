"""The views of the page, in the order of the navigation."""

from __future__ import annotations

from tstore.page import run
from tstore.page.views import View

__all__ = ["VIEWS"]

VIEWS = [
    View("", "Run", "run.html", run.load),
]
