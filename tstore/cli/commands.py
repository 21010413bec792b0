"""The group of all commands, those that are short, and `main`, which runs one.

Every command makes one document. With `--json` that is what standard output gets, and nothing else; else it is
shown as a table. Progress goes to standard error, where that is a terminal.

Exit codes: 0 fine; 1 failed, with one sentence on standard error (and, with `--json`, a document with "error");
2 misused; 130 interrupted by Ctrl-C; 141 where the reader of the output went away.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from typing import IO, Any

import click
import exmy

import tstore
from tstore.cli.bench import bench
from tstore.cli.console import INTERRUPTED, MISUSED, Document, version_or_tag
from tstore.cli.console import fail as _fail
from tstore.cli.console import json_option as _json
from tstore.cli.console import run as _run
from tstore.cli.console import store_argument as _store
from tstore.cli.copy import copy
from tstore.cli.gc import gc
from tstore.cli.probe import probe
from tstore.cli.serve import serve
from tstore.cli.tables import (
    Progress,
    show_demo,
    show_diff,
    show_exported,
    show_finished,
    show_imported,
    show_log,
    show_ls,
    show_quantized,
    show_transactions,
    show_verified,
)
from tstore.contents import listing
from tstore.convert.checkpoint import export_safetensors, import_safetensors
from tstore.convert.safetensors import read_header
from tstore.errors import TStoreError
from tstore.quantization.plot import check_plot, plot_report
from tstore.quantization.policy import parse_policy

__all__ = ["cli", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; no exception and no traceback leaves it."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):  # file names need not be printable
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    as_json = "--json" in given
    try:
        code = cli.main(given, prog_name="tstore", standalone_mode=False)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        name = context.command_path if context is not None else "tstore"
        said = f"{error.format_message().rstrip('.')}; see {name} --help"
        return _fail("Misuse", said, as_json, MISUSED)
    except TStoreError as error:  # an argument that only the library can judge
        return _fail(type(error).__name__, str(error), as_json)
    except click.Abort:
        return _fail("Interrupted", "interrupted", as_json, INTERRUPTED)
    return code if isinstance(code, int) else 0


def _format(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    try:
        return None if value is None else exmy.Format(value).name
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


_at = click.option(
    "--at", callback=version_or_tag, metavar="V", help="A version number or a tag; by default the newest."
)
_at_step = click.option(
    "--at", callback=version_or_tag, metavar="V", help="A version number or a tag; by default the newest step."
)


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(tstore.__version__, prog_name="tstore", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> int:
    """A transactional store of chunked arrays for ML checkpoints. STORE is a folder or a URL."""
    if context.invoked_subcommand is not None:
        return 0
    click.echo(context.get_help(), err=True)
    return MISUSED


@cli.command("demo")
@click.option("--store", metavar="DIR", help="Where to keep the store; by default a new temporary folder.")
@click.option("--model", metavar="FILE", help="Weights as .safetensors; by default a model is generated.")
@click.option(
    "--size", type=click.IntRange(1, 100_000), default=100, show_default=True, help="MB of the generated model."
)
@_json
def _demo(store: str | None, model: str | None, size: int, as_json: bool) -> int:
    """Eight host processes save a model, one is killed, three restore it; then it is quantized."""
    from tstore.cli.demo import demo  # starts processes and makes models; no other command needs it

    async def work(progress: Progress) -> Document:
        report = await demo(store, model=model, size=size * 1_000_000, tell=progress)
        document = report._asdict()
        document["killed"] = report.killed._asdict()
        document["restored"] = report.restored._asdict()
        document["commits"] = [_with_decibel(row._asdict()) for row in report.commits]
        return document

    return _run(work, show_demo, as_json, facts=True)


@cli.command("import")
@click.argument("file", metavar="FILE.safetensors")
@_store
@click.option("--step", type=click.IntRange(0), required=True, help="The step to save it as.")
@click.option(
    "--codec", callback=_format, metavar="F", help="An eXmY format, as e4m3, in which to store float tensors."
)
@_json
def _import(file: str, store: str, step: int, codec: str | None, as_json: bool) -> int:
    """Save a safetensors file as the checkpoint of a step."""

    async def work(progress: Progress) -> Document:
        progress.doing(f"importing {file}")
        tensors = read_header(file).tensors.values()
        version = await import_safetensors(file, store, step, codecs=codec)
        size = sum(info.stop - info.start for info in tensors)
        return {
            "store": store,
            "version": version,
            "tag": f"step/{step}",
            "tensors": len(tensors),
            "bytes": size,
        }

    return _run(work, show_imported, as_json)


@cli.command("export")
@_store
@click.argument("out", metavar="OUT.safetensors")
@_at_step
@click.option("--step", type=click.IntRange(0), help="The step to export.")
@_json
def _export(store: str, out: str, at: int | str | None, step: int | None, as_json: bool) -> int:
    """Write a checkpoint as a new safetensors file; quantized arrays are written decoded."""
    if at is not None and step is not None:
        raise click.UsageError("--at and --step both name a version; pass one of them")

    async def work(progress: Progress) -> Document:
        progress.doing(f"exporting to {out}")

        def tell(done: int, total: int) -> None:
            progress.doing(f"exporting to {out}: {done / total:.0%}" if total else f"exporting to {out}")

        report = await export_safetensors(store, out, at=at, step=step, progress=tell)
        return {"store": store, "file": out, **report._asdict()}

    return _run(work, show_exported, as_json)


@cli.command("log")
@_store
@_json
def _log(store: str, as_json: bool) -> int:
    """List the commits, newest first."""

    async def work(progress: Progress) -> Document:
        progress.doing(f"reading the history of {store}")
        async with await tstore.open(store, "r") as opened:
            commits = [
                {
                    "version": c.version,
                    "tag": c.tag,
                    "tags": c.tags,
                    "time": c.time.isoformat(),
                    "bytes_added": c.bytes_added,
                    "message": c.message,
                    "facts": c.facts,
                    "expired": c.expired,
                    "dropped": c.dropped,
                    "base": c.base,
                }
                async for c in opened.history()
            ]
        return {"store": opened.url, "commits": commits}

    return _run(work, show_log, as_json)


@cli.command("ls")
@_store
@click.argument("path", default="")
@_at
@click.option("--transactions", is_flag=True, help="List the cooperative transactions under way instead.")
@_json
def _ls(store: str, path: str, at: int | str | None, transactions: bool, as_json: bool) -> int:
    """List the arrays of a version, or those at and below PATH."""
    if transactions and (path or at is not None):
        raise click.UsageError("--transactions lists no arrays: it takes neither PATH nor --at")

    async def work(progress: Progress) -> Document:
        progress.doing(f"reading {store}")
        async with await tstore.open(store, "r") as opened:
            if transactions:
                found = await opened.transactions()
                return {"store": opened.url, "transactions": [t._asdict() for t in found]}
            return {"store": opened.url, **listing(await opened.snapshot(at), path)}

    return _run(work, show_transactions if transactions else show_ls, as_json)


@cli.command("finish")
@_store
@click.argument("transaction")
@_json
def _finish(store: str, transaction: str, as_json: bool) -> int:
    """Commit a cooperative TRANSACTION (id or name) whose hosts delivered, but died before the commit."""

    async def work(progress: Progress) -> Document:
        progress.doing(f"finishing {transaction}")
        async with await tstore.open(store, "r+") as opened:
            return {
                "store": opened.url,
                "transaction": transaction,
                "version": await opened.finish(transaction),
            }

    return _run(work, show_finished, as_json)


@cli.command("diff")
@_store
@click.argument("before", callback=version_or_tag, metavar="A")
@click.argument("after", callback=version_or_tag, metavar="B")
@_json
def _diff(store: str, before: int | str, after: int | str, as_json: bool) -> int:
    """Show what changed from version or tag A to B: arrays, chunks, and how far float values went."""

    async def work(progress: Progress) -> Document:
        progress.doing(f"comparing {before} and {after} of {store}")
        async with await tstore.open(store, "r") as opened:
            return {"store": opened.url, **(await opened.diff(before, after)).document()}

    return _run(work, show_diff, as_json)


@cli.command("quantize")
@_store
@click.option("--format", callback=_format, metavar="F", help="The eXmY format of all float arrays, as e4m3.")
@click.option("--min-sqnr", type=float, metavar="DB", help="The fewest bits that keep each array's SQNR there.")
@click.option("--bits", type=float, metavar="B", help="The least error at B bits a value over all arrays.")
@click.option(
    "--error",
    type=click.Choice(["absolute", "relative"]),
    help="With --bits: relative suits the weights of a model better.",
)
@click.option("--policy", type=click.File("rb"), metavar="FILE", help="JSON: formats by path pattern, and more.")
@click.option("--axis", type=int, metavar="A", help="An exponent offset for each row along this axis.")
@click.option("--block", type=int, metavar="N", help="An offset for each run of 16, 32, 64 or 128 values.")
@_at_step
@click.option("--tag", help="The tag of the new commit; by default made of the source's and the formats.")
@click.option("--plot", metavar="FILE.png", help="Plot errors against bits a value, and exponents (matplotlib).")
@_json
def _quantize(
    store: str,
    format: str | None,
    min_sqnr: float | None,
    bits: float | None,
    error: str | None,
    policy: IO[bytes] | None,
    axis: int | None,
    block: int | None,
    at: int | str | None,
    tag: str | None,
    plot: str | None,
    as_json: bool,
) -> int:
    """Store the float arrays of a version in low-bit formats, as a new commit; the source stays."""
    given: dict[str, Any] = {"formats": format, "min_sqnr": min_sqnr, "bits": bits, "policy": policy}
    chosen = {name: value for name, value in given.items() if value is not None}
    if len(chosen) != 1:
        raise click.UsageError("pass one of --format, --min-sqnr, --bits and --policy")
    options = {
        name: value for name, value in (("error", error), ("axis", axis), ("block", block)) if value is not None
    }

    async def work(progress: Progress) -> Document:
        if plot is not None:
            check_plot(plot)
        arguments = chosen if policy is None else parse_policy(policy.read(), policy.name)
        progress.doing(f"quantizing {store}")
        async with await tstore.open(store, "r+") as opened:
            report = await tstore.quantize(
                opened,
                **{**arguments, **options},
                at=at,
                tag=tag,
                progress=lambda done, total: progress.doing(f"quantizing {store}: {done / max(1, total):.0%}"),
            )
        if plot is not None:
            plot_report(report, plot)
        return {"store": opened.url, **report.document()}

    return _run(work, show_quantized, as_json)


@cli.command("report")
@_store
@_at
@click.option("--plot", metavar="FILE.png", help="Plot errors against bits a value, and exponents (matplotlib).")
@_json
def _report(store: str, at: int | str | None, plot: str | None, as_json: bool) -> int:
    """Show again what `quantize` measured: a quantized commit keeps its report."""

    async def work(progress: Progress) -> Document:
        progress.doing(f"reading {store}")
        async with await tstore.open(store, "r") as opened:
            report = await tstore.quantize_report(opened, at)
        if plot is not None:
            plot_report(report, plot)
        return {"store": opened.url, **report.document()}

    return _run(work, show_quantized, as_json)


@cli.command("verify")
@_store
@_json
def _verify(store: str, as_json: bool) -> int:
    """Read and check everything of every version; one line for each fault."""

    async def work(progress: Progress) -> Document:
        progress.doing(f"verifying {store}")
        async with await tstore.open(store, "r") as opened:
            report = await opened.verify()
        return {"store": opened.url, "ok": report.ok, **report._asdict()}

    return _run(work, show_verified, as_json)


cli.add_command(bench)
cli.add_command(copy)
cli.add_command(gc)
cli.add_command(probe)
cli.add_command(serve)


def _with_decibel(row: Document) -> Document:
    """The row with "sqnr_db" in place of "sqnr": None where no bit was lost, since JSON has no infinity."""
    sqnr = row.pop("sqnr")
    return {**row, "sqnr_db": sqnr if sqnr is not None and math.isfinite(sqnr) else None}
