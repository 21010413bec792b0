"""The command `tstore stats`, and the option with which `tstore diff` reads samples."""

from __future__ import annotations

import re
from collections.abc import Callable

import click

import tstore
from tstore.cli.console import Document, Progress, at_options, json_option, run, store_argument
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
from tstore.service.statistics.reading import BUDGET

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
@budget_option(f"{BUDGET // 10**6}MB", "How many bytes of values to read, such as 100MB, or all.")
@click.option("--loss", is_flag=True, help="Show the error of an array of a quantized copy against its source.")
@json_option
def stats(store: str, path: str, at: int | str | None, budget: int | None, loss: bool, as_json: bool) -> int:
    """Show statistics of an array.

    Prints counts, extremes, mean, and histograms of the values and of their exponents. They are computed from a
    sample that is spread over the array, or from all values (--budget all). With --json, also prints the norms of
    rows and columns.
    """

    async def work(progress: Progress) -> Document:
        progress.doing(f"reading {path} of {store}")
        async with await tstore.open(store, "r") as opened:
            if loss:
                measured = await tstore.quantization_loss(opened, path, at, budget=budget)
                return {"store": opened.url, **measured.document()}
            summary = await tstore.summarize(await (await opened.snapshot(at)).array(path), budget=budget)
            return {"store": opened.url, **summary.document()}

    return run(work, _show_loss if loss else _show_summary, as_json)


def _show_summary(summary: Document) -> None:
    coverage = summary["coverage"]
    read = max(1, coverage["values_read"])
    by = ", by magnitude" if summary["dtype"].startswith("complex") else ""
    what = f"{summary['dtype']} {format_shape(summary['shape'])}"
    print(escape(f"{summary['path']}: {what}, {_coverage(coverage)}{by}"))
    rows = [[name, _number(summary[name])] for name in ("minimum", "maximum", "mean", "rms")]
    rows += [[name, f"{summary[name]:,} ({summary[name] / read:.2%})"] for name in ("zeros", "negative")]
    rows.append(["not finite", f"{summary['nonfinite']:,}"])
    if summary["range"]:
        span = summary["range"]
        limits = f"{_number(span['smallest'])} … {_number(span['largest'])} in magnitude"
        rows.append([f"{span['name']} stores", limits])
    print_table([Column("statistic"), Column("value", preferred_width=20)], rows)
    _show_values(summary["histogram"])
    exponents = summary["exponents"]
    if exponents["counts"]:
        print("\nexponents: values by floor(log2 |x|)")
        lowest = exponents["lowest"]
        _show_bars([f"2^{lowest + i}" for i in range(len(exponents["counts"]))], exponents["counts"])


def _show_values(histogram: Document) -> None:
    counts, edges = histogram["counts"], histogram["edges"]
    if not counts:
        return
    outside = histogram["below"] + histogram["above"]
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


def _show_loss(loss: Document) -> None:
    table: Table = [
        (Column("format"), lambda row: row["format"]),
        (Column("offset per", rank=1), lambda row: row["granularity"]),
        (Column("bits/value", align_right=True), lambda row: f"{row['bits_per_value']:.2f}"),
        (Column("SQNR", align_right=True), lambda row: _decibels(row["sqnr_db"])),
        (Column("clipped", align_right=True), lambda row: f"{100 * row['clipped']:.3g}%"),
    ]
    own = {**loss, "format": f"{loss['format']} (stored, {loss['coding']})"}
    print_rows(table, [own, *loss["others"]])
    print(
        escape(
            f"{loss['path']} of version {loss['version']} against version {loss['source']}: "
            f"max error {_number(loss['largest_error'])}, {_coverage(loss['coverage'])}"
        )
    )
    if loss["worst"]:
        region = ", ".join(f"{a}:{b}" for a, b in loss["worst"])
        print(f"lowest SQNR: {_decibels(loss['worst_sqnr_db'])} in [{region}]")


def _coverage(coverage: Document) -> str:
    if coverage["complete"]:
        return f"all {coverage['values']:,} values"
    return f"from {format_size(coverage['bytes_read'])} of {format_size(coverage['nbytes'])} of values"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def _decibels(level: float | None) -> str:
    return "exact or none" if level is None else format_decibels(level)
