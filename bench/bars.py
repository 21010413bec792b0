"""Bars: what a figure is to reach, and the table that says which were reached."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan

from rich.table import Table


@dataclass(frozen=True)
class Bar:
    """``need`` × the reference is the least (``measured`` NaN: it could not be measured in this run)."""

    what: str
    need: float
    measured: float
    most: bool = False  # then ``need`` is the most, not the least
    unit: str = "×"

    @property
    def met(self) -> bool | None:
        if isnan(self.measured):
            return None
        return self.measured <= self.need if self.most else self.measured >= self.need


def bar_table(of: list[Bar]) -> Table:
    out = Table(title="bars", title_justify="left")
    for head in ("", "bar", "measured", ""):
        out.add_column(head, justify="right" if head else "left")
    for bar in of:
        verdict = {True: "[green]met", False: "[red]missed", None: "[dim]not measured"}[bar.met]
        sign = "≤" if bar.most else "≥"
        out.add_row(bar.what, f"{sign} {bar.need:g}{bar.unit}", number(bar.measured, bar.unit), verdict)
    return out


def number(value: float, unit: str = "") -> str:
    """Three digits of it; a dash for NaN."""
    if isnan(value):
        return "–"
    return (f"{value:.0f}" if value >= 100 else f"{value:.2f}") + unit
