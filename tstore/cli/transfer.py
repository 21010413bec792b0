"""The commands that move checkpoints: `tstore import`, `export` and `copy`."""

from __future__ import annotations

import click

import tstore
from tstore.cli.console import (
    Document,
    Progress,
    at_step_option,
    exmy_format,
    json_option,
    path_or_url,
    run,
    store_argument,
    version_or_tag,
)
from tstore.cli.tables import show_copied, show_exported, show_imported
from tstore.cli.text import format_size
from tstore.convert.safetensors import export_safetensors, import_safetensors, read_header

__all__ = ["copy", "export", "import_file"]


@click.command("import")
@click.argument("file", type=path_or_url, metavar="FILE.safetensors")
@store_argument
@click.option(
    "--step", type=click.IntRange(0), required=True, metavar="N", help="The step number of the checkpoint."
)
@click.option(
    "--codec", callback=exmy_format, metavar="F", help="Store float tensors in an eXmY format, such as e4m3."
)
@json_option
def import_file(file: str, store: str, step: int, codec: str | None, as_json: bool) -> int:
    """Save a safetensors file as a checkpoint.

    The store is created if there is none.
    """

    async def work(progress: Progress) -> Document:
        progress.doing(f"importing {file}")
        tensors = read_header(file).tensors.values()
        version = await import_safetensors(file, store, step, codecs=codec)
        size = sum(info.stop - info.start for info in tensors)
        counts = {"tensors": len(tensors), "bytes": size}
        return {"store": store, "version": version, "tag": f"step/{step}", **counts}

    return run(work, show_imported, as_json)


@click.command("export")
@store_argument
@click.argument("out", type=path_or_url, metavar="OUT.safetensors")
@at_step_option
@click.option("--step", type=click.IntRange(0), metavar="N", help="The step to export.")
@json_option
def export(store: str, out: str, at: int | str | None, step: int | None, as_json: bool) -> int:
    """Write a checkpoint to a safetensors file.

    Quantized arrays are decoded to their original dtype. The file must not exist yet.
    """
    if at is not None and step is not None:
        raise click.UsageError("--at and --step both name a version; pass one of them")
    if out == "-":
        raise click.UsageError("'-' is not standard output here; pass the name of a file, such as ./-")

    async def work(progress: Progress) -> Document:
        progress.doing(f"exporting to {out}")

        def report_bytes(done: int, total: int) -> None:
            progress.doing(f"exporting to {out}: {done / total:.0%}" if total else f"exporting to {out}")

        report = await export_safetensors(store, out, at=at, step=step, progress=report_bytes)
        return {"store": store, "file": out, **report._asdict()}

    return run(work, show_exported, as_json)


@click.command("copy")
@click.argument("source", type=path_or_url, metavar="SRC")
@click.argument("destination", type=path_or_url, metavar="DST")
@click.option("--at", callback=version_or_tag, metavar="V", help="Copy only this version (a number or a tag).")
@json_option
def copy(source: str, destination: str, at: int | str | None, as_json: bool) -> int:
    """Copy a store or one of its versions.

    DST is an empty folder or URL, or an older copy of SRC, which is updated. All bytes are verified. After a
    failure, run the command again: it copies only what is missing.
    """

    async def work(progress: Progress) -> Document:
        progress.doing(f"reading {source}")

        def report_bytes(done: int, total: int) -> None:
            progress.doing(f"copying {source}: {format_size(done)} of {format_size(total)}")

        report = await tstore.copy(source, destination, at, progress=report_bytes)
        return {"source": source, "destination": destination, "at": at, **report._asdict()}

    return run(work, show_copied, as_json)
