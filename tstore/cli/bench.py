"""The command `tstore bench`."""

from __future__ import annotations

import click

from tstore.cli.console import Document, json_option, path_or_url, run
from tstore.cli.progress import Progress
from tstore.cli.tables import show_benched
from tstore.storage.objects import Durability

__all__ = ["bench"]


@click.command("bench")
@click.argument("url", type=path_or_url)
@click.option(
    "--hosts",
    type=click.IntRange(1, 256),
    default=8,
    show_default=True,
    metavar="N",
    help="The number of processes.",
)
@click.option(
    "--size",
    type=click.IntRange(1, 1_000_000),
    default=256,
    show_default=True,
    metavar="MB",
    help="The size of the checkpoint.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=3,
    show_default=True,
    metavar="N",
    help="The number of saves and restores.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 3600),
    default=5,
    show_default=True,
    metavar="S",
    help="The duration of the small commits, in seconds.",
)
@click.option(
    "--durability",
    type=click.Choice([d.value for d in Durability]),
    default=Durability.FSYNC.value,
    show_default=True,
    help="Whether commits are flushed to disk (fsync) before they are acknowledged.",
)
@json_option
def bench(url: str, hosts: int, size: int, rounds: int, seconds: float, durability: str, as_json: bool) -> int:
    """Measure save, restore and commit speed.

    Creates a store at URL, which must be empty, and removes it at the end. Several processes save and restore one
    checkpoint together, then each makes small commits. Needs space for rounds times size. Restores are usually
    served from the file cache.
    """
    from tstore.hosts.benchmark import bench as measure

    async def work(progress: Progress) -> Document:
        report = await measure(
            url,
            hosts=hosts,
            size=size * 1_000_000,
            rounds=rounds,
            seconds=seconds,
            durability=Durability(durability),
            progress=progress.doing,
        )
        return {"ok": report.ok, **report._asdict()}

    return run(work, show_benched, as_json)
