"""The commands that test and measure storage: `tstore probe` and `tstore bench`."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from tstore.cli.console import Document, Progress, json_option, number_option, path_or_url, run
from tstore.cli.tables import show_benched, show_probed
from tstore.log.marker import read_marker
from tstore.storage.connect import connect
from tstore.storage.local.store import LocalStorage
from tstore.storage.objects import Durability

__all__ = ["bench", "probe"]


@click.command("probe")
@click.argument("url", type=path_or_url)
@json_option
def probe(url: str, as_json: bool) -> int:
    """Test whether storage suits a store.

    A store relies on promises of its storage, such as: exactly one of several concurrent creates of an object
    succeeds, and listings are complete. The test creates objects in a new folder under txn/ (a few thousand
    requests, about 50 MB) and removes them; a store at URL is not changed. The exit status is 1 if a promise is
    broken, or could not be tested because the storage was full or did not respond.
    """
    from tstore.conformance import Subject, run_checks

    async def work(progress: Progress) -> Document:
        storage = connect(url)
        try:
            if isinstance(storage, LocalStorage):
                await storage.empty()  # raises `NotFound` if the URL is that of a file
            await read_marker(storage)  # fails at once, not in every check, if a server is unreachable
        finally:
            await storage.close()
        path = Path(storage.url)
        folders = [path, *path.parents] if isinstance(storage, LocalStorage) else []
        new_folders = [folder for folder in folders if not folder.exists()]  # innermost first
        findings = await run_checks(
            Subject.from_url(url), progress=lambda name: progress.doing(f"probing {url}: {name}")
        )
        with contextlib.suppress(OSError):  # another process may have written to the folder
            for folder in new_folders:
                folder.rmdir()
        outcomes = [finding.outcome for finding in findings]
        [create] = [finding for finding in findings if finding.check == "create_never_replaces"]
        return {
            "url": storage.url,
            "ok": not {"fails", "unknown"} & set(outcomes),
            "writable": create.outcome != "skipped",
            **{outcome: outcomes.count(outcome) for outcome in ("holds", "fails", "skipped", "unknown")},
            "checks": [finding._asdict() for finding in findings],
        }

    return run(work, show_probed, as_json)


@click.command("bench")
@click.argument("url", type=path_or_url)
@number_option("--hosts", "N", click.IntRange(1, 256), 8, "The number of processes.")
@number_option("--size", "MB", click.IntRange(1, 1_000_000), 256, "The size of the checkpoint.")
@number_option("--rounds", "N", click.IntRange(1, 100), 3, "The number of saves and restores.")
@number_option("--seconds", "S", click.FloatRange(0.1, 3600), 5, "How long to make small commits, in seconds.")
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

    A store is created at URL, which must be empty, and removed at the end. Several processes save and restore one
    checkpoint together, then each makes small commits. This needs space for ROUNDS times SIZE. Restores
    are usually served from the system's file cache.
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
