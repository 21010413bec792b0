"""The Health view: the verification of the whole store, as a job that the page can start and stop."""

from __future__ import annotations

from tstore.service.page.views import Document, Query, shell_command

__all__ = ["load"]


async def load(query: Query) -> Document:
    """Return the state of the job, and the report of the last one."""
    job = query.verification.document()
    job["error"] = query.message(job["error"])
    if report := job["report"]:
        report["faults"] = [query.message(fault) for fault in report["faults"]]
    return {
        "command": shell_command("verify", [query.address]),
        "python": f"import tstore.sync as tstore\n\nprint(tstore.open({query.address!r}, 'r').verify())",
        **job,
    }
