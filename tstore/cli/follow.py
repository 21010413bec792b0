"""The command `tstore follow`: a line, or a command of the shell, for each new version."""

from __future__ import annotations

import asyncio
import json
import os

import click

import tstore
from tstore.cli.console import FAILED, Progress, fail, json_option, print_now, run, store_argument
from tstore.cli.text import escape

__all__ = ["follow"]


@click.command("follow")
@store_argument
@click.option(
    "--tags", multiple=True, metavar="PATTERN", help="Only versions with a matching tag, such as 'step/*'."
)
@click.option(
    "--since",
    type=click.IntRange(0),
    metavar="V",
    help="Begin after this version; by default with the newest one.",
)
@click.option("--newest", is_flag=True, help="Skip versions that are not the newest when it is their turn.")
@click.option(
    "--exec",
    "command",
    metavar="COMMAND",
    help="Run a command of the shell for each version, one at a time, with TSTORE_URL, TSTORE_VERSION and "
    "TSTORE_TAGS in its environment. If it fails, so does this command.",
)
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after N versions; by default never.")
@json_option
def follow(
    store: str,
    tags: tuple[str, ...],
    since: int | None,
    newest: bool,
    command: str | None,
    count: int | None,
    as_json: bool,
) -> int:
    """Print new versions as they come.

    With --exec, run a command for each in place of printing it. Waits for new versions until it is interrupted.
    Continue later with --since and the last version that was printed. With --json, prints a document on one
    line for each version.
    """
    failure: list[str] = []

    async def work(progress: Progress) -> None:
        async with await tstore.open(store, "r") as opened:
            follower = opened.follow(since, list(tags) or None, "newest" if newest else "each")
            seen = 0
            while count is None or seen < count:
                progress.doing(f"waiting for a version of {store}")
                snapshot = await anext(follower)
                seen += 1
                names = sorted(tag for tag, version in snapshot.tags.items() if version == snapshot.version)
                document = {"store": opened.url, "version": snapshot.version, "tags": names}
                line = f"version {snapshot.version} {' '.join(names)}".rstrip()
                print_now(json.dumps(document) if as_json else escape(line))
                if command is not None and (code := await _execute(command, opened.url, snapshot.version, names)):
                    failure.append(
                        f"the command for version {snapshot.version} exited with {code}: {command}; mend it and "
                        f"continue with --since {snapshot.version - 1}"
                    )
                    return

    code = run(work, lambda _: None, as_json)
    return fail("CommandFailed", failure[0], as_json, FAILED) if failure else code


async def _execute(command: str, url: str, version: int, tags: list[str]) -> int:
    """Run a command and return its exit code; end it if the caller is cancelled."""
    environment = {"TSTORE_URL": url, "TSTORE_VERSION": str(version), "TSTORE_TAGS": " ".join(tags)}
    process = await asyncio.create_subprocess_shell(command, env=os.environ | environment)
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
