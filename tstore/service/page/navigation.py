"""The views of the page, in the order of the navigation."""

from __future__ import annotations

from tstore.service.page import compare, health, hosts, run, status, tensor, tree
from tstore.service.page.views import View

__all__ = ["VIEWS"]

VIEWS = [
    View("", "Run", "run.html", run.load),
    View("hosts", "Hosts", "hosts.html", hosts.load),
    View("tree", "Tree", "tree.html", tree.load),
    View("compare", "Compare", "compare.html", compare.load),
    View("tensor", "", "tensor.html", tensor.load),
    View("health", "Health", "health.html", health.load),
    View("status", "", "status.html", status.load),
    View("version", "", "", run.load_version),
]
