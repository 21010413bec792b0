"""An asynchronous, transactional store of chunked arrays for ML checkpoints.

Functions and methods that do I/O are coroutines; `tstore.sync` has blocking ones with the same names.
Modules are imported when a name from them is first used: `import tstore` itself loads nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tstore import errors, sharding
    from tstore import jax as jax
    from tstore import torch as torch
    from tstore import zarr as zarr
    from tstore.checkpoint.background import BackgroundSave, SaveReport, save_async
    from tstore.checkpoint.checkpointer import Checkpointer
    from tstore.checkpoint.job_store import TierStep
    from tstore.checkpoint.leaves import PackedShards, PerHost, Shards
    from tstore.checkpoint.mapped import Mapped
    from tstore.checkpoint.policies import Continuous, EverySeconds, EverySteps, OnPreemption
    from tstore.checkpoint.reading import RestorePlan
    from tstore.checkpoint.restore import explain, restore
    from tstore.checkpoint.save import save
    from tstore.checkpoint.stream import stream
    from tstore.core.array import Appended, Array
    from tstore.core.copying.copy import CopyReport, copy
    from tstore.core.data.changes import Patch
    from tstore.core.following import Follower
    from tstore.core.format.tree.retention import Keep
    from tstore.core.log.group_commit import Retry
    from tstore.core.log.history import Commit
    from tstore.core.maintenance.collect_report import CollectReport
    from tstore.core.maintenance.diff import ArrayDiff, Diff
    from tstore.core.opening import open
    from tstore.core.snapshot import Snapshot
    from tstore.core.steps import Step, steps
    from tstore.core.storage.cache import Cache
    from tstore.core.store import Store
    from tstore.core.transactions.pending import PendingTransaction
    from tstore.core.transactions.transaction import Transaction
    from tstore.quantization.policy import Bits, MinSqnr
    from tstore.quantization.quantize import quantize, quantize_report
    from tstore.quantization.report import QuantizedArray, QuantizeReport
    from tstore.service.statistics.baseline import baseline
    from tstore.service.statistics.heat_map import HeatMap, heat_map
    from tstore.service.statistics.loss import QuantizationLoss, quantization_loss
    from tstore.service.statistics.summary import Summary, summarize
    from tstore.tiers.tiers import Tiers

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
    "Continuous",
    "CopyReport",
    "Diff",
    "EverySeconds",
    "EverySteps",
    "Follower",
    "HeatMap",
    "Keep",
    "Mapped",
    "MinSqnr",
    "OnPreemption",
    "PackedShards",
    "Patch",
    "PendingTransaction",
    "PerHost",
    "QuantizationLoss",
    "QuantizeReport",
    "QuantizedArray",
    "RestorePlan",
    "Retry",
    "SaveReport",
    "Shards",
    "Snapshot",
    "Step",
    "Store",
    "Summary",
    "TierStep",
    "Tiers",
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
    "stream",
    "summarize",
]

__version__ = "0.1.0"

_PACKAGES = {"errors", "jax", "sharding", "sync", "torch", "zarr"}
_NAMES = {
    "core.array": "Appended Array",
    "checkpoint.background": "BackgroundSave SaveReport save_async",
    "checkpoint.checkpointer": "Checkpointer",
    "checkpoint.job_store": "TierStep",
    "checkpoint.leaves": "PackedShards PerHost Shards",
    "checkpoint.mapped": "Mapped",
    "checkpoint.policies": "Continuous EverySeconds EverySteps OnPreemption",
    "checkpoint.reading": "RestorePlan",
    "checkpoint.restore": "explain restore",
    "checkpoint.save": "save",
    "checkpoint.stream": "stream",
    "core.copying.copy": "CopyReport copy",
    "core.data.changes": "Patch",
    "core.following": "Follower",
    "core.format.tree.retention": "Keep",
    "core.log.group_commit": "Retry",
    "core.log.history": "Commit",
    "core.maintenance.collect_report": "CollectReport",
    "core.maintenance.diff": "ArrayDiff Diff",
    "core.opening": "open",
    "quantization.policy": "Bits MinSqnr",
    "quantization.quantize": "quantize quantize_report",
    "quantization.report": "QuantizeReport QuantizedArray",
    "core.steps": "Step steps",
    "core.snapshot": "Snapshot",
    "service.statistics.baseline": "baseline",
    "service.statistics.heat_map": "HeatMap heat_map",
    "service.statistics.loss": "QuantizationLoss quantization_loss",
    "service.statistics.summary": "Summary summarize",
    "core.storage.cache": "Cache",
    "core.store": "Store",
    "tiers.tiers": "Tiers",
    "core.transactions.pending": "PendingTransaction",
    "core.transactions.transaction": "Transaction",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


if not TYPE_CHECKING:  # a type checker would accept every name, even a misspelled one

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return importlib.import_module(f"tstore.{name}")
        if name not in _MODULES:
            from tstore.core.hints import no_such_name

            raise no_such_name(__name__, name)
        value = globals()[name] = getattr(importlib.import_module(f"tstore.{_MODULES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES, "__version__"})
