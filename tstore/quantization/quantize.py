"""Quantized copies of checkpoints: the float arrays of a version in eXmY formats, as a commit beside the source.

1. Every array gets its codecs by a rule for its path, or is left to its data: then a study of its values gives the
   size and the expected error in every format, and each array gets the smallest format that keeps an SQNR, or all
   together get the formats of the least error within a budget (`quantization.plan`).
2. The arrays are encoded, written, read back and measured (`quantization.encoding`): by this process, some at a
   time, or by the workers of an executor (`quantization.work`).
3. One commit refers to all of it and keeps the report. Arrays that stay as they are are referenced, not copied.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any, Literal

import exmy

from tstore.errors import AlreadyExists, InvalidArgument, SnapshotExpired, SourceCondemned
from tstore.format.arguments import checked_tag
from tstore.format.array_metadata import ArrayMeta
from tstore.format.chunk_refs import ChunkTable
from tstore.format.codecs import Codecs, as_configuration, is_exmy
from tstore.format.tree import OWN
from tstore.quantization.encoding import Encoded
from tstore.quantization.plan import WIDTHS, Plan, SourceArray, plan_by_rules, plan_for
from tstore.quantization.policy import DEFAULT, Bits, CodecRules, Default, MinSqnr, Rules, Target
from tstore.quantization.report import QuantizedArray, QuantizeReport, stored_form, stored_report
from tstore.quantization.request import describe_request
from tstore.quantization.work import Progress, Work
from tstore.snapshot import Snapshot
from tstore.steps import QUANTIZED, source_snapshot, steps_of
from tstore.storage.base import Durability
from tstore.store import Store, opened

__all__ = ["quantize", "quantize_report"]

_OVERTAKEN = 8
"""How many times to try when garbage collection removes the newest step during the work."""


async def quantize(
    where: str | os.PathLike[str] | Store,
    formats: CodecRules = None,
    *,
    min_sqnr: float | None = None,
    bits: float | None = None,
    error: Literal["absolute", "relative"] | None = None,
    at: int | str | None = None,
    tag: str | None = None,
    message: str = "",
    axis: int | None = None,
    block: int | Literal["auto"] | None = "auto",
    scale: Literal["search", "max", "none", "float"] = "search",
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Commit a copy of a version with its float arrays in low-bit formats, and return what it cost.

    The source stays as it is.

    `formats` is one eXmY format, or rules by path pattern, of which the first that matches counts; None keeps all
    bits. The data decides about arrays that no rule matches: with `min_sqnr` (dB) each of them gets the fewest
    bits that keep its SQNR, the ratio 10·log10(Σx² / Σ(x−y)²) of the values x and the decoded values y; with
    `bits` they get the formats with the least total error at that average of stored bits a value, over all arrays
    of the checkpoint (see `Bits` for `error`, "relative" by default). Without `formats`, `min_sqnr` and `bits`
    each array gets 8 bits a value: e2m5 in blocks.

    Integers, arrays of fewer than 64 values, and arrays with NaN or infinity keep their bits, and the report says
    why. One-dimensional arrays keep theirs unless the last part of a rule's pattern has more than wildcards
    ("**/bias" encodes them, "**" and "layers/*" do not).

    `axis`, `block` and `scale` set which values share an exponent offset, as in `exmy.quantize`. With block="auto"
    and no `axis`, an array that a rule matches has one offset, and one that the data decides has an offset for
    each block of 128 values along its last axis, or of 64 or 32 if 128 does not divide it, or else one offset.
    The codes are those of `exmy.quantize`. `at` is a version or tag, by default the newest step (without steps,
    the newest version that is not a quantized copy). `tag` names the new commit, by default the source's tag (or
    v<version>) followed by the formats; it can't name a step, which only `save` makes. The workers of `executor`
    (threads, processes, a Dask cluster's) read, encode and write; they must reach the store by its URL. Needs
    about 200 MiB of memory, or 100 MiB in each worker of an executor.
    If garbage collection removes the newest step meanwhile, the work is repeated with the step newest then.
    Raises `InvalidArgument` (a pattern without a match, a budget that can't be met), `AlreadyExists` (the tag),
    `NotFound`, `SnapshotExpired`, `StorageFull`; after an error nothing is committed.
    """
    tag = None if tag is None else checked_tag("tag", tag)
    if tag is not None and (named := steps_of([tag])):
        raise InvalidArgument(
            f"tag={tag!r} would make a lossy copy step {named[0]}; only save makes steps, so pass another name, "
            f"as 'quantized/{named[0]}'"
        )
    target: Target | Default | None = _target(min_sqnr, bits, error)
    if formats is None and target is None:
        target = DEFAULT
    rules = None if formats is None else Rules(formats)
    automatic = block == "auto" and axis is None and scale != "none"
    given: dict[str, Any] = {
        "axis": axis,
        "block": None if block == "auto" else block,
        "scale": None if scale == "search" else scale,
    }
    recipe = {key: value for key, value in given.items() if value is not None}
    _check_recipe(recipe)
    request = describe_request(formats, target, recipe, automatic=automatic)

    async def once(store: Store) -> QuantizeReport:
        source = await source_snapshot(store, at)
        nodes = source.tree.nodes
        arrays = {p: SourceArray(nodes[p].meta, int(nodes[p].chunks.length.sum())) for p in source.paths()}
        if rules is not None:
            rules.check(arrays)
        name = tag or _default_tag(source, formats, target)
        text = message or f"quantized from version {source.version}: {request}"
        async with store.transaction(text, name, metadata={QUANTIZED: source.version}) as tx:
            if name in (await tx.base()).tags:
                raise AlreadyExists(f"{store.url}: the tag {name!r} is taken; pass another one as tag=…")
            await tx.replace_all(b"")
            work = Work(store, source, tx.id, Durability.FSYNC, executor, progress)
            plan = plan_by_rules(arrays, rules, recipe, data=target is not None, automatic=automatic)
            if target is not None:
                studies = [] if target is DEFAULT else await work.study(plan.left, WIDTHS)
                plan = plan_for(target, plan, studies, arrays)
            encoded = {e.path: e for e in await work.encode(plan.choices)}
            rows = []
            for path, node in nodes.items():
                if node.is_array:
                    found = encoded.get(path)
                    rows.append(_row(path, arrays[path], plan, found))
                    if found is None or found.document is None:
                        await tx.keep_array(path, node.meta, node.chunks, source.version)
                    else:
                        chunks = ChunkTable.from_rows(found.rows).latest()
                        await tx.adopt_array(path, ArrayMeta.parse(found.document), chunks)
                elif path:
                    await tx.create_group(path, node.attributes)
            report = QuantizeReport(0, name, source.version, rows, request)
            attributes = {key: value for key, value in source.attributes().items() if key != OWN}
            await tx.describe(attributes, {**source.own_attributes(), "quantization": stored_form(report)})
        assert tx.version is not None
        return report._replace(version=tx.version)

    async with opened(where, "r+") as store:
        for _ in range(_OVERTAKEN):
            try:
                return await once(store)
            except (SnapshotExpired, SourceCondemned) as expired:
                if at is not None and isinstance(expired, SnapshotExpired):
                    raise  # else the next try tells that the version has expired
                overtaken = expired
        raise overtaken


async def quantize_report(where: str | os.PathLike[str] | Store, at: int | str | None = None) -> QuantizeReport:
    """The report that a quantized commit keeps; `NotFound` where the version or tag is no such commit."""
    async with opened(where, "r") as store:
        return stored_report(await store.snapshot(at))


def _check_recipe(recipe: Mapping[str, Any]) -> None:
    """Raise `InvalidArgument` for an axis, block or scale that no format of eXmY has."""
    try:
        exmy.ChunkCodec.of({"format": "e4m3", **recipe})
    except exmy.ExmyError as error:
        raise InvalidArgument(f"axis, block and scale of a quantization: {error!s:.300}") from None


def _target(
    min_sqnr: float | None, bits: float | None, error: Literal["absolute", "relative"] | None
) -> Target | None:
    if min_sqnr is not None and bits is not None:
        raise InvalidArgument("min_sqnr=… and bits=… exclude each other; pass one of them")
    if bits is not None:
        return Bits(bits) if error is None else Bits(bits, error)
    if error is not None:
        raise InvalidArgument(f"error={error!r} says what a budget keeps low; pass bits=… too")
    return None if min_sqnr is None else MinSqnr(min_sqnr)


def _default_tag(source: Snapshot, formats: CodecRules, target: Target | Default | None) -> str:
    names = [t for t, v in source.tags.items() if v == source.version] or [f"v{source.version}"]
    used = formats.values() if isinstance(formats, Mapping) and "format" not in formats else [formats]
    parts = [_named(u) for u in used if u is not None]
    match target:
        case MinSqnr(decibel):
            parts.append(f"{decibel:g}dB")
        case Bits(average, _):
            parts.append(f"{average:g}bits")
        case Default():
            parts.append("e2m5")
    return "/".join([names[0], "-".join(dict.fromkeys(parts)) or "copy"])


def _named(codecs: Codecs) -> str:
    if isinstance(codecs, Mapping):
        return str(codecs["format"])
    if isinstance(codecs, str):
        return codecs
    return str(as_configuration(codecs).get("format")) if is_exmy(codecs) else "custom"


def _row(path: str, given: SourceArray, plan: Plan, found: Encoded | None) -> QuantizedArray:
    """The report's line of an array."""
    before, values = given.size, given.meta.size
    if found is None or found.document is None:
        reason = plan.kept.get(path, "") if found is None else found.reason
        return QuantizedArray(path, None, "", reason, values, before, before)
    meta, exponents = ArrayMeta.parse(found.document), found.exponents
    codec, lost = meta.chain.packed, found.difference
    after = sum(row.length for row in found.rows)
    if codec is None or lost is None:
        return QuantizedArray(path, None, "", "", values, before, after)
    return QuantizedArray(
        path,
        codec.format.standard.name,
        codec.granularity,
        "",
        values,
        before,
        after,
        lost.signal,
        lost.noise,
        lost.largest_error,
        lost.largest_relative,
        found.clipped / values,
        None if exponents is None else (exponents.lowest, exponents.counts.tolist()),
    )
