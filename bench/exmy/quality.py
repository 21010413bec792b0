"""SQNR of every format of 2 to 8 bits, beside independently computed figures and Lloyd-Max quantization.

    python -m bench.exmy quality --json quality.json

The data are 2^19 iid samples of the Gaussian, Laplace and Student-t(5) distributions. exmy_sqnr.txt has figures
computed without exmy from the first draw (NumPy's default_rng(0), one distribution after the other), because with
heavy tails the SQNR depends on the few largest samples. `choose` is measured on several draws.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import exmy
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import program
from bench.bars import Bar
from bench.report import table

COUNT = 1 << 19
WIDTHS = range(2, 9)
DRAWS: dict[str, Callable[[np.random.Generator], Any]] = {
    "gauss": lambda rng: rng.standard_normal(COUNT),
    "laplace": lambda rng: rng.laplace(size=COUNT),
    "t5": lambda rng: rng.standard_t(5, COUNT),
}
MODES: dict[str, dict[str, Any]] = {
    "power of two": {},
    "float scale": {"scale": "float"},
    "blocks of 32": {"block": 32},
    "row of 4096, max": {"axis": -1, "scale": "max"},
}


class StoredFigures(NamedTuple):
    """The figures of exmy_sqnr.txt for one format and distribution, in dB.

    `opt` has the best float scale for the tensor, and `p2` the best power of two. `mx32` has the better of two
    powers of two for each block of 32. `row4096` has, for each row of 4096, the smallest power of two that clips
    no value.
    """

    opt: float
    p2: float
    mx32: float
    row4096: float


class Measured(NamedTuple):
    """The SQNR of one format on the first draw of a distribution, in dB by mode."""

    sqnr: dict[str, float]
    stored: StoredFigures


class Chosen(NamedTuple):
    """For one width of one distribution, the format that `choose` returned for each draw, and the best format."""

    names: list[str]
    best: list[str]
    lost: float
    """The largest loss against the best format of the width over all draws, in dB."""


def stored_figures() -> tuple[dict[tuple[str, str], StoredFigures], dict[int, float]]:
    """Return the stored figures by distribution and format, and those of Lloyd-Max on Gaussian data by width."""
    number = r"(-?[\d.]+)"
    row = re.compile(rf"(\w+) opt {number} \(H {number}\) p2 {number} mx32 {number}/{number} row4096 {number}")
    figures, lloyd = {}, {}
    for line in Path(__file__).with_name("exmy_sqnr.txt").read_text().splitlines():
        if line.startswith("B "):
            fields = line.split()
            lloyd[int(fields[1])] = float(fields[5])
        elif not line.startswith("#"):
            for name, opt, _, p2, low, high, rows in row.findall(line):
                values = float(opt), float(p2), max(float(low), float(high)), float(rows)
                figures[name, line.split()[0]] = StoredFigures(*values)
    return figures, lloyd


def measure(draws: int) -> tuple[dict[str, dict[str, Measured]], dict[str, dict[int, Chosen]]]:
    figures, _ = stored_figures()
    measured: dict[str, dict[str, Measured]] = {}
    chosen: dict[str, dict[int, Chosen]] = {}
    console = Console(stderr=True)
    generators = [np.random.default_rng(seed) for seed in range(draws)]
    for name, draw in DRAWS.items():
        arrays = [draw(rng).astype(np.float32).reshape(-1, 4096) for rng in generators]
        sqnrs = {}
        for f in track([f for bits in WIDTHS for f in exmy.formats(bits)], name, console=console, transient=True):
            sqnrs[f] = {m: [_sqnr(x, f, **options) for x in arrays] for m, options in MODES.items()}
        measured[name] = {
            f.name: Measured({mode: values[0] for mode, values in modes.items()}, figures[name, f.name])
            for f, modes in sqnrs.items()
            if (name, f.name) in figures
        }
        chosen[name] = {}
        for bits in WIDTHS:
            names, best, lost = [], [], [0.0]
            for i, x in enumerate(arrays):
                f = exmy.choose(x, bits=bits).with_bias(0)
                plain = next(g for g in exmy.formats(bits) if g.with_bias(0) == f)
                achieved = {g: sqnrs[g]["power of two"][i] for g in exmy.formats(bits)}
                top = max(achieved, key=achieved.__getitem__)
                names.append(plain.name)
                best.append(top.name)
                lost.append(achieved[top] - achieved[plain])
            chosen[name][bits] = Chosen(names, best, max(lost))
    return measured, chosen


def _sqnr(x: Any, f: exmy.Format, **options: Any) -> float:
    return exmy.sqnr(x, exmy.quantize(x, f, **options).dequantize())


def quality_table(name: str, figures: dict[str, Measured]) -> Table:
    rows: list[list[str] | str] = []
    bits = 0
    for f, figure in figures.items():
        if exmy.Format(f).bits != bits:
            bits = exmy.Format(f).bits
            rows.append("")
        stored = figure.stored
        cells = zip(figure.sqnr.values(), (stored.p2, stored.opt, stored.mx32, stored.row4096), strict=True)
        rows.append([f, *(f"{sqnr:.2f} ({sqnr - reference:+.2f})" for sqnr, reference in cells)])
    return table(f"{name}: SQNR in dB (and the difference from the stored figure)", ("", *MODES), rows)


def choice_table(chosen: dict[str, dict[int, Chosen]]) -> Table:
    def cell(choice: Chosen) -> str:
        names, best = ("/".join(dict.fromkeys(each)) for each in (choice.names, choice.best))
        return f"{names}  best {best}  −{choice.lost:.2f}"

    rows = [[str(bits), *(cell(by_width[bits]) for by_width in chosen.values())] for bits in WIDTHS]
    return table("choose(x, bits=…): the format chosen, the best of the width, dB lost", ("bits", *chosen), rows)


def bars(measured: dict[str, dict[str, Measured]], chosen: dict[str, dict[int, Chosen]]) -> list[Bar]:
    """Return a bar for each promise, with the smallest margin over its formats."""
    out = []

    def add(what: str, need: float, margins: dict[str, float]) -> None:
        worst = min(margins, key=margins.__getitem__)
        out.append(Bar(f"{what} (least: {worst})", need, margins[worst], unit=" dB"))

    for name, by_format in measured.items():
        offsets = {f: a.sqnr["power of two"] - a.stored.p2 for f, a in by_format.items()}
        add(f"{name}: power-of-two offset − p2", -0.15, offsets)
        scales = {f: a.sqnr["float scale"] - a.stored.opt for f, a in by_format.items()}
        add(f"{name}: float scale − opt", -0.3, scales)
    t5 = measured["t5"]
    add("t5: blocks of 32 − better mx32", -0.3, {f: a.sqnr["blocks of 32"] - a.stored.mx32 for f, a in t5.items()})
    _, lloyd = stored_figures()
    best = {bits: [a for f, a in measured["gauss"].items() if exmy.Format(f).bits == bits] for bits in WIDTHS}
    lead = {f"B={b}": max(a.sqnr["float scale"] for a in best[b]) - lloyd[b] for b in WIDTHS if b > 2}
    add("gauss: best format with a float scale − Lloyd-Max", -1.4, lead)
    for name, widths in chosen.items():
        add(f"{name}: choose − best format", -0.3, {f"B={b}": -choice.lost for b, choice in widths.items()})
    return out


@program.command(__doc__)
@click.option("--draws", default=5, type=program.COUNT)
@program.json_option
def quality(run: program.Run, draws: int) -> None:
    measured, chosen = measure(draws)
    run.show(*(quality_table(name, figures) for name, figures in measured.items()), choice_table(chosen))
    formats = {
        name: {f: {"sqnr": m.sqnr, "stored": m.stored._asdict()} for f, m in figures.items()}
        for name, figures in measured.items()
    }
    choices = {name: {bits: c._asdict() for bits, c in widths.items()} for name, widths in chosen.items()}
    run.finish(bars(measured, chosen), unit="dB", formats=formats, choose=choices)
