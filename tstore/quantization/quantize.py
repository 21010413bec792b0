"""Quantized copies of checkpoints: the float arrays of a version in eXmY formats, as a commit beside the source.

1. A rule for an array's path determines its codecs or its target. The other arrays share one target, by default a
   budget of 8 bits per value. A study of the values estimates the size and the error in every format. Then each
   array gets the smallest format that reaches the target SQNR, or all arrays get the formats with the least total
   error within the budget (`plan`).
2. The arrays are encoded, measured and written (`encoding`): by this process, or by the workers of an executor
   (`work`).
3. Sizes of entropy-coded arrays are estimates. If what was stored exceeds a budget, the estimates are corrected,
   and the arrays whose codecs change are encoded again.
4. One commit contains the encoded arrays and the report. Chunks of unchanged arrays are referenced, not copied.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any, Literal, NamedTuple

import exmy
import numpy as np

from tstore.core.format.arguments import checked_function, checked_index, checked_tag, checked_text, quote
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.paths import is_at_or_below
from tstore.core.format.tree.tree import RESERVED_ATTRIBUTE
from tstore.core.hints import hinting
from tstore.core.snapshot import Snapshot, without_nodes
from tstore.core.steps import copy_snapshot, source_snapshot, steps_of
from tstore.core.storage.objects import Durability
from tstore.core.store import Store, opened
from tstore.core.transactions.transaction import Transaction
from tstore.errors import AlreadyExists, InvalidArgument, SnapshotExpired, SourceCondemned
from tstore.quantization.encoding import EncodedArray
from tstore.quantization.plan import (
    Plan,
    SourceArray,
    check_measurable,
    excess,
    plan_by_rules,
    with_importance,
)
from tstore.quantization.policy import Bits, QuantizeRules
from tstore.quantization.report import QuantizedArray, QuantizeReport, read_report, stored_document
from tstore.quantization.request import Request, checked_request
from tstore.quantization.sensitivity import Importance, Sensitivity, measured_importance, parsed_importance
from tstore.quantization.studied_plan import StudiedPlan
from tstore.quantization.values import MEMORY
from tstore.quantization.work import BatchWork, ProgressCallback

__all__ = ["quantize", "quantize_report"]

_ATTEMPTS = 8
"""The maximum number of attempts; an attempt fails if garbage collection removes its source meanwhile."""

_SHARES = (0.998, 0.9995, 0.998, 0.99, 0.99, 0.95, 0.85)
"""The shares of a budget that estimated sizes may fill, by attempt.

The first estimates are from samples; later ones are corrected by stored sizes. The last attempts are for arrays
whose size is a step function: arrays of integer values, for example, may have the same size for step sizes that
differ by up to 26 %.
"""


@hinting
async def quantize(
    store: str | os.PathLike[str] | Store,
    formats: QuantizeRules = None,
    *,
    min_sqnr: float | None = None,
    bits: float | None = None,
    error: Literal["absolute", "relative"] | None = None,
    coding: Literal["entropy", "packed"] | None = None,
    sensitivity: Sensitivity | None = None,
    at: int | str | None = None,
    subtree: str = "",
    tag: str | None = None,
    message: str = "",
    axis: int | None = None,
    block: int | Literal["auto"] | None = "auto",
    scale: Literal["search", "max", "none", "float", "e4m3", "6bit"] = "search",
    executor: Executor | None = None,
    memory: int = MEMORY,
    progress: ProgressCallback | None = None,
) -> QuantizeReport:
    """Commit a copy of a version with its float arrays in low-bit formats, and return a report of its errors.

    The source version and the head are unchanged: the copy is read by its tag or version, and garbage collection
    removes it with its source unless a rule of `Keep` says otherwise. The store must exist.

    Integers, arrays of fewer than 64 values, and arrays with NaN or infinity get no eXmY format, and the report
    says why. Nor do one-dimensional arrays, unless the last part of a rule's pattern has characters other than
    wildcards ("**/bias" encodes them, "**" and "layers/*" do not). The encoding is that of `exmy.quantize`.

    Parameters
    ----------
    formats
        One eXmY format, or rules: formats or targets by path pattern. The first pattern that matches an array
        applies; None leaves the array unchanged, and `Bits(3)`, `MinSqnr(30)`, {"bits": 3} or {"min_sqnr": 30} is
        a target for the arrays of the rule alone. Without `formats`, `min_sqnr` and `bits`, the arrays that can be
        encoded get 8 bits per value.
    min_sqnr
        Each array without a rule gets the fewest bits that reach this SQNR in dB: 10·log10(Σx² / Σ(x−y)²), where x
        are the values and y the decoded values. If rows or columns have an importance (`sensitivity`), it weights
        the squares.
    bits, error
        The arrays without a rule get the formats with the least total error whose stored size, averaged over all
        arrays of the checkpoint, is at most `bits` per value. The header of a chunk of packed codes, 8 to 19
        bytes, does not count. `error`, by default "relative", is described in `Bits`.
    coding
        How the formats chosen for a target are stored. "entropy": one step size per array, or one per row where
        the magnitudes of rows differ, and codes compressed by zstd; this has the least error at a given size, and
        reaches any average number of bits (an array of up to 4096 values may be packed, with one offset, if that
        takes fewer bytes). "packed": codes in the width of their format, with an offset per block; parts of a
        chunk can be read, and `restore(packed=True)` returns the codes. By default "packed" if `axis`, `block` or
        `scale` is passed, otherwise "entropy".
    sensitivity
        How much `bits` weights the relative error of each array: weights by path (1 for the others), or a
        function. A weight of shape (columns,) or (rows, 1) is the importance of each column or row, such as the
        mean square of a layer's inputs (the imatrix of llama.cpp). It weights the errors when steps, offsets and
        scales are chosen, even in a format that a rule names, and the report has the weighted SQNR beside the
        unweighted errors. A function takes a dict of the arrays by path, and returns the loss of the model. It is
        called once per array, with 10 % noise added to that array; the increase of the loss is its weight.
    at
        A version or tag; by default the newest step, or without steps the head. If garbage collection removes that
        version meanwhile, the newest one by then is quantized.
    subtree
        Copy only this path and what is below it, such as "model" in a training step; paths stay the same.
    tag
        The tag of the new commit, which must not name a step. By default, the source's tag (or v<version>) and
        the formats, such as "step/100/8bits".
    axis, block, scale
        Which values of a packed array share an exponent offset, as in `exmy.quantize`. By default (block="auto",
        no `axis`) an array with a format has one offset, or a float scale for each chunk. An array with a target
        has one per block of 128, 64 or 32 values along its last axis, the first of these sizes that divides the
        axis and its chunks; if none does, it has one offset.
    executor
        An executor of threads, processes or a Dask cluster, whose workers read, encode and write. They open the
        store by its URL.
    memory
        The size in bytes of the cache of values in this process, or in each worker (by default 256 MB), which
        saves reading them again; the result does not depend on it. Slabs and buffers take up to 200 MiB more on 4
        cores, and 400 MiB on 16 or more.
    progress
        Called with the number of bytes of values processed so far, and with the total.

    Raises
    ------
    `NotAStore`, `InvalidArgument` (a pattern without a match, a budget that can't be met), `AlreadyExists` (the
    tag), `Conflict`, `NotFound`, `SnapshotExpired`, `StorageFull`, `Unavailable` (also if the executor breaks).
    After an error other than `CommitOutcomeUnknown` nothing is committed.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> _ = tstore.save("memory://of-quantize", {"w": np.random.randn(256, 256)}, step=7)
    >>> report = tstore.quantize("memory://of-quantize", {"**": "e4m3"}, tag="small")
    >>> report.tag, report.arrays[0].format
    ('small', 'e4m3')
    >>> tstore.restore("memory://of-quantize", at="small")["w"].dtype
    dtype('float64')
    """
    tag, request = _checked_tag(tag), checked_request(formats, min_sqnr, bits, error, coding, axis, block, scale)
    message, memory = checked_text("message", message), checked_index("memory", memory)
    if memory < 0:
        raise InvalidArgument(f"memory={memory}: expected a number of bytes, or 0 to keep no values")
    if sensitivity is not None and not isinstance(sensitivity, Mapping) and not callable(sensitivity):
        raise InvalidArgument(f"sensitivity={quote(sensitivity)}: expected weights by path, or a function")
    if executor is not None and not hasattr(executor, "submit"):
        raise InvalidArgument(f"executor={quote(executor)}: expected a concurrent.futures.Executor")
    checked_function("progress", progress)
    subtree = checked_text("subtree", subtree)
    job = _Job(request, sensitivity, at, subtree, tag, message, executor, memory, progress)
    async with opened(store, "r+") as target:
        for _ in range(_ATTEMPTS):
            try:
                return await job.commit(target)
            except (SnapshotExpired, SourceCondemned) as failure:
                if at is not None and isinstance(failure, SnapshotExpired):
                    raise  # after SourceCondemned, the retry raises SnapshotExpired if the version has expired
                last = failure
        raise last


def _checked_tag(tag: str | None) -> str | None:
    """Return the tag; raise `InvalidArgument` if it is invalid or names a step."""
    if tag is None:
        return None
    if steps := steps_of([checked_tag("tag", tag)]):
        raise InvalidArgument(
            f"tag={tag!r} names a step, which a quantized copy is not; pass another name, such as "
            f"'quantized/{steps[0]}'"
        )
    return tag


class _Job(NamedTuple):
    """One call of `quantize`."""

    request: Request
    sensitivity: Sensitivity | None
    at: int | str | None
    subtree: str
    tag: str | None
    message: str
    executor: Executor | None
    memory: int
    progress: ProgressCallback | None

    async def commit(self, store: Store) -> QuantizeReport:
        """Resolve the source, quantize it and commit the copy."""
        source = await source_snapshot(store, self.at)
        await source.read_nodes()
        source = _part(source, self.subtree)
        nodes = source.tree.nodes
        arrays = {p: SourceArray(nodes[p].meta, nodes[p].stored_bytes) for p in source.paths()}
        if not arrays:
            where = f" at or below {quote(self.subtree)}; pass another subtree, or" if self.subtree else "; pass"
            raise InvalidArgument(
                f"{source.location} has no arrays to quantize{where} another version or tag as at=…"
            )
        if self.request.rules is not None:
            self.request.rules.check(arrays)
        name, description = self.tag or _default_tag(source, self.request), self.request.describe()
        message = self.message or f"quantized from version {source.version}: {description}"
        existing = (await store.tags()).get(name)
        if existing is not None:
            origin = (await store.log.reader.record(existing)).source
            if self.tag is not None or origin in (0, source.version):
                raise AlreadyExists(
                    f"{store.url}: the tag {name!r} already names version {existing}; pass another one as tag=…"
                )
        # a default tag moves from a copy of a version that this one replaced
        move = None if existing is None else name
        async with store.transaction(message, name if move is None else None, move_tag=move) as tx:
            staging = tx.staging
            await staging.replace_all(b"", source.version)  # no structure check: no other host takes part
            work = BatchWork(store, source, tx.id, Durability.FSYNC, self.executor, self.progress, self.memory)
            plan, encoded = await self._encode(work, arrays)
            encoded = await work.without_unused(encoded)
            await _stage(tx, source, encoded)
            rows = [_row(p, arrays[p], plan, encoded.get(p)) for p in nodes if p in arrays]
            report = QuantizeReport(0, name, source.version, rows, description)  # version 0 until the commit
            attributes = {key: value for key, value in source.attributes().items() if key != RESERVED_ATTRIBUTE}
            await staging.set_root_attributes(
                attributes, {**source.reserved_attributes(), "quantization": stored_document(report)}
            )
        assert tx.version is not None
        return report._replace(version=tx.version)

    async def _encode(
        self, work: BatchWork, arrays: Mapping[str, SourceArray]
    ) -> tuple[Plan, dict[str, EncodedArray]]:
        """Return the plan, and by path the results for the arrays that it encodes."""
        undecided = plan_by_rules(arrays, self.request)
        check_measurable(undecided, arrays)
        undecided = with_importance(undecided, await self._importance(work.source, arrays, undecided))
        studied = StudiedPlan(undecided, arrays, work.study)
        encoded: dict[str, EncodedArray] = {}
        plan = Plan({}, {}, [], {})
        for share in _SHARES:
            earlier, plan = plan.choices, await studied.decide(share)
            changed = {p: c for p, c in plan.choices.items() if p not in earlier or c.codecs != earlier[p].codecs}
            encoded = {p: e for p, e in encoded.items() if p in plan.choices}
            for each in await work.encode(changed, studied.profiles):
                encoded[each.path] = _if_smaller(each, plan.choices[each.path].min_sqnr, arrays[each.path])
            sizes = {p: sum(row.length for row in e.rows) for p, e in encoded.items() if e.document is not None}
            exceeded = excess(plan, arrays, sizes)
            if not exceeded:
                return plan, encoded
            studied.correct(plan, sizes)
        raise InvalidArgument(
            f"{exceeded}, since sizes of entropy-coded arrays differ too much from their estimates; allow more "
            "bits, or use coding='packed'"
        )

    async def _importance(
        self, source: Snapshot, arrays: Mapping[str, SourceArray], plan: Plan
    ) -> dict[str, Importance]:
        """Return the importance of arrays, as passed by the caller or measured by the loss."""
        if self.sensitivity is None:
            return {}
        weights: Mapping[str, Any] = self.sensitivity if isinstance(self.sensitivity, Mapping) else {}
        importance = parsed_importance(weights, {path: array.meta for path, array in arrays.items()})
        in_budgets = [p for each in plan.targeted if isinstance(each.target, Bits) for p in each.undecided]
        is_useless = not in_budgets if callable(self.sensitivity) else not plan.targeted
        if is_useless and not any(np.ndim(each) for each in weights.values()):
            raise InvalidArgument(
                "sensitivity: losses and numbers for arrays apply to budgets; pass bits=…, or a rule with a budget"
            )
        if isinstance(self.sensitivity, Mapping):
            return importance
        return await measured_importance(self.sensitivity, source, in_budgets)


def _part(source: Snapshot, subtree: str) -> Snapshot:
    """Return a snapshot with only a path, the groups above it, and what is below it."""
    paths = source.tree.nodes if subtree else ()
    return without_nodes(
        source, [path for path in paths if not is_at_or_below(path, subtree) and not is_at_or_below(subtree, path)]
    )


def _if_smaller(encoded: EncodedArray, min_sqnr: float, array: SourceArray) -> EncodedArray:
    """Return the encoded array, or the original one if encoding for a target SQNR did not make it smaller."""
    is_exempt = encoded.document is None or min_sqnr == -math.inf
    if is_exempt or sum(row.length for row in encoded.rows) < array.encoded_bytes:
        return encoded
    return EncodedArray.unreached(encoded.path, min_sqnr)


async def _stage(tx: Transaction, source: Snapshot, encoded: Mapping[str, EncodedArray]) -> None:
    """Stage the arrays and groups of the source, with the new metadata and chunks of the encoded arrays."""
    staging = tx.staging
    for path, node in source.tree.nodes.items():
        new = encoded.get(path)
        if node.is_array and new is not None and new.document is not None:
            chunks = ChunkTable.from_rows(new.rows).latest()
            await staging.adopt_array(path, ArrayMeta.parse(new.document), chunks)
        elif node.is_array:
            await staging.keep_array(path, node.meta, node.tables, source.version)
        elif path:
            await tx.create_group(path, node.attributes)


async def quantize_report(store: str | os.PathLike[str] | Store, at: int | str | None = None) -> QuantizeReport:
    """Return the report of a quantized copy, by default the newest; raise `NotFound` if the version is not one."""
    async with opened(store, "r") as source:
        return read_report(await copy_snapshot(source, at))


def _default_tag(source: Snapshot, request: Request) -> str:
    names = [tag for tag, version in source.tags.items() if version == source.version]
    return f"{names[0] if names else f'v{source.version}'}/{request.tag_suffix()}"


def _row(path: str, array: SourceArray, plan: Plan, encoded: EncodedArray | None) -> QuantizedArray:
    """Return the row of an array in the report."""
    before, values = array.encoded_bytes, array.meta.size
    if encoded is None or encoded.document is None:
        reason = plan.unchanged.get(path, "") if encoded is None else encoded.reason
        return QuantizedArray(path, None, "", reason, values, before, before)
    meta, difference = ArrayMeta.parse(encoded.document), encoded.difference
    codec = meta.chain.exmy_codec
    after = sum(row.length for row in encoded.rows)
    if codec is None or difference is None:
        return QuantizedArray(path, None, "", "", values, before, after)
    exponents, weight = encoded.exponents, plan.importance.get(path, Importance()).weight
    errors = difference.signal, difference.noise, difference.largest_error, difference.largest_relative
    clipped = encoded.clipped_count / values
    histogram = None if exponents is None else (exponents.lowest, exponents.counts.tolist())
    name, coding = codec.format.standard.name, "entropy" if len(meta.chain.documents) > 1 else "packed"
    has_scales = codec.scale in exmy.FLOAT_SCALES
    is_by_chunk = has_scales and codec.granularity == "tensor" and meta.chunk_count > 1
    granularity = "chunk" if is_by_chunk else codec.granularity
    weighted = None if encoded.weighted is None or not math.isfinite(encoded.sqnr) else encoded.sqnr
    return QuantizedArray(
        path, name, granularity, "", values, before, after, *errors, clipped, histogram, coding, weight, weighted
    )
