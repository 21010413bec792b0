"""An asynchronous, transactional store of chunked arrays for ML checkpoints.

Functions and methods that do I/O are coroutines; `tstore.sync` has blocking ones with the same names.
`tstore.jax`, `tstore.torch` and `tstore.zarr` are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from tstore import errors, sharding
from tstore import pickling as _pickling  # noqa: F401 - registers how stores, snapshots and arrays are pickled
from tstore.array import Appended, Array
from tstore.checkpoint.background import BackgroundSave, save_async
from tstore.checkpoint.checkpointer import Checkpointer
from tstore.checkpoint.leaves import PackedShards, Shards
from tstore.checkpoint.policies import EverySeconds, EverySteps, OnPreemption
from tstore.checkpoint.reading import RestorePlan
from tstore.checkpoint.restore import explain, restore
from tstore.checkpoint.save import save
from tstore.convert.tensorstore_spec import open
from tstore.copying.copy import CopyReport, copy
from tstore.format.tree.retention import Keep
from tstore.log.group_commit import Retry
from tstore.log.history import Commit
from tstore.maintenance.collect_report import CollectReport
from tstore.maintenance.diff import ArrayDiff, Diff
from tstore.quantization.policy import Bits, MinSqnr
from tstore.quantization.quantize import quantize, quantize_report
from tstore.quantization.report import QuantizedArray, QuantizeReport
from tstore.snapshot import Snapshot
from tstore.statistics.baseline import baseline
from tstore.statistics.heat_map import HeatMap, heat_map
from tstore.statistics.loss import QuantizationLoss, quantization_loss
from tstore.statistics.summary import Summary, summarize
from tstore.steps import Step, steps
from tstore.storage.cache import Cache
from tstore.store import Store
from tstore.transactions.pending import PendingTransaction
from tstore.transactions.transaction import Transaction

__all__ = [
    "Appended",
    "Array",
    "ArrayDiff",
    "BackgroundSave",
    "Bits",
    "Cache",
    "Checkpointer",
    "CollectReport",
    "Commit",
    "CopyReport",
    "Diff",
    "EverySeconds",
    "EverySteps",
    "HeatMap",
    "Keep",
    "MinSqnr",
    "OnPreemption",
    "PackedShards",
    "PendingTransaction",
    "QuantizationLoss",
    "QuantizeReport",
    "QuantizedArray",
    "RestorePlan",
    "Retry",
    "Shards",
    "Snapshot",
    "Step",
    "Store",
    "Summary",
    "Transaction",
    "baseline",
    "copy",
    "errors",
    "explain",
    "heat_map",
    "open",
    "quantization_loss",
    "quantize",
    "quantize_report",
    "restore",
    "save",
    "save_async",
    "sharding",
    "steps",
    "summarize",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("jax", "torch", "zarr"):
        return importlib.import_module(f"tstore.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
