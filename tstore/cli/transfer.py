"""The commands that move checkpoints: `tstore import`, `tstore export` and `tstore copy`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

import tstore
from tstore.cli.console import (
    STEP,
    Progress,
    at_options,
    exmy_format,
    json_option,
    path_or_url,
    run,
    store_argument,
)
from tstore.cli.results import Copied, Exported, Imported
from tstore.cli.tables import show_copied, show_exported, show_imported
from tstore.cli.text import format_size
from tstore.convert import importing
from tstore.convert.dcp_export import export_dcp
from tstore.convert.exporting import FileFormat, export_huggingface, export_safetensors, format_of
from tstore.convert.gguf_export import export_gguf
from tstore.convert.importing import SourceKind, import_torch_file, recognize
from tstore.convert.layouts import LAYOUTS, Layout
from tstore.convert.orbax_export import export_orbax
from tstore.convert.references import export_references
from tstore.convert.zarr_export import export_zarr
from tstore.convert.zarr_import import import_zarr
from tstore.core.storage.connect import connect
from tstore.errors import AlreadyExists, InvalidArgument

__all__ = ["copy", "export", "import_checkpoint"]

_EXPORTS: dict[FileFormat, Callable[..., Any]] = {
    "safetensors": export_safetensors,
    "huggingface": export_huggingface,
    "gguf": export_gguf,
    "dcp": export_dcp,
    "orbax": export_orbax,
    "zarr": export_zarr,
    "references": export_references,
}

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def file_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Convert the value of an option that is a number of bytes, such as 5GB or 500MiB."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,15})(|[KMGT]B|[KMG]iB)", value, re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise click.BadParameter(f"{value!r} is not a size; pass one such as 5GB, 500MB or 200MiB")
    return int(match[1]) * _UNITS[match[2].upper()]


def _sources(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Return the sources of an import; fail if there are none: click took the only argument as the store."""
    if not value:
        raise click.UsageError("Missing argument 'STORE': pass the SOURCES, and after them the store.")
    return value


@click.command("import")
@click.argument("sources", type=path_or_url, metavar="SOURCES", nargs=-1, callback=_sources)
@store_argument
@click.option(
    "--step", type=STEP, metavar="N", help="The step number of the checkpoint; required, except for a Zarr folder."
)
@click.option(
    "--codec", callback=exmy_format, metavar="F", help="Store float tensors in an eXmY format, such as e4m3."
)
@click.option(
    "--trust",
    is_flag=True,
    help="Read files that torch.save wrote, and indexes of them, although loading one may run code in it. By "
    "default they are refused.",
)
@click.option(
    "--skip",
    multiple=True,
    metavar="PATH",
    help="Leave out the value at this path, or the values that match this glob, such as args or 'optimizer/**'. "
    "May be repeated. A torch.save file without --trust needs this for each object that only its code can load.",
)
@json_option
def import_checkpoint(
    sources: tuple[str, ...],
    store: str,
    step: int | None,
    codec: str | None,
    trust: bool,
    skip: tuple[str, ...],
    as_json: bool,
) -> int:
    """Import another checkpoint or a Zarr folder.

    SOURCES is one of: a safetensors file, or several of them; their index (*.safetensors.index.json); a folder of
    safetensors files; a folder of torch.distributed.checkpoint; an Orbax checkpoint (which needs tensorstore);
    with --trust, a file of torch.save (.pt, .bin) or the index of several (*.bin.index.json). The command prints
    what it recognized, and what it left out. It creates the store if there is none.

    SOURCES may also be a Zarr folder, v3 or v2, or the URL of one: its groups and arrays are added to the store in
    one commit, without a step. Each chunk is decoded as a check, and its encoded bytes are stored unchanged.
    """

    if step is None and store.isdecimal() and len(sources) > 1:
        raise click.UsageError(f"the last argument is the store; pass the number of the step as --step {store}")

    async def work(progress: Progress) -> Imported:
        kind = recognize(sources)
        progress.doing(f"importing {sources[0]}, {kind.value}")
        if kind is SourceKind.ZARR:
            if step is not None or codec is not None or skip:
                raise InvalidArgument(f"{sources[0]} is {kind.value}: leave out --step, --codec and --skip")

            def report_bytes(done: int, total: int) -> None:
                progress.doing(f"importing {sources[0]}: {format_size(done)} of {format_size(total)}")

            report = await import_zarr(sources[0], store, progress=report_bytes)
            return Imported(connect(store).url, None, report)
        if step is None:
            raise InvalidArgument(f"{sources[0]} is {kind.value}, which becomes a step; pass --step N")
        try:
            if kind in (SourceKind.TORCH, SourceKind.TORCH_INDEX) and trust:
                report = await import_torch_file(sources[0], store, step, codecs=codec, skip=skip)
            else:
                report = await importing.import_checkpoint(sources, store, step, codecs=codec, skip=skip)
        except AlreadyExists as error:
            message = str(error).replace(
                "pass overwrite=True", f"remove it first with tstore rm {store} --step {step}"
            )
            raise AlreadyExists(message) from error
        return Imported(connect(store).url, f"step/{step}", report)

    return run(work, show_imported, as_json)


@click.command("export")
@store_argument
@click.argument("out", type=path_or_url)
@at_options("A version number or a tag; the newest step by default.")
@click.option(
    "--to",
    type=click.Choice(list(_EXPORTS)),
    metavar="FORMAT",
    help="safetensors, one file; huggingface, a folder as Hugging Face libraries read it; gguf, a file (needs the "
    "package gguf); dcp, a folder for torch.distributed.checkpoint (needs PyTorch); orbax, a step of an Orbax "
    "CheckpointManager (needs orbax-checkpoint); zarr, a Zarr v3 folder; references, a file of references to the "
    "chunks.  "
    "[default: by the ending of OUT (.safetensors, .zarr, .gguf), else huggingface]",
)
@click.option("--zarr", "to", flag_value="zarr", help="Write a Zarr v3 folder, like --to zarr.")
@click.option(
    "--references",
    "to",
    flag_value="references",
    help="Write a reference file in the format of kerchunk, like --to references. OUT ends in .json, or in .parq "
    "for a folder that suits many chunks and needs fastparquet.",
)
@click.option(
    "--subtree",
    default="",
    metavar="PATH",
    help="Export only this path and what is below it, such as model in a training step; names are relative to it. "
    "A Hugging Face folder also gets the files of the configuration and tokenizer that a trainer saved beside it.",
)
@click.option(
    "--strip",
    default="",
    metavar="PREFIX",
    help="Remove a prefix, such as module., from the names in safetensors and GGUF files.",
)
@click.option(
    "--skip",
    multiple=True,
    metavar="PATH",
    help="Leave out the arrays at or below this path, or paths that match this glob; for Orbax any values. May be "
    "repeated.",
)
@click.option(
    "--keep-exmy",
    is_flag=True,
    help="Keep quantized arrays encoded in a Zarr folder or a reference file; only programs with the package exmy "
    "read them. By default a Zarr folder has them decoded, and a reference file is refused.",
)
@click.option(
    "--layout",
    type=click.Choice(LAYOUTS),
    help="How quantized arrays are stored in safetensors files. compressed-tensors: matrices NAME.weight in the "
    "low bits of that package, with a quantization_config in config.json, for vLLM and transformers; OUT is a "
    "folder. fp8: F8_E4M3 or F8_E5M2 numbers, and float32 scales at NAME_scale. The command decodes, and lists, "
    "arrays that the layout can't represent exactly, and embeddings for compressed-tensors.  [default: decoded]",
)
@click.option(
    "--requantize",
    type=click.Choice(["fp8", "q8_0", "q4_0"]),
    help="Round quantized arrays that the layout (fp8) or GGUF (q8_0, q4_0) can't represent exactly, instead of "
    "decoding them.",
)
@click.option(
    "--max-shard-size",
    callback=file_size,
    metavar="SIZE",
    help="The maximum size of one file in a Hugging Face folder, such as 500MB.  [default: 5GB]",
)
@json_option
def export(
    store: str,
    out: str,
    at: int | str | None,
    to: FileFormat | None,
    subtree: str,
    strip: str,
    skip: tuple[str, ...],
    keep_exmy: bool,
    layout: Layout | None,
    requantize: str | None,
    max_shard_size: int | None,
    as_json: bool,
) -> int:
    """Write a version in another format.

    OUT must not exist yet. Quantized arrays are decoded to their original dtype, unless --layout keeps their low
    bits; a GGUF file keeps those that it can represent exactly. All other chunks of a Zarr folder keep their
    stored bytes. If OUT is on the same file system as the store, a chunk that is a whole file there becomes a hard
    link to it.

    A reference file lists where the chunks are in the store. Through it, zarr-python and fsspec read the version
    in place, also over HTTP, without tstore. It is valid until the version is collected, so tag the version.
    """
    if out == "-":
        raise click.UsageError("'-' is not standard output here; pass the name of a file, such as ./-")
    file_format: FileFormat = to or format_of(out)
    for name in ("safetensors", "gguf"):
        if file_format != "references" and (file_format == name) != (format_of(f"{out}/") == name):
            raise click.UsageError(f"{out}: only --to {name} writes a file whose name ends in .{name}")
    if max_shard_size is not None and file_format != "huggingface":
        raise click.UsageError("--max-shard-size is for a Hugging Face folder; pass a folder as OUT, without --to")
    if keep_exmy and file_format not in ("zarr", "references"):
        raise click.UsageError("--keep-exmy is for a Zarr folder or a reference file; pass --zarr or --references")
    if strip and file_format not in ("safetensors", "huggingface", "gguf"):
        raise click.UsageError(
            "--strip is for the names in a safetensors or GGUF file, or in a Hugging Face folder"
        )
    options: dict[str, Any] = {"subtree": subtree, "skip": skip, **({"strip": strip} if strip else {})}
    if max_shard_size is not None:
        options["max_shard_size"] = max_shard_size
    if keep_exmy:
        options["keep_exmy"] = True
    _add_low_bits(options, file_format, layout, requantize)

    async def work(progress: Progress) -> Exported:
        progress.doing(f"exporting to {out}")

        def report_bytes(done: int, total: int) -> None:
            progress.doing(f"exporting to {out}: {done / total:.0%}" if total else f"exporting to {out}")

        report = await _EXPORTS[file_format](store, out, at=at, progress=report_bytes, **options)
        return Exported(connect(store).url, out, file_format, layout, report)

    return run(work, show_exported, as_json)


def _add_low_bits(
    options: dict[str, Any], file_format: FileFormat, layout: Layout | None, requantize: str | None
) -> None:
    """Add the options for quantized arrays; raise `UsageError` if they do not suit the format."""
    if layout is not None:
        if file_format not in ("safetensors", "huggingface"):
            raise click.UsageError("--layout is for a safetensors file or a Hugging Face folder")
        if layout == "compressed-tensors" and file_format == "safetensors":
            raise click.UsageError("--layout compressed-tensors has a config.json: pass a folder as OUT")
        options["layout"] = layout
    if requantize is not None:
        types = ("q8_0", "q4_0") if file_format == "gguf" else ("fp8",)
        if file_format not in ("gguf", "safetensors", "huggingface") or requantize not in types:
            raise click.UsageError("--requantize is fp8 for --layout, and q8_0 or q4_0 for a GGUF file")
        if file_format != "gguf" and layout in (None, "decoded"):
            raise click.UsageError("--requantize fp8 needs --layout compressed-tensors or --layout fp8")
        options["requantize"] = requantize


@click.command("copy")
@click.argument("source", type=path_or_url, metavar="SRC")
@click.argument("destination", type=path_or_url, metavar="DST")
@at_options("Copy only this version (a number or a tag).")
@json_option
def copy(source: str, destination: str, at: int | str | None, as_json: bool) -> int:
    """Copy a store or one of its versions.

    DST is an empty folder or URL, or an older copy of SRC, which is updated. All copied bytes are verified. After
    a failure, run the command again: it copies only what is missing.
    """

    async def work(progress: Progress) -> Copied:
        progress.doing(f"reading {source}")

        def report_bytes(done: int, total: int) -> None:
            progress.doing(f"copying {source}: {format_size(done)} of {format_size(total)}")

        report = await tstore.copy(source, destination, at, progress=report_bytes)
        return Copied(connect(source).url, connect(destination).url, at, report)

    return run(work, show_copied, as_json)
