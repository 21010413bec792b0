"""The command `tstore repair`."""

from __future__ import annotations

import click

import tstore
from tstore.cli.console import Document, json_option, run, store_argument
from tstore.cli.progress import Progress
from tstore.cli.tables import show_repaired

__all__ = ["repair"]


@click.command("repair")
@store_argument
@click.option(
    "--void",
    multiple=True,
    type=click.IntRange(1),
    metavar="N",
    help="Void version N, whose record can't be read; may be repeated.",
)
@click.option(
    "--void-readable",
    multiple=True,
    type=click.IntRange(1),
    metavar="N",
    help="Void version N though its record reads well, as a forged one may; may be repeated.",
)
@json_option
def repair(store: str, void: tuple[int, ...], void_readable: tuple[int, ...], as_json: bool) -> int:
    """List damaged versions, or void them.

    Lists the versions whose records can't be read or name what is not there, and changes nothing. With --void N
    the record of version N is replaced by one that changes nothing: what the version did is gone, and readers,
    verify, gc and commits work again. Its bytes are kept as damaged/N-<checksum> in the store. Restore the record
    from a copy instead if there is one. Works at the storage itself, not through tstore serve; a second run
    finishes what an interrupted one began. Exits with status 1 if a damaged version is left.
    """

    async def work(progress: Progress) -> Document:
        progress.doing(f"looking at the records of {store}")
        async with await tstore.open(store, "r+" if void or void_readable else "r") as opened:
            report = await opened.repair(void, void_readable=void_readable)
        damaged = [found._asdict() for found in report.damaged]
        return {"store": opened.url, "ok": report.ok, **report._asdict(), "damaged": damaged}

    return run(work, show_repaired, as_json)
