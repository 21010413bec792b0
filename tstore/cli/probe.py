"""The command `tstore probe`."""

from __future__ import annotations

import click

from tstore.cli.console import Document, json_option, run
from tstore.cli.tables import Progress, show_probed
from tstore.kv.url import connect
from tstore.marker import read_marker

__all__ = ["probe"]


@click.command("probe")
@click.argument("url")
@json_option
def probe(url: str, as_json: bool) -> int:
    """Find out whether the storage at URL keeps what a store needs: one winner of racing creates, and more.

    It makes objects in a new folder below txn/ (some thousand requests, about 50 MB) and removes them; a store
    that lies there is not touched. Ends with status 1 where a promise is broken, or where the storage was full or
    did not answer, so that one is unknown.
    """
    from tstore.testing.conformance import Subject, judge

    async def work(progress: Progress) -> Document:
        where = connect(url)
        try:
            await read_marker(where)  # a server that is not there would fail each check, and slowly
        finally:
            await where.close()
        findings = await judge(Subject.of(url), tell=lambda name: progress.doing(f"probing {url}: {name}"))
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
