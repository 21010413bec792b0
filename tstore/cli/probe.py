"""The command `tstore probe`."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from tstore.cli.console import Document, json_option, path_or_url, run
from tstore.cli.progress import Progress
from tstore.cli.tables import show_probed
from tstore.log.marker import read_marker
from tstore.storage.base import Storage
from tstore.storage.connect import connect
from tstore.storage.local.store import LocalStorage

__all__ = ["probe"]


@click.command("probe")
@click.argument("url", type=path_or_url)
@json_option
def probe(url: str, as_json: bool) -> int:
    """Test whether storage is fit for a store.

    A store needs storage that lets exactly one of several racing creates win, that lists what was written, and
    more. The test makes objects in a new folder below txn/ (some thousand requests, about 50 MB) and removes them;
    a store at URL is not changed. Exits with status 1 if a promise is broken or could not be tested because the
    storage was full or did not answer.
    """
    from tstore.conformance import Subject, judge

    async def work(progress: Progress) -> Document:
        where = connect(url)
        try:
            if isinstance(where, LocalStorage):
                await where.empty()  # raises `NotFound` if it is a file
            await read_marker(where)  # a server that is not there would fail each check, and slowly
        finally:
            await where.close()
        made = [folder for folder in _folders(where) if not folder.exists()]
        findings = await judge(Subject.of(url), tell=lambda name: progress.doing(f"probing {url}: {name}"))
        with contextlib.suppress(OSError):  # somebody else may write there by now
            for folder in made:
                folder.rmdir()
        outcomes = [finding.outcome for finding in findings]
        [create] = [finding for finding in findings if finding.check == "create_never_replaces"]
        return {
            "url": where.url,
            "ok": not {"fails", "unknown"} & set(outcomes),
            "writable": create.outcome != "skipped",
            **{outcome: outcomes.count(outcome) for outcome in ("holds", "fails", "skipped", "unknown")},
            "checks": [finding._asdict() for finding in findings],
        }

    return run(work, show_probed, as_json)


def _folders(backend: Storage) -> list[Path]:
    """Return the folder of a local store and those above it, innermost first; none for a server."""
    if not isinstance(backend, LocalStorage):
        return []
    folder = Path(backend.url)
    return [folder, *folder.parents]
