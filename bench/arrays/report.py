"""The table and the bars of `bench.arrays`, and its figures as JSON."""

from __future__ import annotations

from math import isnan
from typing import Any

from rich.table import Table

from bench.arrays.rounds import READS, WRITES, Results
from bench.bars import Bar, bars_as_data, number
from bench.figures import Figures

_MIB = 2**20
_NONE = Figures("")
_TENSORSTORE = ("ts-file", "ts-ocdbt")


def table(results: Results) -> Table:
    """Return the figures of each row, and how many times as long each contender takes as tstore."""
    out = Table(title="medians of the rounds", title_justify="left")
    for head in ("", "seconds", "CPU", "peak MiB", "÷ tstore", "CPU ÷ tstore", "rounds"):
        out.add_column(head, justify="right" if head else "left", no_wrap=True)
    for row, figures in results.items():
        out.add_section()
        out.add_row(f"[bold]{row}")
        mine = figures.get("tstore", _NONE)
        for f in figures.values():
            if f.values:
                times = [f"{f.median(measure):.3g}" for measure in ("seconds", "cpu")]
                ratios = [number(f.ratio(measure, mine), "×") for measure in ("seconds", "cpu")]
                out.add_row(
                    f"  {f.title}", *times, f"{f.median('memory') / _MIB:.0f}", *ratios, str(len(f.of("seconds")))
                )
    notes = [
        f"{row}: {f.title}: {f.error}" for row, figures in results.items() for f in figures.values() if f.error
    ]
    out.caption, out.caption_justify = "\n".join(notes), "left"
    return out


def bars(results: Results) -> list[Bar]:
    """Return the bars of the rows that ran."""
    out = []
    for row, figures in results.items():
        layout, _, what = row.partition(": ")
        mine, peer = figures.get("tstore", _NONE), _fastest(figures, _TENSORSTORE)
        against = peer.ratio("seconds", mine)
        if what == "write all":
            raw = figures.get("raw", _NONE).ratio("seconds", mine)
            met_by_raw = not isnan(raw) and raw >= 0.9
            need, value, beside = (0.9, raw, "raw") if met_by_raw else (1.5, against, "tensorstore")
            out.append(Bar(f"{row}: {beside} ÷ tstore", need, value))
        elif what == "read all" and layout.endswith("raw"):
            out.append(Bar(f"{row}: tensorstore ÷ tstore", 1.2, against))
        elif what != next(iter(list(WRITES)[1:])):
            out.append(Bar(f"{row}: tensorstore ÷ tstore", 0.8, against))
        if layout.startswith("64³") and what in READS:
            zarr = figures.get("zarr", _NONE).ratio("seconds", mine)
            out.append(Bar(f"{row}: zarr-python ÷ tstore", 5, zarr))
    return out


def _fastest(figures: dict[str, Figures], names: tuple[str, ...]) -> Figures:
    have = [figures[name] for name in names if name in figures and figures[name].of("seconds")]
    return min(have, key=lambda f: f.median("seconds"), default=_NONE)


def as_data(about: dict[str, Any], results: Results) -> dict[str, Any]:
    """Return the data that `--json` writes, without NaN."""
    return {
        "machine": about,
        "unit": "seconds and bytes of all of a row",
        "rows": {row: {name: f.as_data() for name, f in figures.items()} for row, figures in results.items()},
        "bars": bars_as_data(bars(results)),
    }
