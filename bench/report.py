"""Tables of figures, as text, and figures as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isnan
from typing import Any

from rich.table import Table

from bench.bars import number
from bench.figures import Figures
from bench.rounds import Results

MIB = 2**20

Form = Callable[[float], str]


def table(
    title: str, heads: Iterable[str], rows: Iterable[Sequence[str] | str], notes: Iterable[str] = ()
) -> Table:
    """Return a table with these rows; one that is a string begins a section, with no title if it is empty."""
    out = Table(title=title, title_justify="left", caption="\n".join(notes), caption_justify="left")
    for at, head in enumerate(heads):
        out.add_column(head, justify="right" if at else "left", no_wrap=not at)
    for row in rows:
        if not isinstance(row, str):
            out.add_row(*row)
            continue
        out.add_section()
        if row:
            out.add_row(f"[bold]{row}")
    return out


def figures_table(title: str, figures: Mapping[str, Figures], columns: Sequence[tuple[str, str, Form]]) -> Table:
    """Return a table of medians with a row for each contender and a column, with its head, for each measure."""
    rows = [
        [f.title, *(cell(f.median(measure), form) for _, measure, form in columns)]
        for f in figures.values()
        if f.values
    ]
    return table(title, ["", *(head for head, _, _ in columns)], rows, failures({"": dict(figures)}))


def cost_table(results: Results, remarks: Iterable[str] = ()) -> Table:
    """Return the medians of each piece of work, and the median ratios of the times to tstore's."""
    columns: list[tuple[str, Form]] = [
        ("seconds", seconds),
        ("cpu", seconds),
        ("memory", lambda value: f"{value / MIB:.1f}"),
        ("read", size),
        ("written", size),
    ]
    rows: list[Sequence[str] | str] = []
    for work, figures in results.items():
        measured = [f for f in figures.values() if f.values]
        rows += [work] if measured else []
        for f in measured:
            cells = [cell(f.median(measure), form) for measure, form in columns]
            own = figures.get("tstore")
            for at, measure in ((1, "seconds"), (3, "cpu")):
                cells.insert(at, number(f.ratio(measure, own) if own else float("nan"), "×"))
            rows.append([f"  {f.title}", *cells, str(len(f.of("seconds")))])
    heads = ("", "seconds", "÷ tstore", "CPU", "÷ tstore", "peak MiB", "read", "written", "rounds")
    return table("medians of the rounds", heads, rows, [*failures(results), *remarks])


def failures(results: Results) -> list[str]:
    """Return a line for each contender that failed at a piece of work."""
    return [
        f"{work}: {f.title}: {f.error}".removeprefix(": ")
        for work, figures in results.items()
        for f in figures.values()
        if f.error
    ]


def as_data(results: Results) -> dict[str, dict[str, Any]]:
    """Return the figures by piece of work and contender for JSON."""
    return {work: {name: f.as_data() for name, f in figures.items()} for work, figures in results.items()}


def cell(value: float, form: Form) -> str:
    return "–" if isnan(value) else form(value)


def seconds(value: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def size(value: float) -> str:
    return f"{value / MIB:,.1f} MiB" if value >= MIB else f"{value / 1024:.1f} KiB"
