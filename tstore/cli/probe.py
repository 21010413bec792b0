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
    """Test whether storage can hold a store.

    A store needs storage on which exactly one of several concurrent creates succeeds, listings are complete, and
    more. The test creates objects in a new folder under txn/ (some thousand requests, about 50 MB) and removes
    them; a store at URL is not changed. Exits with status 1 if a promise is broken or could not be tested because
    the storage was full or did not respond.
    """
    from tstore.conformance import Subject, run_checks

    async def work(progress: Progress) -> Document:
        storage = connect(url)
        try:
            if isinstance(storage, LocalStorage):
                await storage.empty()  # raises `NotFound` if it is a file
            await read_marker(storage)  # fail at once if a server is unreachable, not in every check
        finally:
            await storage.close()
        created = [folder for folder in _folders(storage) if not folder.exists()]
        findings = await run_checks(
            Subject.from_url(url), progress=lambda name: progress.doing(f"probing {url}: {name}")
        )
        with contextlib.suppress(OSError):  # another process may have written there
            for folder in created:
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


def _folders(storage: Storage) -> list[Path]:
    """Return the folder of a local store and its parents, innermost first; none for remote storage."""
    if not isinstance(storage, LocalStorage):
        return []
    folder = Path(storage.url)
    return [folder, *folder.parents]
