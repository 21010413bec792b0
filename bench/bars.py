"""Targets of measured figures (bars), and the table of those met and missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isnan
from typing import Any

from rich.table import Table

from bench.figures import or_none


@dataclass(frozen=True)
class Bar:
    """A target: `measured` must be at least `need`; `measured` is NaN if it was not measured in this run."""

    what: str
    need: float
    measured: float
    most: bool = False  # `measured` must be at most `need` instead
    unit: str = "×"

    @property
    def met(self) -> bool | None:
        if isnan(self.measured):
            return None
        return self.measured <= self.need if self.most else self.measured >= self.need


def bar_table(bars: Sequence[Bar]) -> Table:
    out = Table(title="bars", title_justify="left")
    for head in ("", "bar", "measured", ""):
        out.add_column(head, justify="right" if head else "left")
    for bar in bars:
        verdict = {True: "[green]met", False: "[red]missed", None: "[dim]not measured"}[bar.met]
        sign = "≤" if bar.most else "≥"
        out.add_row(bar.what, f"{sign} {bar.need:g}{bar.unit}", number(bar.measured, bar.unit), verdict)
    return out


def bars_as_data(bars: Sequence[Bar]) -> list[dict[str, Any]]:
    """Return the bars as data for JSON."""
    return [asdict(bar) | {"measured": or_none(bar.measured), "met": bar.met} for bar in bars]


def number(value: float, unit: str = "") -> str:
    """Format a number with two decimals, or none from 100; a dash for NaN."""
    if isnan(value):
        return "–"
    return (f"{value:.0f}" if value >= 100 else f"{value:.2f}") + unit
