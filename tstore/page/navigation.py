"""The views of the page, in the order of the navigation."""

from __future__ import annotations

from tstore.page import health, hosts, run, tree
from tstore.page.views import View

__all__ = ["VIEWS"]

VIEWS = [
    View("", "Run", "run.html", run.load),
    View("tree", "Tree", "tree.html", tree.load),
    View("health", "Health", "health.html", health.load),
    View("hosts", "", "hosts.html", hosts.load),
    View("version", "", "", run.load_version),
]
