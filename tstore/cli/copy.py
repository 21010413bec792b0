"""The command `tstore copy`."""

from __future__ import annotations

import click

import tstore
from tstore.cli.console import Document, json_option, path_or_url, run, version_or_tag
from tstore.cli.progress import Progress
from tstore.cli.tables import show_copied
from tstore.cli.text import sized

__all__ = ["copy"]


@click.command("copy")
@click.argument("source", type=path_or_url, metavar="SRC")
@click.argument("destination", type=path_or_url, metavar="DST")
@click.option("--at", callback=version_or_tag, metavar="V", help="Copy only this version (a number or a tag).")
@json_option
def copy(source: str, destination: str, at: int | str | None, as_json: bool) -> int:
    """Copy a store or one of its versions.

    DST is an empty folder or URL, or an older copy of SRC, which is updated. All bytes are verified. After a
    failure run it again: it copies only what is missing.
    """

    async def work(progress: Progress) -> Document:
        progress.doing(f"reading {source}")

        def report_bytes(done: int, total: int) -> None:
            progress.doing(f"copying {source}: {sized(done)} of {sized(total)}")

        report = await tstore.copy(source, destination, at, progress=report_bytes)
        return {"source": source, "destination": destination, **report._asdict()}

    return run(work, show_copied, as_json)
