"""The results of the attacks as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tests.attacks.runner import Result

__all__ = ["show"]


def show(results: Sequence[Result], console: Console) -> None:
    """Print a line per group, and one per broken case."""
    table = Table(box=None, pad_edge=False)
    table.add_column("group", no_wrap=True, min_width=8)
    for name in ("tried", "held", "broken", "not tried", "seconds"):
        table.add_column(name, justify="right")
    for name in ("server peak", "server files", "client peak", "honest requests kept"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            result.name,
            str(result.tried),
            str(result.held),
            str(len(result.broken)),
            str(result.untried),
            f"{result.seconds:.0f}",
            _mebibytes(result.server_memory),
            str(result.server_files or "–"),
            _mebibytes(result.client_memory),
            f"{result.kept} of {result.requests}" if result.requests else "–",
        )
    console.print(table)
    for result in results:
        for case, message in result.broken:
            console.print(f"{result.name}: {case.name}: {message}", markup=False, highlight=False, soft_wrap=True)


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB" if size else "–"
