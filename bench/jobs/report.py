"""The tables and bars of `bench.jobs`, and its figures as JSON."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

from rich.table import Table

from bench.bars import Bar, bars_as_data
from bench.figures import Figures
from bench.jobs.contenders import CONTENDERS, ORBAX, PEERS, TSTORE
from bench.jobs.rounds import COLD, COPY, RESTORES, SAVES, WRITTEN, blocking, lock, peak, slowed

Races = dict[str, dict[str, Figures]]
Format = Callable[[float], str]

_STAGINGS = ("memory", "turns")
_TIMES = (
    COPY,
    *(blocking(staging) for staging in _STAGINGS),
    *reversed(SAVES.values()),
    RESTORES["same"],
    COLD,
    *(RESTORES[what] for what in ("other", "tenth")),
)
_MIB = 2**20


def tables(title: str, figures: dict[str, Figures]) -> list[Table]:
    """Return two tables: one of seconds, and one of peak memory, slower training and bytes written."""
    times = _table(f"{title}: seconds", figures, [(m, m, _seconds) for m in _TIMES])
    costs: list[tuple[str, str, Format]] = [
        (f"peak MiB, {measure}", peak(measure), _mebibytes)
        for measure in (*(blocking(staging) for staging in _STAGINGS), SAVES[True], RESTORES["same"])
    ]
    for staging in _STAGINGS:
        costs += [(measure, measure, _percent) for measure in (slowed(staging), lock(staging))]
    costs.append((WRITTEN, WRITTEN, _percent))
    return [times, _table(f"{title}: memory beyond the state, training, bytes", figures, costs)]


def bars(races: Races, nbytes: int) -> list[Bar]:
    """Return the bars of the workloads that ran; `nbytes` is the size of the large one."""
    out = []
    for workload, figures in races.items():
        for measure in (SAVES[True], RESTORES["same"]):
            peers = {name: figures[name] for name in PEERS if name in figures}
            for name in (name for name in TSTORE[1:] if name in figures):
                out.append(_faster(workload, figures, name, measure, peers, "best of Orbax and DCP", 2))
                if workload == "large" and "raw" in figures:
                    raw = {"raw": figures["raw"]}
                    out.append(_faster(workload, figures, name, measure, raw, "raw disk", 0.8))
        if workload == "large":
            out += _large_bars(figures, nbytes)
    return out


def as_data(about: dict[str, Any], races: Races, nbytes: int) -> dict[str, Any]:
    """Return the data that `--json` writes, without NaN."""
    return {
        "machine": about,
        "unit": "seconds; bytes of peak memory; shares",
        "workloads": {
            workload: {name: f.as_data() for name, f in figures.items()} for workload, figures in races.items()
        },
        "bars": bars_as_data(bars(races, nbytes)),
    }


def _large_bars(figures: dict[str, Figures], nbytes: int) -> list[Bar]:
    orbax = {name: figures[name] for name in ORBAX if name in figures}
    out = []
    if "tstore-jax" in figures:
        out.append(_faster("large", figures, "tstore-jax", RESTORES["other"], orbax, "best of Orbax", 3))
    for name in (name for name in TSTORE if name in figures):
        mine, block = figures[name], blocking("memory")
        out.append(Bar(f"large: {name} {block} ÷ {COPY}", 1.1, mine.ratio(block, mine, COPY), most=True))
        for staging in CONTENDERS[name].stagings:
            state = nbytes if staging == "memory" else 0
            most, measured = (state / _MIB + 300, mine.median(peak(blocking(staging))) / _MIB)
            out.append(Bar(f"large: {name} {peak(blocking(staging))}", most, measured, most=True, unit=" MiB"))
            share = 100 * mine.median(slowed(staging))
            out.append(Bar(f"large: {name} {slowed(staging)}", 5, share, most=True, unit=" %"))
            if "raw" in figures:
                beyond = share - 100 * figures["raw"].median(slowed("memory"))
                out.append(
                    Bar(f"large: {name} {slowed(staging)}, beyond raw disk", 5, beyond, most=True, unit=" %")
                )
            share = 100 * mine.median(lock(staging))
            out.append(Bar(f"large: {name} {lock(staging)}", 5, share, most=True, unit=" %"))
        written = 100 * mine.median(WRITTEN)
        out.append(Bar(f"large: {name} {WRITTEN}", 12, written, most=True, unit=" %"))
    return out


def _faster(
    workload: str,
    figures: dict[str, Figures],
    name: str,
    measure: str,
    peers: dict[str, Figures],
    what: str,
    need: float,
) -> Bar:
    """Return a bar for the ratio of the time of the fastest peer to that of a contender."""
    have = [f for f in peers.values() if f.of(measure)]
    mine = figures.get(name)
    measured = min(have, key=lambda f: f.median(measure)).ratio(measure, mine) if mine and have else float("nan")
    return Bar(f"{workload}: {what} ÷ {name}, {measure}", need, measured)


def _table(title: str, figures: dict[str, Figures], columns: list[tuple[str, str, Format]]) -> Table:
    out = Table(title=title, title_justify="left")
    out.add_column("", no_wrap=True)
    for head, _, _ in columns:
        out.add_column(head, justify="right")
    for f in figures.values():
        if f.values:
            values = [(f.median(measure), form) for _, measure, form in columns]
            out.add_row(f.title, *("–" if isnan(value) else form(value) for value, form in values))
    out.caption = "\n".join(f"{f.title}: {f.error}" for f in figures.values() if f.error)
    out.caption_justify = "left"
    return out


def _seconds(value: float) -> str:
    return f"{value:.3g}"


def _mebibytes(value: float) -> str:
    return f"{value / _MIB:.0f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"
