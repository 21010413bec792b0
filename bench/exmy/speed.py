"""Speed of exmy's kernels on one core, beside np.copyto, the casts of ml_dtypes and packing in NumPy.

    pip install -e '.[bench]' && python -m bench.exmy speed --json figures.json

GB/s count the float32 (or bfloat16) side: the input of encoding, the output of decoding. Figures are medians of
interleaved rounds, ratios are medians of the paired ratios of the rounds: quote ratios. Takes about five minutes
for typical formats, and asserts no figure.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import exmy
import ml_dtypes
import numpy as np
from rich.table import Table

from bench import program
from bench.bars import Bar
from bench.exmy import floatx
from bench.figures import Figures, faster, median_of
from bench.report import table

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
SCALES = ("max", "search", "float")
COPY = "np.copyto"

Calls = dict[str, Callable[[], Any]]


def measure(calls: Calls, rounds: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, Figures]:
    """Return the seconds of each call and round; the calls are interleaved."""
    figures = {name: Figures(name) for name in calls}
    for turn in range(-1, rounds):
        for name, call in calls.items():
            start = clock()
            call()
            if turn >= 0:  # the first call of each is a rehearsal
                figures[name].add("seconds", turn, clock() - start)
    return figures


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
        copy = partial(np.copyto, self.y, self.x)
        for name in names:
            f = exmy.Format(name)
            with exmy.kernels.use(level):
                figures = measure({COPY: copy} | self.kernel_calls(f, self.x, self.y, "float32"), self.rounds)
            for call in list(figures)[1:]:
                self._row(
                    title, call, self.x.nbytes, figures, "× copyto", faster(figures, call, COPY), bits=f.bits
                )
        # the bars apply to the slowest format
        for verb in ("encode", "decode"):
            slowest = [r["× copyto"] for r in self.rows[title] if r["name"].startswith(verb) and r["bits"] <= 8]
            if slowest:
                self.bars.append(Bar(f"{verb}, ≤ 8 bits, slowest ÷ copyto ({level})", need, min(slowest)))

    def bfloat16(self, title: str, level: str) -> None:
        x, y = self.x.astype(ml_dtypes.bfloat16), self.y.astype(ml_dtypes.bfloat16)
        copy, slowest = partial(np.copyto, y.view(np.uint16), x.view(np.uint16)), []
        for name in ("e4m3", "e3m2", "e2m1"):
            with exmy.kernels.use(level):
                kernels = self.kernel_calls(exmy.Format(name), x, y, "bfloat16")
                figures = measure({COPY: copy} | kernels, self.rounds)
            for call in kernels:
                slowest.append(faster(figures, call, COPY))
                self._row(title, call, x.nbytes, figures, "× copyto", slowest[-1])
        if level == exmy.kernels.levels()[-1]:
            self.bars.append(Bar(f"bfloat16, slowest ÷ copyto of bfloat16 ({level})", 0.5, min(slowest)))

    def others(self, title: str) -> None:
        """Measure exmy beside other Python packages, on a part of the values, because the others are slow."""
        x = self.x[: self.x.size // 8]
        y, slowest = np.ones_like(x), []

        def compared(name: str, calls: Calls, what: str) -> list[float]:
            """Measure the kernels beside two calls that do the same."""
            kernels = self.kernel_calls(exmy.Format(name), x, y, "float32")
            figures = measure(kernels | calls, self.rounds)
            ratios = [faster(figures, mine, other) for mine, other in zip(kernels, calls, strict=True)]
            for mine, by in zip(kernels, ratios, strict=True):
                self._row(title, f"{mine} ÷ {what}", x.nbytes, figures, "× the other", by, of=mine)
            return ratios

        for dtype, name in CASTS.items():
            narrow = np.dtype(getattr(ml_dtypes, dtype))
            codes = x.astype(narrow)
            casts = {
                "astype narrow": partial(x.astype, narrow),
                "astype float32": partial(codes.astype, np.float32),
            }
            slowest += compared(name, casts, dtype)
        self.bars.append(Bar("slowest ÷ ml_dtypes' cast", 20, min(slowest)))
        packed = floatx.encode(x)
        assert np.array_equal(floatx.decode(packed), exmy.round(x, "e3m2"))
        packing = {"packing": partial(floatx.encode, x), "unpacking": partial(floatx.decode, packed)}
        compared("e3m2", packing, "torchao's packing in NumPy")

    def searches(self, title: str, names: tuple[str, ...]) -> None:
        """Measure `quantize` with each scale, and `choose`, as multiples of the time of scale "max"."""
        matrix = self.x.reshape(-1, 4096)

        def compared(calls: Calls, label: str = "{}", first: int = 0) -> dict[str, float]:
            figures = measure(calls, max(3, self.rounds // 3))
            times = {call: faster(figures, "max", call) for call in list(calls)[first:]}
            for call, by in times.items():
                self._row(title, label.format(call), matrix.nbytes, figures, "time ÷ max", by, of=call)
            return times

        most = []
        for name in names:
            for sharing, options in SHARING.items():
                calls = {s: partial(exmy.quantize, matrix, name, scale=s, **options) for s in SCALES}
                times = compared(calls, f"{name} {sharing}, {{}}")
                most += [times["search"]] if sharing == "row" else []
        self.bars.append(Bar("search by rows, slowest format, time ÷ max", 3, max(most), most=True))
        calls = {"max": partial(exmy.quantize, matrix, "e4m3", scale="max")}
        calls |= {f"choose bits={bits}": partial(exmy.choose, matrix, bits=bits) for bits in (4, 6, 8)}
        calls |= {"choose min_sqnr=30": partial(exmy.choose, matrix, min_sqnr=30)}
        slowest = max(compared(calls, first=1).values())
        self.bars.append(Bar("choose, slowest, time ÷ max", 2, slowest, most=True))

    def _row(
        self, title: str, name: str, nbytes: int, figures: Any, key: str, by: float, of: str = "", **more: Any
    ) -> None:
        speeds = [nbytes / 1e9 / s for s in figures[of or name].of("seconds").values()]
        row = {"name": name, "GB/s": median_of(speeds), "min": min(speeds), "max": max(speeds), key: by, **more}
        self.rows.setdefault(title, []).append(row)

    def table(self, title: str) -> Table:
        ratio = next(key for key in self.rows[title][0] if key.startswith(("×", "time")))
        rows = [
            [r["name"], f"{r['GB/s']:.3g}", f"{r['min']:.3g}–{r['max']:.3g}", f"{r[ratio]:.2f}"]
            for r in self.rows[title]
        ]
        return table(title, ("", "GB/s", "min–max", ratio), rows)


@program.command(__doc__)
@program.rounds_option(15)
@click.option("--values", default=16 << 20, type=click.IntRange(1 << 16))
@click.option("--formats", default="typical", type=click.Choice(["typical", "all"]))
@program.json_option
def speed(run: program.Run, rounds: int, values: int, formats: str) -> None:
    names = [*TYPICAL, *MORE]
    if formats == "all":
        names = [f.name for bits in range(2, 17) for f in exmy.formats(bits)]
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    bench = Bench(values // 4096 * 4096, rounds)
    levels = [level for level in ("avx512", "avx2") if level in exmy.kernels.levels()]
    sections: dict[str, Callable[[str], None]] = {}
    for level in levels or [exmy.kernels.level()]:
        need = 1.2 if level == "avx512" else 0.7
        sections[f"float32 and packed bytes, {level}"] = partial(bench.packed, names=names, level=level, need=need)
        sections[f"bfloat16 and packed bytes, {level}"] = partial(bench.bfloat16, level=level)
    sections["other packages"] = bench.others
    sections["searching"] = partial(bench.searches, names=("e4m3", "e3m2", "e2m1", "e0m7"))
    for title, section in sections.items():
        section(title)
        run.show(bench.table(title))
    run.finish(bench.bars, tables=bench.rows)
