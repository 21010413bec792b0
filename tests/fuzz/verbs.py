"""The operations of fuzzing workers, with their weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from tests.fuzz import checkpoints, transactions
from tests.fuzz.worker import Worker

__all__ = ["VERBS", "Verb"]

Verb = Callable[[Worker], Awaitable[None]]

VERBS: Mapping[str, tuple[float, Verb]] = {
    "begin": (6, transactions.begin),
    "work": (4, transactions.work),
    "commit": (4, transactions.commit),
    "commit_together": (1, transactions.commit_together),
    "commit_beside_write": (0.5, transactions.commit_beside_write),
    "stale_handles": (0.4, transactions.stale_handles),
    "read": (4, transactions.read),
    "save": (3, checkpoints.save),
    "save_while_changing": (0.4, checkpoints.save_while_changing),
    "save_with_gaps": (0.2, checkpoints.save_with_gaps),
    "restore": (2, checkpoints.restore),
    "collect": (1.5, checkpoints.collect),
    "quantize": (1, checkpoints.quantize),
    "copy": (1, checkpoints.copy),
    "export_and_import": (0.5, checkpoints.export_and_import),
    "finish": (0.5, checkpoints.finish),
    "verify": (0.5, checkpoints.verify),
    "inspect": (1, checkpoints.inspect),
}
"""Each operation and its relative frequency."""
