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
    help="Void version N, whose record is damaged; may be repeated.",
)
@click.option(
    "--void-readable",
    multiple=True,
    type=click.IntRange(1),
    metavar="N",
    help="Void version N even if its record is readable, for example forged; may be repeated.",
)
@json_option
def repair(store: str, void: tuple[int, ...], void_readable: tuple[int, ...], as_json: bool) -> int:
    """List damaged versions, or void them.

    Lists the versions whose records are damaged or name missing objects, and changes nothing. With --void N the
    record of version N is replaced by an empty one: the changes of that version are lost, and readers, verify, gc
    and commits work again. Its bytes are saved as damaged/N-<checksum> in the store. If you have a copy of the
    record, restore it instead. Needs direct access to the storage, not through tstore serve. After an interruption
    run it again. Exits with status 1 if a damaged version remains.
    """

    async def work(progress: Progress) -> Document:
        progress.doing(f"checking the records of {store}")
        async with await tstore.open(store, "r+" if void or void_readable else "r") as opened:
            report = await opened.repair(void, void_readable=void_readable)
        damaged = [version._asdict() for version in report.damaged]
        return {"store": opened.url, "ok": report.ok, **report._asdict(), "damaged": damaged}

    return run(work, show_repaired, as_json)
