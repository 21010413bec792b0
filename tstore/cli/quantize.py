"""The commands `tstore quantize` and `tstore report`."""

from __future__ import annotations

from typing import IO, Any

import click
import exmy

import tstore
from tstore.cli.console import (
    Progress,
    at_options,
    exmy_format,
    json_option,
    number_option,
    plot_option,
    run,
    store_argument,
)
from tstore.cli.results import Quantized
from tstore.cli.tables import show_quantized
from tstore.quantization.policy import parse_policy
from tstore.quantization.report import check_plot, plot_report
from tstore.quantization.values import MEMORY

__all__ = ["quantize", "report"]

_POLICY_EXAMPLE = """\b
An example of a --policy file. The first pattern that
matches a path applies; null leaves an array unchanged:
  {"**/embed*": "e4m3", "head": null, "**": "e3m4"}
Rules for some arrays and a target for all others:
  {"formats": {"head": {"bits": 8}}, "bits": 3.5}
A target, and weights of the errors of arrays:
  {"bits": 3.5, "sensitivity": {"head": 4, "embed": 0.5}}
"""


@click.command("quantize", epilog=_POLICY_EXAMPLE)
@store_argument
@click.option(
    "--format", callback=exmy_format, metavar="F", help="One eXmY format for all float arrays, such as e4m3."
)
@click.option("--min-sqnr", type=float, metavar="DB", help="Give each array the fewest bits that reach this SQNR.")
@click.option(
    "--bits",
    type=float,
    metavar="B",
    help="Choose the formats that minimize the error at B bits per value on average.",
)
@click.option(
    "--error",
    type=click.Choice(["relative", "absolute"]),
    help="The error that --bits minimizes: relative to the size of an array's values (the default), or absolute.",
)
@click.option(
    "--coding",
    type=click.Choice(["entropy", "packed"]),
    help="How codes are stored if --bits, --min-sqnr or the default chooses the formats: compressed to about "
    "their entropy (the least error), or packed in whole bits, with an exponent offset per block.",
)
@click.option(
    "--policy",
    type=click.File("rb"),
    metavar="FILE",
    help="A JSON file of formats by path pattern; see the example below.",
)
@click.option(
    "--axis",
    type=int,
    metavar="A",
    help="Store packed codes with one exponent offset per slice along this axis, or with --block per N values.",
)
@click.option(
    "--block",
    type=click.Choice([*map(str, exmy.BLOCKS), "none"]),
    metavar="N",
    help="Store packed codes with one exponent offset per 16, 32, 64, 128 or 256 values along the last axis (or "
    "--axis), or per array (none).",
)
@click.option(
    "--scale",
    type=click.Choice(["search", "max", "none", *exmy.FLOAT_SCALES]),
    help="Store packed codes with exponent offsets that minimize the error (search, the default) or avoid "
    "clipping (max), with no offsets (none), or with scales of 32 bits (float), 8 bits (e4m3), or 7 to 14 bits "
    "(6bit; 8 in blocks of 32).",
)
@at_options("A version number or a tag; the newest step by default.")
@click.option(
    "--subtree",
    default="",
    metavar="PATH",
    help="Copy only this path and what is below it, such as model in a training step; paths stay the same.",
)
@number_option(
    "--memory",
    "MB",
    click.IntRange(0),
    MEMORY // 1_000_000,
    "The memory for caching values that would otherwise be read twice.",
)
@click.option("--tag", help="The tag of the new commit; derived from the source's tag and the formats by default.")
@plot_option
@json_option
def quantize(
    store: str,
    format: str | None,
    min_sqnr: float | None,
    bits: float | None,
    error: str | None,
    coding: str | None,
    policy: IO[bytes] | None,
    axis: int | None,
    block: str | None,
    scale: str | None,
    at: int | str | None,
    subtree: str,
    memory: int,
    tag: str | None,
    plot: str | None,
    as_json: bool,
) -> int:
    """Store float arrays in fewer bits.

    A new commit stores the float arrays of a version in low-bit formats; the source version remains. An
    eXmY format has a sign bit, X exponent bits and Y mantissa bits.

    Without --format, --min-sqnr, --bits and --policy the arrays are stored in 8 bits per value on average, as
    codes with one step size per array or row, compressed to about their entropy. Integers, arrays of fewer than 64
    values, arrays with NaN or infinity, and one-dimensional arrays that no pattern names stay unchanged.

    SQNR is the signal-to-quantization-noise ratio: the sum of the squared values divided by the sum of the squared
    errors, in decibels. 20 dB is an error of 10%, 40 dB an error of 1%; each additional bit gains about 6 dB.
    """
    choices: dict[str, Any] = {"formats": format, "min_sqnr": min_sqnr, "bits": bits, "policy": policy}
    choice = {name: value for name, value in choices.items() if value is not None}
    if len(choice) > 1:
        raise click.UsageError(
            "--format, --min-sqnr, --bits and --policy are mutually exclusive; pass one of them"
        )
    if error is not None and bits is None:
        raise click.UsageError("--error selects the error that --bits minimizes; pass --bits too")
    options: dict[str, Any] = {
        k: v for k, v in (("error", error), ("coding", coding), ("axis", axis), ("scale", scale)) if v is not None
    }
    if block is not None:
        options["block"] = None if block == "none" else int(block)

    async def work(progress: Progress) -> Quantized:
        if plot is not None:
            check_plot(plot)
        arguments = choice if policy is None else parse_policy(policy.read(), policy.name)
        progress.doing(f"quantizing {store}")
        async with await tstore.open(store, "r+") as opened:
            result = await tstore.quantize(
                opened,
                **{**arguments, **options},
                at=at,
                subtree=subtree,
                tag=tag,
                memory=memory * 1_000_000,
                progress=lambda done, total: progress.doing(f"quantizing {store}: {done / max(1, total):.0%}"),
            )
        if plot is not None:
            plot_report(result, plot)
        return Quantized(opened.url, result, plot)

    return run(work, show_quantized, as_json)


@click.command("report")
@store_argument
@at_options("A version number or a tag; the newest copy by default.")
@plot_option
@json_option
def report(store: str, at: int | str | None, plot: str | None, as_json: bool) -> int:
    """Show the report of a quantized version.

    `tstore quantize` stores its measurements in the commit that it creates. SQNR is the
    signal-to-quantization-noise ratio in decibels: 20 dB is an error of 10%, 40 dB an error of 1%.
    """

    async def work(progress: Progress) -> Quantized:
        progress.doing(f"reading {store}")
        async with await tstore.open(store, "r") as opened:
            result = await tstore.quantize_report(opened, at)
        if plot is not None:
            plot_report(result, plot)
        return Quantized(opened.url, result, plot)

    return run(work, show_quantized, as_json)
