"""The storage of DCP's saves: each process writes its items as its part of one cooperative transaction."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tstore.checkpoint.checkpoint import Checkpoint
from tstore.checkpoint.jobs import write_jobs
from tstore.checkpoint.leaves import Shards
from tstore.checkpoint.options import CommitOptions, CommitSettings, complete
from tstore.checkpoint.structure import flatten, scalars_in
from tstore.core.format.arguments import checked_step, quote
from tstore.core.format.tree_document import MAX_LEVELS, SCALARS, TreeDocument, nested_document
from tstore.core.runtime.event_loops import BACKGROUND
from tstore.core.store import Store, open
from tstore.core.transactions.attempts import Attempt
from tstore.core.transactions.transaction import Transaction
from tstore.errors import InvalidArgument, Misuse
from tstore.quantization.policy import CodecRules, Rules
from tstore.torch.dcp.identifiers import is_step, step_from
from tstore.torch.dcp.plans import Assignment, index_of, with_assignments, with_documents
from tstore.torch.dcp.replicated import checksums_of
from tstore.torch.tensors import host_values

__all__ = ["Writer"]

_MAX_DOCUMENT_PICKLE = 1 << 16
"""Bytes of a pickle whose value may become part of the structure, which every reader of the step decodes."""


class _Staged(NamedTuple):
    """The values of a save, written by the coordinator and not yet committed."""

    store: Store
    checkpoint: Checkpoint
    transaction: Transaction


class Writer(StorageWriter):
    """Saves a step with `dcp.save(state_dict, storage_writer=Writer(url, step))`, from all processes of the group.

    The arguments are those of `tstore.save`, but `codecs` takes rules only. One `Writer` can save many steps, with
    `checkpoint_id=step` in the calls of `dcp.save`. `version` is the version of the last save; it is None in every
    process but the coordinator.

    Ordinary tensors and Python scalars must be equal in every process that has their key, because DCP saves those
    of one; what a process has for itself needs another key, such as f"rank{rank}". The coordinator commits when
    all processes have written. Its errors, such as `AlreadyExists`, are in the `CheckpointException` that DCP
    raises in all processes.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed.checkpoint as dcp
    >>> import tstore.sync as tstore
    >>> state = {"w": torch.arange(3.0)}
    >>> _ = dcp.save(state, storage_writer=tstore.torch.Writer("of-dcp", step=7))
    >>> state["w"] += 1
    >>> dcp.load(state, storage_reader=tstore.torch.Reader("of-dcp"))
    >>> state["w"]
    tensor([0., 1., 2.])
    """

    @complete(CommitOptions, CommitSettings)
    def __init__(
        self,
        store: str | os.PathLike[str],
        step: int | None = None,
        *,
        attempt: str | None = None,
        codecs: CodecRules = None,
        **options: Unpack[CommitOptions],
    ) -> None:
        if not isinstance(store, str | os.PathLike):
            raise InvalidArgument(f"store={quote(store)}: expected a URL or a path, which every process opens")
        self._url = store
        self._step = None if step is None else checked_step(step)
        self._attempt = attempt
        self._rules = Rules(codecs)
        self._settings = CommitSettings(**options)
        # by thread, because dcp.async_save runs each save in its own
        self._steps: dict[int, int] = {}
        self._staged: dict[int, _Staged] = {}
        self._rank = 0
        self.version: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a pickle, for `AsyncCheckpointerType.PROCESS`: the saves under way stay here."""
        return {**vars(self), "_steps": {}, "_staged": {}}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether an identifier is that of a step."""
        return is_step(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save; `checkpoint_id` names its step, such as "100", in place of the constructor's."""
        self._steps.pop(threading.get_ident(), None)
        if checkpoint_id is not None:
            self._steps[threading.get_ident()] = checked_step(step_from(checkpoint_id))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check that a step is known; abort the transactions that failed saves have left."""
        if self._steps.get(threading.get_ident(), self._step) is None:
            raise InvalidArgument("no step: pass it to Writer(store, step), or to dcp.save as checkpoint_id=…")
        if kwargs.get("use_collectives", True) is not True:
            raise InvalidArgument("use_collectives=False can't make one commit of all processes; leave it out")
        self._rank = kwargs.get("rank", 0)
        saving = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        for thread in self._staged.keys() - saving:
            if (staged := self._staged.pop(thread, None)) is not None:
                BACKGROUND.run(self._abort(*staged))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Add to each plan what its process must know to agree with the others."""
        return with_assignments(plans, self._attempt, self._rank)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of this process; unless it is the coordinator, also deliver its fragment."""
        assignment = plan.storage_data
        if not isinstance(assignment, Assignment):
            raise Misuse("the plan was not prepared by a Writer in the coordinator; use one in all processes")
        replicated = checksums_of(planner, assignment.hosts)
        leaves, documents = _leaves_and_documents(plan, planner, assignment)
        checkpoint = self._checkpoint(assignment, leaves, replicated)
        staged = BACKGROUND.run(self._write(checkpoint))
        if staged is not None:
            self._staged[threading.get_ident()] = staged
        results = [
            WriteResult(item.index, item.tensor_storage_size() or 0, documents.get(item.index.fqn))
            for item in plan.items
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, in the coordinator, when all processes have delivered their fragments."""
        staged = self._staged.pop(threading.get_ident(), None)
        if staged is None:
            raise Misuse("finish was called before write_data; call dcp.save, which calls both")
        store, checkpoint, transaction = staged
        documents = dict(r.storage_data for of_process in results for r in of_process if r.storage_data)
        checkpoint = checkpoint._replace(reserved=with_documents(checkpoint.reserved, documents))
        self.version = BACKGROUND.run(self._commit(store, checkpoint, transaction))

    def _current_step(self) -> int:
        step = self._steps.get(threading.get_ident(), self._step)
        assert step is not None
        return step

    def _checkpoint(
        self, assignment: Assignment, leaves: Mapping[str, Shards], replicated: Mapping[str, bytes]
    ) -> Checkpoint:
        step = self._current_step()
        host, hosts = assignment.host, assignment.hosts
        jobs = write_jobs(leaves, self._rules, host, hosts)
        # a plan from DCP's cache has the token of an earlier save, which may have failed for this step
        attempt = Attempt(assignment.attempt).next_save(str(self._url), host, step)
        return Checkpoint(
            step,
            jobs,
            self._settings,
            self._settings.metadata(step),
            assignment.reserved,
            assignment.digest,
            host,
            hosts,
            attempt,
            replicated=replicated,
        )

    async def _write(self, checkpoint: Checkpoint) -> _Staged | None:
        store = await open(self._url, "a")
        try:
            transaction = await checkpoint.stage(store)
            if checkpoint.host == 0:
                return _Staged(store, checkpoint, transaction)
            await transaction.deliver()
        except BaseException:
            await store.close()
            raise
        await store.close()
        return None

    async def _commit(self, store: Store, checkpoint: Checkpoint, transaction: Transaction) -> int:
        try:
            await transaction.staging.set_root_attributes(checkpoint.settings.attributes, checkpoint.reserved)
            return await checkpoint.commit_step(store, transaction)
        finally:
            await store.close()

    async def _abort(self, store: Store, checkpoint: Checkpoint, transaction: Transaction) -> None:
        try:
            await transaction.abort()
        finally:
            await store.close()


def _leaves_and_documents(
    plan: SavePlan, planner: SavePlanner, assignment: Assignment
) -> tuple[dict[str, Shards], dict[str, tuple[str, TreeDocument]]]:
    """Return what this process saves: arrays by path; and by DCP's name, the path and document of other values."""
    tensors: dict[str, torch.Tensor] = {}
    parts_of: dict[str, tuple[Any, list[tuple[str, Any]]]] = {}  # by path: an item, and its parts
    leaves: dict[str, Shards] = {}
    documents: dict[str, tuple[str, TreeDocument]] = {}
    for number, item in enumerate(plan.items):
        path, _ = assignment.arrays[item.index.fqn]
        data = planner.resolve_data(item)
        if not isinstance(data, torch.Tensor):
            document = _document(path, data)
            if document is not None:
                documents[item.index.fqn] = path, document
                continue
            values = np.frombuffer(data.getvalue(), np.uint8)
            leaves[path] = Shards(values.shape, values.dtype, [((slice(0, len(values)),), values)])
            continue
        part = path if path not in parts_of else f"{path}, part {number}"
        tensors[part] = data
        parts_of.setdefault(path, (item, []))[1].append((part, index_of(item)))
    values_of_part = host_values(tensors)
    for path, (item, parts) in parts_of.items():
        dtype = values_of_part[parts[0][0]].dtype
        regions = [(index, values_of_part[part]) for part, index in parts if values_of_part[part].size]
        shard_shape = assignment.arrays[item.index.fqn][1]
        leaves[path] = Shards(item.tensor_data.size, dtype, regions, shard_shape=shard_shape)
    return leaves, documents


def _document(path: str, pickled: io.BytesIO) -> TreeDocument | None:
    """Return the document of a pickled value, or None if its type, size, depth or path requires a pickle."""
    if pickled.getbuffer().nbytes > _MAX_DOCUMENT_PICKLE:
        return None
    try:
        value = torch.load(io.BytesIO(pickled.getvalue()), weights_only=True)
        if not _is_plain(value, MAX_LEVELS - path.count("/") - 1):
            return None
        document, _ = flatten(value)
        scalars_in(nested_document({path: document}))  # raises if a path would be too long
    except Exception:  # a class that is not known to be safe, a planner with its own format
        return None
    return document


def _is_plain(value: Any, levels: int) -> bool:
    """Return whether a value is None, a Python scalar, or a list or tuple of such values."""
    if type(value) in (list, tuple):
        return levels > 0 and all(_is_plain(child, levels - 1) for child in value)
    return value is None or type(value) in SCALARS
