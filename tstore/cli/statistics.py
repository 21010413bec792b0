"""The command `tstore stats`, and the option that makes `tstore diff` read samples."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import click

import tstore
from tstore.cli.console import Progress, at_options, json_option, run, store_argument
from tstore.cli.results import OfStore
from tstore.cli.text import (
    Column,
    Table,
    escape,
    format_decibels,
    format_shape,
    format_size,
    print_rows,
    print_table,
)
from tstore.service.statistics.histograms import Histogram
from tstore.service.statistics.loss import OtherFormat
from tstore.service.statistics.reading import SAMPLE_BYTES, Coverage

__all__ = ["budget_option", "stats"]

_SIZE = re.compile(r"(\d{1,15})([kMGT]?)B?", re.ASCII)
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BAR = 40  # characters of the longest bar
_SHOWN_BINS = 24


def _bytes(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Convert a number of bytes, such as "8MB"; "all" is None."""
    if value is None or value == "all":
        return None
    parsed = _SIZE.fullmatch(value)
    if parsed is None or not int(parsed[1]):
        raise click.BadParameter(f"{value!r} is not a number of bytes, such as 500kB, 8MB or 2GB, or all")
    return int(parsed[1]) * _UNITS[parsed[2]]


def budget_option(default: str, help: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return the option --budget with this default."""
    return click.option(
        "--budget", callback=_bytes, metavar="BYTES", default=default, show_default=True, help=help
    )


@click.command("stats")
@store_argument
@click.argument("path")
@at_options("A version number or a tag; by default the head, and with --loss the newest copy.")
@budget_option(f"{SAMPLE_BYTES // 10**6}MB", "How many bytes of values to read, such as 100MB, or all.")
@click.option("--loss", is_flag=True, help="Show the error of an array of a quantized copy against its source.")
@json_option
def stats(store: str, path: str, at: int | str | None, budget: int | None, loss: bool, as_json: bool) -> int:
    """Show statistics of an array.

    Prints counts, extremes, mean, and histograms of the values and of their exponents. They are computed from a
    sample that is spread over the array, or from all values (--budget all). With --json, also prints the norms of
    rows and columns.
    """

    async def summarize(progress: Progress) -> OfStore[tstore.Summary]:
        progress.doing(f"reading {path} of {store}")
        async with await tstore.open(store, "r") as opened:
            array = await (await opened.snapshot(at)).array(path)
            return OfStore(opened.url, await tstore.summarize(array, budget=budget))

    async def measure_loss(progress: Progress) -> OfStore[tstore.QuantizationLoss]:
        progress.doing(f"reading {path} of {store}")
        async with await tstore.open(store, "r") as opened:
            return OfStore(opened.url, await tstore.quantization_loss(opened, path, at, budget=budget))

    return run(measure_loss, _show_loss, as_json) if loss else run(summarize, _show_summary, as_json)


def _show_summary(stated: OfStore[tstore.Summary]) -> None:
    summary = stated.report
    read = max(1, summary.coverage.values_read)
    by = ", by magnitude" if summary.dtype.startswith("complex") else ""
    what = f"{summary.dtype} {format_shape(summary.shape)}"
    print(escape(f"{summary.path}: {what}, {_coverage(summary.coverage)}{by}"))
    rows = [
        ["minimum", _number(summary.minimum)],
        ["maximum", _number(summary.maximum)],
        ["mean", _number(summary.mean)],
        ["rms", _number(summary.rms)],
        ["zeros", f"{summary.zeros:,} ({summary.zeros / read:.2%})"],
        ["negative", f"{summary.negative:,} ({summary.negative / read:.2%})"],
        ["not finite", f"{summary.nonfinite:,}"],
    ]
    if (span := summary.range) is not None:
        limits = f"{_number(span.smallest)} … {_number(span.largest)} in magnitude"
        rows.append([f"{span.name} stores", limits])
    print_table([Column("statistic"), Column("value", preferred_width=20)], rows)
    _show_values(summary.histogram)
    counts: list[int] = summary.exponents.counts.tolist()
    if counts:
        print("\nexponents: values by floor(log2 |x|)")
        _show_bars([f"2^{summary.exponents.lowest + i}" for i in range(len(counts))], counts)


def _show_values(histogram: Histogram) -> None:
    counts: list[int] = histogram.counts.tolist()
    edges: list[float] = histogram.edges.tolist()
    if not counts:
        return
    outside = histogram.below + histogram.above
    print("\nvalues" + (f" ({outside:,} outliers are outside)" if outside else ""))
    step = -(-len(counts) // _SHOWN_BINS)
    merged = [sum(counts[i : i + step]) for i in range(0, len(counts), step)]
    _show_bars([f"{edges[i]:.3g}" for i in range(0, len(counts), step)], merged)


def _show_bars(labels: list[str], counts: list[int]) -> None:
    """Print a bar for each count; many counts are cut to the highest ones in the middle."""
    if len(counts) > 2 * _SHOWN_BINS:
        first = max(0, counts.index(max(counts)) - _SHOWN_BINS)
        labels, counts = labels[first : first + 2 * _SHOWN_BINS], counts[first : first + 2 * _SHOWN_BINS]
    width, most = max(map(len, labels)), max(1, *counts)
    for label, count in zip(labels, counts, strict=True):
        print(f"{label:>{width}}  {'#' * round(_BAR * count / most):<{_BAR}}  {count:,}")


def _show_loss(stated: OfStore[tstore.QuantizationLoss]) -> None:
    loss, own = stated.report, stated.report.quantized
    stored = OtherFormat(
        f"{own.format} (stored, {own.coding})", own.granularity, own.bits_per_value, loss.sqnr, own.clipped
    )
    table: Table[OtherFormat] = [
        (Column("format"), lambda row: row.format),
        (Column("offset per", rank=1), lambda row: row.granularity),
        (Column("bits/value", align_right=True), lambda row: f"{row.bits_per_value:.2f}"),
        (Column("SQNR", align_right=True), lambda row: _decibels(row.sqnr)),
        (Column("clipped", align_right=True), lambda row: f"{100 * row.clipped:.3g}%"),
    ]
    print_rows(table, [stored, *loss.others])
    print(
        escape(
            f"{loss.path} of version {loss.version} against version {loss.source}: "
            f"max error {_number(loss.difference.largest_error)}, {_coverage(loss.coverage)}"
        )
    )
    if loss.worst:
        region = ", ".join(f"{side.start}:{side.stop}" for side in loss.worst)
        print(f"lowest SQNR: {_decibels(loss.worst_sqnr)} in [{region}]")


def _coverage(coverage: Coverage) -> str:
    if coverage.complete:
        return f"all {coverage.values:,} values"
    return f"from {format_size(coverage.bytes_read)} of {format_size(coverage.nbytes)} of values"


def _number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else "none"


def _decibels(level: float) -> str:
    return format_decibels(level) if math.isfinite(level) else "exact or none"
