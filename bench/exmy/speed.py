"""Speed of exmy's kernels on one core, beside np.copyto, the casts of ml_dtypes and packing in NumPy.

    pip install -e '.[bench]' && python -m bench.exmy speed --json figures.json

GB/s count the float32 (or bfloat16) side: the input of encoding, the output of decoding. Figures are medians of
interleaved rounds, ratios are medians of the paired ratios of the rounds: quote ratios. Takes about five minutes
for typical formats, and asserts no figure.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import exmy
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.bars import Bar, bar_table
from bench.exmy import floatx

TYPICAL = ("e1m0", "e1m1", "e2m1", "e2m2", "e3m2", "e3m3", "e4m3", "e4m4", "e4m5", "e5m5", "e5m6", "e5m7")
TYPICAL += ("e5m8", "e5m9", "e5m10")  # one format for each width of 2 to 16 bits
MORE = ("e8m1", "e8m7", "e5m2", "e0m7")
CASTS = {"float8_e4m3fn": "e4m3", "float4_e2m1fn": "e2m1", "float6_e3m2fn": "e3m2", "float6_e2m3fn": "e2m3"}
SHARING: dict[str, dict[str, int]] = {
    "tensor": {},
    "row": {"axis": 1},
    "column": {"axis": 0},
    "block of 32": {"block": 32},
    "block of 128": {"block": 128},
    "block of 32, axis 0": {"axis": 0, "block": 32},
}
COPY = "np.copyto"

Calls = dict[str, Callable[[], Any]]
Seconds = dict[str, list[float]]


def measure(calls: Calls, rounds: int, clock: Callable[[], float] = time.perf_counter) -> Seconds:
    """Return the seconds of each call and round; the calls are interleaved."""
    seconds: Seconds = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            seconds[name].append(clock() - start)
    return seconds


def ratio(seconds: Seconds, mine: str, other: str, share: float = 1.0) -> float:
    """Return how many times as fast one call is as another, which does `share` of its work."""
    return median(b / share / a for a, b in zip(seconds[mine], seconds[other], strict=True))


class Bench:
    """The measurements, each a list of rows for a table and for JSON."""

    def __init__(self, values: int, rounds: int) -> None:
        self.rounds = rounds
        self.x = np.random.default_rng(20).standard_normal(values, dtype=np.float32)
        self.y = np.ones_like(self.x)
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.bars: list[Bar] = []

    def kernel_calls(self, f: exmy.Format, x: Any, y: Any, kind: str) -> Calls:
        """Return calls of the fused kernels of a format, to and from packed bytes."""
        packed = np.ones(exmy.packed_size(x.size, f.bits), np.uint8)
        codes = exmy.encode_packed(x, f)
        return {
            f"encode {f.name}": lambda: exmy.encode_packed(x, f, out=packed),
            f"decode {f.name}": lambda: exmy.decode_packed(codes, f, x.size, kind, out=y),
        }

    def packed(self, title: str, names: list[str], level: str, need: float) -> None:
        """Measure encoding and decoding of float32, format by format."""
        for name in names:
            f = exmy.Format(name)
            with exmy.kernels.use(level):
                calls = {COPY: lambda: np.copyto(self.y, self.x)}
                seconds = measure(calls | self.kernel_calls(f, self.x, self.y, "float32"), self.rounds)
            for call in list(seconds)[1:]:
                self._row(
                    title, call, self.x.nbytes, seconds, {"× copyto": ratio(seconds, call, COPY)}, bits=f.bits
                )
        # the bars apply to the slowest format
        for verb in ("encode", "decode"):
            slowest = [r["× copyto"] for r in self.rows[title] if r["name"].startswith(verb) and r["bits"] <= 8]
            if slowest:
                self.bars.append(Bar(f"{verb}, ≤ 8 bits, slowest ÷ copyto ({level})", need, min(slowest)))

    def bfloat16(self, title: str, level: str) -> None:
        x, y = self.x.astype(ml_dtypes.bfloat16), self.y.astype(ml_dtypes.bfloat16)
        slowest = []
        for name in ("e4m3", "e3m2", "e2m1"):
            calls: Calls = {COPY: lambda: np.copyto(y.view(np.uint16), x.view(np.uint16))}
            with exmy.kernels.use(level):
                seconds = measure(calls | self.kernel_calls(exmy.Format(name), x, y, "bfloat16"), self.rounds)
            for call in list(seconds)[1:]:
                slowest.append(ratio(seconds, call, COPY))
                self._row(title, call, x.nbytes, seconds, {"× copyto": slowest[-1]})
        if level == exmy.kernels.levels()[-1]:
            self.bars.append(Bar(f"bfloat16, slowest ÷ copyto of bfloat16 ({level})", 0.5, min(slowest)))

    def others(self, title: str) -> None:
        """Measure exmy beside other Python packages, on a part of the values, because the others are slow."""
        x = self.x[: self.x.size // 8]
        y = np.ones_like(x)
        slowest = []
        for dtype, name in CASTS.items():
            narrow = np.dtype(getattr(ml_dtypes, dtype))
            codes = x.astype(narrow)
            calls = self.kernel_calls(exmy.Format(name), x, y, "float32")
            calls |= {"astype narrow": lambda x=x, narrow=narrow: x.astype(narrow)}
            calls |= {"astype float32": lambda codes=codes: codes.astype(np.float32)}
            seconds = measure(calls, self.rounds)
            for mine, other in zip(list(seconds)[:2], list(seconds)[2:], strict=True):
                slowest.append(ratio(seconds, mine, other))
                self._row(title, f"{mine} ÷ {dtype}", x.nbytes, seconds, {"× the other": slowest[-1]}, of=mine)
        self.bars.append(Bar("slowest ÷ ml_dtypes' cast", 20, min(slowest)))
        packed = floatx.encode(x)
        assert np.array_equal(floatx.decode(packed), exmy.round(x, "e3m2"))
        calls = self.kernel_calls(exmy.Format("e3m2"), x, y, "float32")
        calls |= {"packing": lambda: floatx.encode(x), "unpacking": lambda: floatx.decode(packed)}
        seconds = measure(calls, self.rounds)
        for mine, other in (("encode e3m2", "packing"), ("decode e3m2", "unpacking")):
            times = {"× the other": ratio(seconds, mine, other)}
            self._row(title, f"{mine} ÷ torchao's packing in NumPy", x.nbytes, seconds, times, of=mine)

    def searches(self, title: str, names: tuple[str, ...]) -> None:
        """Measure `quantize` with each scale, and `choose`, as multiples of the time of scale "max"."""
        matrix = self.x.reshape(-1, 4096)
        rounds = max(3, self.rounds // 3)
        most = []
        for name in names:
            for sharing, options in SHARING.items():
                calls: Calls = {
                    scale: lambda name=name, scale=scale, options=options: exmy.quantize(
                        matrix, name, scale=scale, **options
                    )
                    for scale in ("max", "search", "float")
                }
                seconds = measure(calls, rounds)
                for scale in calls:
                    times = 1 / ratio(seconds, scale, "max")
                    row = f"{name} {sharing}, {scale}"
                    self._row(title, row, matrix.nbytes, seconds, {"time ÷ max": times}, of=scale)
                    if (sharing, scale) == ("row", "search"):
                        most.append(times)
        self.bars.append(Bar("search by rows, slowest format, time ÷ max", 3, max(most), most=True))
        if hasattr(exmy, "choose"):
            calls = {"max": lambda: exmy.quantize(matrix, "e4m3", scale="max")}
            calls |= {
                f"choose bits={bits}": lambda bits=bits: exmy.choose(matrix, bits=bits) for bits in (4, 6, 8)
            }
            calls |= {"choose min_sqnr=30": lambda: exmy.choose(matrix, min_sqnr=30)}
            seconds = measure(calls, rounds)
            times_of = {call: 1 / ratio(seconds, call, "max") for call in list(calls)[1:]}
            for call, times in times_of.items():
                self._row(title, call, matrix.nbytes, seconds, {"time ÷ max": times})
            self.bars.append(Bar("choose, slowest, time ÷ max", 2, max(times_of.values()), most=True))

    def _row(
        self,
        title: str,
        name: str,
        nbytes: int,
        seconds: Seconds,
        ratios: dict[str, float],
        of: str = "",
        **more: Any,
    ) -> None:
        speeds = [nbytes / 1e9 / s for s in seconds[of or name]]
        row = {"name": name, "GB/s": median(speeds), "min": min(speeds), "max": max(speeds), **ratios, **more}
        self.rows.setdefault(title, []).append(row)

    def table(self, title: str) -> Table:
        ratios = [key for key in self.rows[title][0] if key.startswith(("×", "time"))]
        out = Table(title=title, title_justify="left")
        for head in ("", "GB/s", "min–max", *ratios):
            out.add_column(head, justify="right" if head else "left", no_wrap=True)
        for row in self.rows[title]:
            span = f"{row['min']:.3g}–{row['max']:.3g}"
            out.add_row(row["name"], f"{row['GB/s']:.3g}", span, *(f"{row[key]:.2f}" for key in ratios))
        return out


@click.command(help=__doc__, context_settings={"max_content_width": 110})
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(1))
@click.option("--values", default=16 << 20, show_default=True, type=click.IntRange(1 << 16))
@click.option("--formats", default="typical", show_default=True, type=click.Choice(["typical", "all"]))
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures to this file.")
def speed(rounds: int, values: int, formats: str, json_file: Path | None) -> None:
    names = [*TYPICAL, *MORE]
    if formats == "all":
        names = [f.name for bits in range(2, 17) for f in exmy.formats(bits)]
    console = Console(width=None if Console().is_terminal else 120)
    about = machine.describe(Path.cwd())
    console.print_json(json.dumps(about))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    bench = Bench(values // 4096 * 4096, rounds)
    levels = [level for level in ("avx512", "avx2") if level in exmy.kernels.levels()]
    for level in levels or [exmy.kernels.level()]:
        title = f"float32 and packed bytes, {level}"
        bench.packed(title, names, level, 1.2 if level == "avx512" else 0.7)
        console.print(bench.table(title))
        title = f"bfloat16 and packed bytes, {level}"
        bench.bfloat16(title, level)
        console.print(bench.table(title))
    sections: list[tuple[str, Callable[[str], None]]] = [
        ("other packages", bench.others),
        ("searching", lambda title: bench.searches(title, ("e4m3", "e3m2", "e2m1", "e0m7"))),
    ]
    for title, run in sections:
        run(title)
        console.print(bench.table(title))
    console.print(bar_table(bench.bars))
    if json_file:
        bars = [vars(bar) | {"met": bar.met} for bar in bench.bars]
        json_file.write_text(json.dumps({"machine": about, "tables": bench.rows, "bars": bars}, indent=1) + "\n")
