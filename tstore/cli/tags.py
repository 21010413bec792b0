"""The commands that change which versions have tags: `tstore tag` and `tstore rm`."""

from __future__ import annotations

import click

import tstore
from tstore.cli.console import STEP, Document, Progress, at_options, json_option, run, store_argument
from tstore.cli.listings import show_removed, show_tagged, show_tags
from tstore.errors import AlreadyExists
from tstore.steps import chosen_snapshot
from tstore.store import Store
from tstore.tags import drop_tag, move_tag, remove_step, set_tag

__all__ = ["remove", "tag"]


@click.command("tag")
@store_argument
@click.argument("name", required=False)
@at_options("The version to tag, a number or a tag; the newest step by default.")
@click.option("-f", "--move", is_flag=True, help="Move the tag if it is in use.")
@click.option("-d", "--drop", is_flag=True, help="Remove the tag.")
@json_option
def tag(store: str, name: str | None, at: int | str | None, move: bool, drop: bool, as_json: bool) -> int:
    """List the tags, or set, move or drop one.

    A tag is set by a commit. A tag for an earlier version is that of a new commit with the data of that version,
    which takes no space. Garbage collection keeps it with `tstore gc --keep-tag NAME`. Steps are tags that only a
    save sets, and `tstore rm` removes.
    """
    if name is None and (move or drop or at is not None):
        raise click.UsageError("Missing argument 'NAME': the tag to set, move or drop.")
    if drop and (move or at is not None):
        raise click.UsageError("--drop removes a tag; pass it without --move, --at and --step")

    async def work(progress: Progress) -> Document:
        async with await tstore.open(store, "r" if name is None else "r+") as opened:
            if name is None:
                progress.doing(f"reading {store}")
                tags = sorted((await opened.tags()).items(), key=lambda item: item[1])
                return {"store": opened.url, "tags": [{"tag": t, "version": v} for t, v in tags]}
            progress.doing(f"changing the tag {name}")
            if drop:
                return {"store": opened.url, "tag": name, **await _drop(opened, name)}
            try:
                tagged = await (move_tag if move else set_tag)(opened, name, at)
            except AlreadyExists as error:
                message = str(error).replace(
                    "move this one with transaction(move_tag=…)", "move this one with --move"
                )
                raise AlreadyExists(message) from error
        return {"store": opened.url, "tag": name, **tagged._asdict(), "dropped": None}

    return run(work, show_tags if name is None else show_tagged, as_json)


async def _drop(store: Store, name: str) -> Document:
    dropped = (await store.tags()).get(name)
    return {"version": await drop_tag(store, name), "source": None, "dropped": dropped}


@click.command("rm")
@store_argument
@click.option("--step", type=STEP, required=True, metavar="N", help="The step to remove.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@json_option
def remove(store: str, step: int, dry_run: bool, as_json: bool) -> int:
    """Remove a step.

    A commit drops the tag of the step, so that it is no longer listed or restored, and may be saved again. Its
    data stays, readable by the number of its version, until `tstore gc` with a --keep option removes that version.
    The newest version is always kept.
    """

    async def work(progress: Progress) -> Document:
        progress.doing(f"removing step {step}")
        async with await tstore.open(store, "r" if dry_run else "r+") as opened:
            source = (await chosen_snapshot(opened, step, None)).version
            added = (await opened.log.reader.record(source)).bytes_added
            version = None if dry_run else await remove_step(opened, step)
        names = {"step": step, "source": source, "bytes_added": added, "version": version}
        return {"store": opened.url, **names, "dry_run": dry_run}

    return run(work, show_removed, as_json)
