"""The view Run: the steps of a store on a time line."""

from __future__ import annotations

from tstore.page.views import Document, Query

__all__ = ["load"]


async def load(query: Query) -> Document:
    """Return the commits of the store."""
    commits = [{**c._asdict(), "time": c.time.isoformat()} async for c in query.store.history()]
    return {"command": f"tstore log {query.address}", "python": "", "commits": commits}
