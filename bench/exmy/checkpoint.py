"""`tstore.quantize` beside saves and restores of the same arrays, and entropy coding beside zstd alone.

    python -m bench.exmy checkpoint --dir /dev/shm --json checkpoint.json

Each round saves the arrays as float32 to a new store, saves them with the codec e4m3, and quantizes the float32
version in several ways, in an order that rotates. Then one core encodes and decodes a chunk. GB/s count float32
values, CPU is that of all threads in seconds per GB. Figures are medians, ratios are medians of the paired ratios
of the rounds. Asserts no figure.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import exmy
import numpy as np
from numcodecs import Zstd
from rich.console import Console
from rich.table import Table

import tstore.sync
from bench import machine
from bench.bars import Bar, bar_table, bars_as_data
from bench.cost import Cost, measured
from bench.exmy.speed import measure, ratio

SAVE = "save, codecs='e4m3'"
WAYS: dict[str, dict[str, Any]] = {
    "quantize to e4m3": {"formats": "e4m3"},
    "quantize, bits=4": {"bits": 4},
    "quantize, bits=8": {"bits": 8},
    "quantize, bits=4, packed": {"bits": 4, "coding": "packed"},
    "quantize, min_sqnr=30": {"min_sqnr": 30},
}
CODE_STEPS = {"e2m1": 0.7, "e3m4": 0.125, "e2m6": 0.03, "e3m7": 0.01}
"""Formats of codes for entropy coding, and the step for values of standard deviation 1: 3, 5, 7 and 9 bits."""

Costs = dict[str, list[Cost]]


def run_round(folder: Path, tree: dict[str, Any], turn: int, costs: Costs) -> None:
    """Measure all works of one round in a new store."""

    reserve = machine.Reserve()
    nbytes = sum(x.nbytes for x in tree.values())

    def cost(name: str, work: Callable[[], Any]) -> None:
        reserve.acquire(nbytes)
        reserve.release()
        costs.setdefault(name, []).append(measured(work))

    with tempfile.TemporaryDirectory(dir=folder) as place, tstore.sync.open(place) as store:
        cost("save", lambda: tstore.sync.save(store, tree, 0))
        cost(SAVE, lambda: tstore.sync.save(store, tree, 1, codecs="e4m3"))
        ways = list(WAYS.items())
        for name, options in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            cost(
                name,
                lambda name=name, options=options: tstore.sync.quantize(store, at="step/0", tag=name, **options),
            )
        for step, name in ((0, "restore"), (1, "restore e4m3")):
            cost(name, lambda step=step: tstore.sync.restore(store, step))


def costs_table(costs: Costs, nbytes: int) -> Table:
    out = Table(title="a checkpoint", title_justify="left")
    for head in ("", "GB/s", "CPU s/GB", "memory MiB", f"speed ÷ {SAVE}"):
        out.add_column(head, justify="right" if head else "left", no_wrap=True)
    for name, rows in costs.items():
        speed = median(nbytes / 1e9 / row.seconds for row in rows)
        cpu = median(row.cpu / nbytes * 1e9 for row in rows)
        memory = median(row.memory for row in rows) / (1 << 20)
        cells = f"{speed:.2f}", f"{cpu:.2f}", f"{memory:.0f}", f"{speed_ratio(costs, name, SAVE):.2f}"
        out.add_row(name, *cells)
    return out


def speed_ratio(costs: Costs, name: str, other: str) -> float:
    """Return the median over the rounds of how many times as fast one work is as another."""
    return median(b.seconds / a.seconds for a, b in zip(costs[name], costs[other], strict=True))


def entropy_rows(rounds: int) -> tuple[list[dict[str, Any]], list[Bar]]:
    """Measure entropy coding of a chunk of 2^20 values, in seconds of one core, whatever else the machine does.

    The codes of all chunks are decoded into the same memory, in which they also are with zstd alone. Writing the
    output costs more than decoding its codes, so "zstd, fill" also fills it: no decoder does less.
    """
    x = np.random.default_rng(20).standard_normal(1 << 20, dtype=np.float32)
    y, zstd, rows, bars = np.ones_like(x), Zstd(level=1), [], []
    for name, step in CODE_STEPS.items():
        format = exmy.Format(name)
        codec = exmy.ChunkCodec(format, step / format.smallest_subnormal)
        codes = codec.encode(x)
        stored, decoded = zstd.encode(codes), np.empty_like(codes)

        def decode(codec: Any = codec, stored: Any = stored, decoded: Any = decoded) -> None:
            codec.decode(zstd.decode(stored, decoded), x.shape, x.dtype, y)

        calls = {
            "encode": lambda codec=codec, codes=codes: zstd.encode(codec.encode(x, codes)),
            "decode": decode,
            "zstd alone": lambda stored=stored, decoded=decoded: zstd.decode(stored, decoded),
            "zstd, fill": lambda stored=stored, decoded=decoded: (zstd.decode(stored, decoded), y.fill(1)),
            "np.copyto": lambda: np.copyto(y, x),
        }
        seconds = measure(calls, rounds, time.thread_time)
        speeds = {call: median(x.nbytes / 1e9 / s for s in times) for call, times in seconds.items()}
        rows.append({"name": name, "bits": 8 * len(stored) / x.size, **speeds})
        share = ratio(seconds, "decode", "zstd alone")
        bars.append(Bar(f"entropy-coded {name}: encode, one core", 0.4, speeds["encode"], unit=" GB/s"))
        bars.append(Bar(f"entropy-coded {name}: decode ÷ zstd alone", 0.8, share))
        share = ratio(seconds, "decode", "zstd, fill")
        bars.append(Bar(f"entropy-coded {name}: decode ÷ zstd and a fill of the output", 0.8, share))
    return rows, bars


def entropy_table(rows: list[dict[str, Any]]) -> Table:
    out = Table(title="entropy-coded eXmY, GB/s of float32 on one core", title_justify="left")
    for head in ("", *list(rows[0])[1:]):
        out.add_column(head, justify="right" if head else "left")
    for row in rows:
        out.add_row(row["name"], *(f"{value:.2f}" for value in list(row.values())[1:]))
    return out


@click.command(help=__doc__, context_settings={"max_content_width": 110})
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--arrays", default=8, show_default=True, type=click.IntRange(1), help="Of 4096 x 4096 float32.")
@click.option("--dir", "folder", default=".", type=click.Path(path_type=Path), help="The folder for the stores.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures to this file.")
def checkpoint(rounds: int, arrays: int, folder: Path, json_file: Path | None) -> None:
    console = Console(width=None if Console().is_terminal else 120)
    about = machine.describe(folder)
    console.print_json(json.dumps(about))
    rng = np.random.default_rng(20)
    tree = {f"layer{i}": rng.standard_normal((4096, 4096), np.float32) * np.float32(0.02) for i in range(arrays)}
    costs: Costs = {}
    for turn in range(rounds):
        run_round(folder, tree, turn, costs)
    nbytes = sum(x.nbytes for x in tree.values())
    console.print(costs_table(costs, nbytes))
    needs = {name: 0.4 if "formats" in options else 0.2 for name, options in WAYS.items()}
    bars = [Bar(f"{name} ÷ {SAVE}", need, speed_ratio(costs, name, SAVE)) for name, need in needs.items()]
    bars.append(Bar("restore e4m3 ÷ restore", 0.8, speed_ratio(costs, "restore e4m3", "restore")))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rows, entropy_bars = entropy_rows(5 * rounds)
    console.print(entropy_table(rows))
    bars += entropy_bars
    console.print(bar_table(bars))
    if json_file:
        figures = {name: [row._asdict() for row in all_rows] for name, all_rows in costs.items()}
        data = {"machine": about, "checkpoint": figures, "entropy": rows, "bars": bars_as_data(bars)}
        json_file.write_text(json.dumps(data, indent=1) + "\n")
