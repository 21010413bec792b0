"""The table of what pieces of work cost each contender."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan

from rich.table import Table

from bench.bars import number
from bench.rounds import Results

_MIB = 2**20


def cost_table(results: Results, remarks: Sequence[str] = ()) -> Table:
    """Return the medians of each piece of work, and the median ratios of the times to tstore's."""
    out = Table(title="medians of the rounds", title_justify="left")
    for head in ("", "seconds", "÷ tstore", "CPU", "÷ tstore", "peak MiB", "read", "written", "rounds"):
        out.add_column(head, justify="right" if head else "left", no_wrap=True)
    columns: list[tuple[str, Callable[[float], str]]] = [
        ("seconds", _seconds),
        ("cpu", _seconds),
        ("memory", lambda value: f"{value / _MIB:.1f}"),
        ("read", _size),
        ("written", _size),
    ]
    for work, figures in results.items():
        if not any(f.values for f in figures.values()):
            continue
        out.add_section()
        out.add_row(f"[bold]{work}")
        for f in figures.values():
            if f.values:
                values = [(f.median(measure), form) for measure, form in columns]
                cells = ["–" if isnan(value) else form(value) for value, form in values]
                own = figures.get("tstore")
                for at, measure in ((1, "seconds"), (3, "cpu")):
                    cells.insert(at, number(f.ratio(measure, own) if own else float("nan"), "×"))
                out.add_row(f"  {f.title}", *cells, str(len(f.of("seconds"))))
    notes = [
        f"{work}: {f.title}: {f.error}" for work, figures in results.items() for f in figures.values() if f.error
    ]
    out.caption = "\n".join([*notes, *remarks])
    out.caption_justify = "left"
    return out


def _seconds(value: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def _size(value: float) -> str:
    return f"{value / _MIB:,.1f} MiB" if value >= _MIB else f"{value / 1024:.1f} KiB"
