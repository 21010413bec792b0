"""The tables and bars of `bench.save`, and its figures as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from bench.bars import Bar, bars_as_data, number
from bench.figures import or_none
from bench.save.peers import RAW, TENSORSTORE
from bench.save.rounds import MEASURES, SaveFigures

Races = dict[str, dict[str, SaveFigures]]
MIB = 2**20


def best(figures: dict[str, SaveFigures], names: tuple[str, ...], measure: str) -> SaveFigures | None:
    """Return the contender with the best median, of those measured in more than half of the rounds."""
    most = max((len(f.of(measure)) for f in figures.values()), default=0)
    have = [figures[n] for n in names if n in figures and len(figures[n].of(measure)) > most / 2]
    return max(have, key=lambda f: f.median(measure), default=None)


def table(title: str, figures: dict[str, SaveFigures]) -> Table:
    out = Table(title=title, title_justify="left")
    for head in ("", "GB/s", "min–max", "× raw", "× tensorstore", "peak MiB", "rounds"):
        out.add_column(head, justify="left" if not head else "right", no_wrap=True)
    for measure in MEASURES:
        raw, peer = best(figures, RAW, measure), best(figures, TENSORSTORE, measure)
        out.add_section()
        out.add_row(f"[bold]{measure}")
        for f in figures.values():
            values = f.of(measure).values()
            if not values:
                continue
            peak = f.peak.get(measure.split()[0])
            out.add_row(
                f"  {f.title}" + (" *" if f is raw or f is peer else ""),
                f"{f.median(measure):.3g}",
                f"{min(values):.3g}–{max(values):.3g}",
                number(f.ratio(measure, raw) if raw else float("nan")),
                number(f.ratio(measure, peer) if peer else float("nan")),
                "–" if peak is None else f"{peak / MIB:.0f}",
                str(len(values)),
            )
    notes = [f"{f.title}: {f.error}" for f in figures.values() if f.error]
    notes += [
        f"{f.title}: a cold restore read only {min(f.cold_share):.0%} of the stored bytes from disk"
        for f in figures.values()
        if f.cold_share and min(f.cold_share) < 0.9
    ]
    out.caption = "\n".join(["* the reference of the ratios", *notes])
    out.caption_justify = "left"
    return out


def bars(races: Races) -> list[Bar]:
    """Return the bars of the workloads that ran."""
    out: list[Bar] = []

    def add(
        workload: str, measure: str, against: tuple[str, ...], need: float, what: str, *, name: str = "tstore"
    ) -> None:
        figures = races.get(workload, {})
        other, mine = best(figures, against, measure), figures.get(name)
        measured = mine.ratio(measure, other) if mine and other else float("nan")
        if figures:
            out.append(Bar(f"{workload}: {name} {measure} ÷ {what}", need, measured))

    durable, not_durable, warm, _ = MEASURES
    add("large", durable, RAW, 0.85, "raw")
    add("large", durable, TENSORSTORE, 1.1, "better tensorstore")
    add("large", not_durable, TENSORSTORE, 2, "better tensorstore")
    add("large", not_durable, ("ts-file-copy",), 2, "tensorstore file's plain write()")
    add("large", warm, RAW, 0.8, "raw")
    add("large", warm, TENSORSTORE, 2, "better tensorstore")
    for workload, save, restore in (("chunks64k", 2, 2.5), ("leaves", 3, 3)):
        for measure, least in ((durable, save), (not_durable, save), (warm, restore)):
            add(workload, measure, ("ts-ocdbt",), least, "tensorstore ocdbt")
    add("large", durable, RAW, 2, "raw, logical bytes", name="tstore-e4m3")
    for workload, figures in races.items():
        peaks = [p for n, f in figures.items() if n.startswith("tstore") for p in f.peak.values()]
        most = max(peaks) / MIB if peaks else float("nan")
        out.append(Bar(f"{workload}: tstore memory beyond the arrays", 300, most, most=True, unit=" MiB"))
    return out


def as_data(about: dict[str, Any], races: Races) -> dict[str, Any]:
    """Return the data that `--json` writes, without NaN."""
    return {
        "machine": about,
        "unit": "GB/s (1e9 bytes of float32)",
        "workloads": {
            w: {
                n: asdict(f)
                | {
                    "median": {m: or_none(f.median(m)) for m in MEASURES},
                    "ratio_to_raw": _ratios(f, figures, RAW),
                    "ratio_to_tensorstore": _ratios(f, figures, TENSORSTORE),
                }
                for n, f in figures.items()
            }
            for w, figures in races.items()
        },
        "bars": bars_as_data(bars(races)),
    }


def _ratios(f: SaveFigures, figures: dict[str, SaveFigures], names: tuple[str, ...]) -> dict[str, float | None]:
    others = {m: best(figures, names, m) for m in MEASURES}
    return {m: or_none(f.ratio(m, other)) if other else None for m, other in others.items()}
