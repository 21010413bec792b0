"""`tstore.quantize` beside saves and restores of the same arrays, and entropy coding beside zstd alone.

    python -m bench.exmy checkpoint --dir /dev/shm --json checkpoint.json

Each round saves the arrays as float32 to a new store, saves them with the codec e4m3, and quantizes the float32
version in several ways, in an order that rotates. Then one core encodes and decodes a chunk. GB/s count float32
values, CPU is that of all threads in seconds per GB. Figures are medians, ratios are medians of the paired ratios
of the rounds. Asserts no figure.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import exmy
import numpy as np
from numcodecs import Zstd
from rich.table import Table

import tstore.sync
from bench import program
from bench.bars import Bar
from bench.cost import measured
from bench.exmy.speed import measure
from bench.figures import Figures, faster
from bench.report import MIB, table
from bench.rounds import Rounds, rotated

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


def run_round(rounds: Rounds, tree: dict[str, Any], turn: int) -> None:
    """Measure all works of one round in a new store."""

    def cost(name: str, work: Callable[[], Any]) -> None:
        rounds.make_room(sum(x.nbytes for x in tree.values()))
        rounds.add("checkpoint", name, turn, measured(work))

    with tempfile.TemporaryDirectory(dir=rounds.folder) as place, tstore.sync.open(place) as store:
        cost("save", partial(tstore.sync.save, store, tree, 0))
        cost(SAVE, partial(tstore.sync.save, store, tree, 1, codecs="e4m3"))
        for name, options in rotated(WAYS.items(), turn):
            cost(name, partial(tstore.sync.quantize, store, at="step/0", tag=name, **options))
        for step, name in ((0, "restore"), (1, "restore e4m3")):
            cost(name, partial(tstore.sync.restore, store, step))


def costs_table(figures: dict[str, Figures], nbytes: int) -> Table:
    gb = nbytes / 1e9
    rows = [
        [
            *(name, f"{gb / f.median('seconds'):.2f}", f"{f.median('cpu') / gb:.2f}"),
            *(f"{f.median('memory') / MIB:.0f}", f"{faster(figures, name, SAVE):.2f}"),
        ]
        for name, f in figures.items()
    ]
    return table("a checkpoint", ("", "GB/s", "CPU s/GB", "memory MiB", f"speed ÷ {SAVE}"), rows)


def entropy_rows(rounds: int) -> tuple[list[dict[str, Any]], list[Bar]]:
    """Measure entropy coding of a chunk of 2^20 values, in seconds of one core, whatever else the machine does.

    The codes of all chunks are decoded into the same memory, in which they also are with zstd alone. Writing the
    output costs more than decoding its codes, so "zstd, fill" also fills it: no decoder does less.
    """
    x = np.random.default_rng(20).standard_normal(1 << 20, dtype=np.float32)
    y, zstd, rows, bars = np.ones_like(x), Zstd(level=1), [], []
    for name, step in CODE_STEPS.items():
        form = exmy.Format(name)
        codec = exmy.ChunkCodec(form, step / form.smallest_subnormal)
        codes = codec.encode(x)
        stored, decoded = zstd.encode(codes), np.empty_like(codes)

        def alone(stored: Any = stored, decoded: Any = decoded) -> Any:
            return zstd.decode(stored, decoded)

        calls: dict[str, Callable[[], Any]] = {
            "encode": partial(lambda codec, codes: zstd.encode(codec.encode(x, codes)), codec, codes),
            "decode": partial(lambda codec, alone: codec.decode(alone(), x.shape, x.dtype, y), codec, alone),
            "zstd alone": alone,
            "zstd, fill": partial(lambda alone: (alone(), y.fill(1)), alone),  # type: ignore[func-returns-value]
            "np.copyto": partial(np.copyto, y, x),
        }
        figures = measure(calls, rounds, time.thread_time)
        speeds = {call: x.nbytes / 1e9 / f.median("seconds") for call, f in figures.items()}
        rows.append({"name": name, "bits": 8 * len(stored) / x.size, **speeds})
        bars.append(Bar(f"entropy-coded {name}: encode, one core", 0.4, speeds["encode"], unit=" GB/s"))
        for other, what in (("zstd alone", "zstd alone"), ("zstd, fill", "zstd and a fill of the output")):
            bars.append(Bar(f"entropy-coded {name}: decode ÷ {what}", 0.8, faster(figures, "decode", other)))
    return rows, bars


@program.command(__doc__)
@program.rounds_option(5)
@click.option("--arrays", default=8, type=program.COUNT, help="Of 4096 x 4096 float32.")
@program.json_option
@program.dir_option
def checkpoint(run: program.Run, rounds: int, arrays: int) -> None:
    rng = np.random.default_rng(20)
    tree = {f"layer{i}": rng.standard_normal((4096, 4096), np.float32) * np.float32(0.02) for i in range(arrays)}
    bench = Rounds(run.folder, run.log)
    for turn in range(rounds):
        run_round(bench, tree, turn)
    figures = bench.results["checkpoint"]
    needs = {name: 0.4 if "formats" in options else 0.2 for name, options in WAYS.items()}
    bars = [Bar(f"{name} ÷ {SAVE}", need, faster(figures, name, SAVE)) for name, need in needs.items()]
    bars.append(Bar("restore e4m3 ÷ restore", 0.8, faster(figures, "restore e4m3", "restore")))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rows, entropy_bars = entropy_rows(5 * rounds)
    cells = [[row["name"], *(f"{value:.2f}" for value in list(row.values())[1:])] for row in rows]
    title = "entropy-coded eXmY, GB/s of float32 on one core"
    run.show(costs_table(figures, arrays * 2**26), table(title, ("", *list(rows[0])[1:]), cells))
    costs = {
        name: [{measure: by[turn] for measure, by in f.values.items()} for turn in range(rounds)]
        for name, f in figures.items()
    }
    run.finish([*bars, *entropy_bars], checkpoint=costs, entropy=rows)
