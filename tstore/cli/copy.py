"""The command `tstore copy`."""

from __future__ import annotations

import click

import tstore
from tstore.cli.console import Document, json_option, run, version_or_tag
from tstore.cli.tables import Progress, show_copied, sized

__all__ = ["copy"]


@click.command("copy")
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("--at", callback=version_or_tag, metavar="V", help="Copy one version alone, by its number or a tag.")
@json_option
def copy(source: str, destination: str, at: int | str | None, as_json: bool) -> int:
    """Copy a store, or one version of it, to an empty place or on to an older copy.

    All bytes are checked on their way. Run it again after any failure: only what is missing is moved.
    """

    async def work(progress: Progress) -> Document:
        progress.doing(f"looking at {source}")

        def tell(done: int, total: int) -> None:
            progress.doing(f"copying {source}: {sized(done)} of {sized(total)}")

        report = await tstore.copy(source, destination, at, progress=tell)
        return {"source": source, "destination": destination, **report._asdict()}

    return run(work, show_copied, as_json)
