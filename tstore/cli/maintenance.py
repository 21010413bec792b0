"""The commands that maintain a store (`verify`, `gc`, `repair`, `finish`) or test storage (`probe`, `bench`)."""

from __future__ import annotations

import contextlib
import datetime
import re
from pathlib import Path
from typing import Any

import click

import tstore
from tstore.cli.console import Progress, json_option, number_option, path_or_url, run, store_argument
from tstore.cli.results import Finished, OfStore, Probed, Repaired
from tstore.cli.tables import (
    show_benched,
    show_collected,
    show_finished,
    show_probed,
    show_repaired,
    show_verified,
)
from tstore.cli.text import format_size
from tstore.core.format.tree.retention import ABANDONED_AFTER, Best, Keep
from tstore.core.log.marker import read_marker
from tstore.core.maintenance.verify import VerifyProgress, VerifyReport
from tstore.core.storage.connect import connect
from tstore.core.storage.local.store import LocalStorage
from tstore.core.storage.objects import Durability
from tstore.errors import InvalidArgument

__all__ = ["bench", "finish", "gc", "probe", "repair", "verify"]

_MAX_AGE = datetime.timedelta.max
_LISTED = re.compile(r"void_intact=\[(\d+(?:, \d+)*)\]")


@click.command("verify")
@store_argument
@json_option
def verify(store: str, as_json: bool) -> int:
    """Read and check every version of a store.

    Prints one line for each fault and exits with status 1 if there are any.
    """

    async def work(progress: Progress) -> OfStore[VerifyReport]:
        progress.doing(f"verifying {store}")

        def show(done: VerifyProgress) -> None:
            if done.total_bytes:
                sizes = f"{format_size(done.bytes)} of {format_size(done.total_bytes)}"
            else:
                sizes = f"version {done.versions:,} of {done.total_versions:,}"
            progress.doing(f"verifying {store}: {sizes}")

        async with await tstore.open(store, "r") as opened:
            return OfStore(opened.url, await opened.verify(show))

    return run(work, show_verified, as_json)


def _parse_best(context: click.Context, parameter: click.Parameter, value: str | None) -> Best | None:
    if value is None:
        return None
    count, _, metric = value.partition(":")
    metric, order = (metric[:-4], metric[-3:]) if metric.endswith((":min", ":max")) else (metric, "min")
    if not (count.isascii() and count.isdigit() and len(count) < 20) or int(count) == 0 or not metric:
        raise click.BadParameter(f"{value!r:.60}: expected N:METRIC or N:METRIC:max, such as 3:loss")
    return int(count), metric, "max" if order == "max" else "min"


def _to_age(context: click.Context, parameter: click.Parameter, value: float | None) -> datetime.timedelta | None:
    try:
        return None if value is None else datetime.timedelta(days=value)
    except (OverflowError, ValueError):
        raise click.BadParameter(f"{value:g} days is too long; expected at most {_MAX_AGE.days}") from None


@click.command("gc")
@store_argument
@click.option("--keep-last", type=click.IntRange(1), metavar="N", help="Keep the N highest steps.")
@click.option("--keep-every", type=click.IntRange(1), metavar="K", help="Keep the steps that are multiples of K.")
@click.option(
    "--keep-best",
    callback=_parse_best,
    metavar="N:METRIC[:max]",
    help="Keep the N steps with the lowest (with :max the highest) value of a metric.",
)
@click.option(
    "--keep-days",
    type=click.FloatRange(0),
    callback=_to_age,
    metavar="D",
    help="Keep the versions of the last D days, by the clocks of their writers and of this machine.",
)
@click.option("--keep-tag", multiple=True, metavar="TAG", help="Keep the version with this tag; may be repeated.")
@click.option(
    "--keep-copies",
    type=click.IntRange(0),
    metavar="N",
    help="Keep the N newest copies of each version that is kept; all by default.",
)
@click.option(
    "--abandoned-days",
    type=click.FloatRange(0),
    callback=_to_age,
    default=ABANDONED_AFTER.days,
    show_default=True,
    metavar="D",
    help="Delete the data of uncommitted transactions after D days without a write.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@json_option
def gc(
    store: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: Best | None,
    keep_days: datetime.timedelta | None,
    keep_tag: tuple[str, ...],
    keep_copies: int | None,
    abandoned_days: datetime.timedelta,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Remove old versions and abandoned data.

    Removes the versions that match no --keep option, and the data of abandoned transactions. The newest step is
    always kept, and so is the head: the newest version that is not a copy. A copy, such as a quantized one, is
    kept with the version from which it was made. Without a --keep option every version is kept.
    """
    rules = (keep_last, keep_every, keep_best, keep_days)
    has_rule = bool(keep_tag) or any(rule is not None for rule in rules)
    if keep_copies is not None and not has_rule:
        raise click.UsageError("--keep-copies is about the versions that another --keep option keeps; pass one")

    async def work(progress: Progress) -> OfStore[tstore.CollectReport]:
        keep = Keep(*rules, tags=keep_tag, copies=keep_copies) if has_rule else None
        progress.doing(f"collecting garbage in {store}")
        async with await tstore.open(store, "r" if dry_run else "r+") as opened:
            return OfStore(opened.url, await opened.collect(keep, abandoned=abandoned_days, dry_run=dry_run))

    return run(work, show_collected, as_json)


@click.command("repair")
@store_argument
@click.option(
    "--void",
    multiple=True,
    type=click.IntRange(1),
    metavar="N",
    help="Void version N, if its record is damaged; may be repeated.",
)
@click.option(
    "--void-intact",
    multiple=True,
    type=click.IntRange(1),
    metavar="N",
    help="Void version N even if its record is intact, for example if it is forged; may be repeated.",
)
@json_option
def repair(store: str, void: tuple[int, ...], void_intact: tuple[int, ...], as_json: bool) -> int:
    """List damaged versions, or void them.

    Lists the versions whose records are damaged or name missing objects, and changes nothing. With --void N the
    record of version N is replaced by an empty one: the changes of that version are lost, but reads, verify, gc
    and commits work again. The damaged record is saved as damaged/N-<checksum> in the store. If you have a copy of
    the record, restore it instead. Both forms of --void need direct access to the storage, not through tstore
    serve. Run the command again after an interruption. It exits with status 1 if a damaged version remains.
    """

    async def work(progress: Progress) -> Repaired:
        progress.doing(f"checking the records of {store}")
        async with await tstore.open(store, "r+" if void or void_intact else "r") as opened:
            try:
                report = await opened.repair(void, void_intact=void_intact)
            except InvalidArgument as error:
                raise InvalidArgument(_LISTED.sub(_as_options, str(error))) from error
        already = [] if report.voided else sorted({*void, *void_intact})
        return Repaired(opened.url, report, already)

    return run(work, show_repaired, as_json)


def _as_options(listed: re.Match[str]) -> str:
    return " ".join(f"--void-intact {version}" for version in listed[1].split(", "))


@click.command("finish")
@store_argument
@click.argument("transaction")
@json_option
def finish(store: str, transaction: str, as_json: bool) -> int:
    """Commit a transaction whose hosts have died.

    TRANSACTION is the id or name of a cooperative transaction, as listed by `tstore ls STORE --pending`. All of
    its hosts must have delivered their fragments.
    """

    async def work(progress: Progress) -> Finished:
        progress.doing(f"finishing {transaction}")
        async with await tstore.open(store, "r+") as opened:
            version = await opened.finish(transaction)
        return Finished(opened.url, transaction, version)

    return run(work, show_finished, as_json)


@click.command("probe")
@click.argument("url", type=path_or_url)
@json_option
def probe(url: str, as_json: bool) -> int:
    """Test whether storage suits a store.

    A store relies on promises of its storage, such as: exactly one of several concurrent creates of an object
    succeeds, and listings are complete. The test creates objects in a new folder under txn/ (a few thousand
    requests, tens of MB) and removes them; a store at URL is not changed. The exit status is 1 if a promise is
    broken, or could not be tested because the storage was full or did not respond.
    """
    from tstore.lab.conformance import Subject, run_checks

    async def work(progress: Progress) -> Probed:
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
        return Probed(
            store=storage.url,
            ok=not {"fails", "unknown"} & set(outcomes),
            writable=create.outcome != "skipped",
            holds=outcomes.count("holds"),
            fails=outcomes.count("fails"),
            skipped=outcomes.count("skipped"),
            unknown=outcomes.count("unknown"),
            checks=findings,
        )

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
    from tstore.lab.hosts.benchmark import bench as measure

    async def work(progress: Progress) -> dict[str, Any]:
        return await measure(
            url,
            hosts=hosts,
            size=size * 1_000_000,
            rounds=rounds,
            seconds=seconds,
            durability=Durability(durability),
            progress=progress.doing,
        )

    return run(work, show_benched, as_json)
