"""Restore a checkpoint, or parts of it, as a tree of arrays, or explain what a restore would read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, get_args

import exmy

from tstore.checkpoint.into import Into
from tstore.checkpoint.leaves import PackedShards, Shards
from tstore.checkpoint.mapped import Mapped
from tstore.checkpoint.reading import Reading, RestorePlan, map_leaves, unallocated
from tstore.checkpoint.request import Cast, Missing, PerHostRule, Request
from tstore.checkpoint.source import Source
from tstore.checkpoint.structure import unflatten_like
from tstore.core.array import Verify
from tstore.core.data.exmy_chunks import is_packed
from tstore.core.data.reader import new_values
from tstore.core.format.arguments import checked_choice
from tstore.core.hints import hinting
from tstore.core.log.expiry import guard_expiry
from tstore.core.runtime.pool import run
from tstore.core.snapshot import Snapshot
from tstore.core.steps import check_one_version, chosen_snapshot
from tstore.core.store import Store, opened
from tstore.errors import InvalidArgument, SnapshotExpired, parsing

__all__ = ["explain", "restore"]

_ATTEMPTS = 8
"""The number of attempts if garbage collection removes the newest step meanwhile."""


@hinting
async def restore(
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    target: Any = None,
    into: Any = None,
    only: str | list[str] | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: Cast = None,
    missing: Missing = "error",
    packed: bool = False,
    map: bool = False,
    verify: Verify = "first",
    per_host: PerHostRule = "same",
    host: int = 0,
    hosts: int = 1,
) -> Any:
    """Return the checkpoint of a step (by default the newest), or of a version or tag (`at`), as NumPy arrays.

    Only the chunks that are needed are read. If garbage collection removes the newest step during the read, the
    step that is newest by then is restored instead.

    Parameters
    ----------
    target
        The structure to return, with leaves that have `shape` and `dtype`, or `Shards` for a part of an array. It
        must fit the checkpoint: one `StructureMismatch` lists every path, shape and dtype that does not. Without a
        target, dataclasses and namedtuples become dicts.
    into
        A target whose NumPy arrays are filled and returned, whatever their strides and memory; `Shards`
        have an array for each part. Nothing is changed unless the checkpoint fits, all arrays are writable, and
        none share memory. If a read fails later, a note on the error lists the arrays that are partly filled.
    only
        A pattern such as "params/**", or a list of patterns: only arrays and Python scalars with a matching path
        are restored. The target's other leaves are returned unchanged.
    rename
        New paths, keyed by patterns of stored paths; the first match applies. A wildcard in a new path stands for
        what the same wildcard matched: {"net/**": "model/**"}, or {"**": "model/**"} for all. The other arguments
        refer to the new paths. Without a target, the result consists of nested dicts.
    dtype
        The dtype of restored float arrays: one dtype, "target" for the dtypes of the target, or a mapping from
        path patterns. By default nothing is cast.
    missing
        With "keep", leaves of the target that the checkpoint lacks are returned unchanged; by default they are a
        mismatch. With `into`, no other step is then restored if the newest is removed during the read.
    packed
        Return arrays in eXmY formats as `exmy.Quantized`, neither decoded nor cast, and those for which the
        target has `Shards` as `PackedShards`. Other arrays are returned as without `packed`, and so are 0-d ones.
        Codes that do not fit together (chunks or regions that cut rows or blocks with an offset of their own) are
        an `InvalidArgument` that names all these arrays.
    map
        Return a `Mapped`: the arrays by path, in read-only memory that is the system's cache of a local store,
        without a copy. Arrays that codecs encode, parts of others, and those of other storage are read.
    verify
        When mapped arrays are compared with their checksums: with "first", before each is first taken out of
        the `Mapped`, so that no changed bit goes unnoticed, and nothing is read that is not used; with "never",
        only by `Mapped.verified`.
    per_host
        What to restore for a saved `PerHost`. "same": the value of the host with the same number; the number of
        hosts must be the same. "keep": as "same", but the target's value if the number of hosts differs. "all": a
        list of the values of all hosts, on any number of hosts.
    host, hosts
        The number of this host, and the number of hosts, for `per_host`.

    Raises
    ------
    `NotAStore`, `NotFound`, `SnapshotExpired` (garbage collection removed the version), `Corrupt`,
    `StructureMismatch`, `InvalidArgument`.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> _ = tstore.save("memory://of-restore", {"w": np.arange(4.0), "b": np.zeros(2)}, step=7)
    >>> tstore.restore("memory://of-restore", only="w")
    {'w': array([0., 1., 2., 3.])}
    >>> target = {"w": np.empty(4, "float32"), "b": np.empty(2, "float32")}
    >>> tstore.restore("memory://of-restore", target=target, dtype="target")["w"].dtype
    dtype('float32')
    """
    check_one_version(step, at)
    request = Request(only, rename, dtype, missing, per_host, host, hosts)
    if into is not None and (target is not None or packed):
        raise InvalidArgument("into=… takes the place of target=…, and can't be filled with packed codes")
    checked_choice("verify", verify, get_args(Verify))
    if map and (into is not None or packed):
        raise InvalidArgument("map=True maps arrays as they are stored; omit into=… and packed=…")
    tree = Into(target, {}, target) if into is None else Into.of(into, request.selects)
    expired: SnapshotExpired | None = None
    mixes = into is not None and missing == "keep"  # what another step lacks would keep values of this one
    async with opened(store, "r") as opened_store:
        for _ in range(1 if step is not None or at is not None or mixes else _ATTEMPTS):
            try:
                snapshot = await chosen_snapshot(opened_store, step, at)
                if map:
                    return await _map_snapshot(snapshot, target, request, verify)
                return await _restore_snapshot(snapshot, tree, request, packed)
            except SnapshotExpired as error:
                expired = error
            except BaseException as error:
                for note in getattr(expired, "__notes__", ()):  # the arrays that an earlier attempt changed
                    error.add_note(note)
                raise
        assert expired is not None
        raise expired


@hinting
async def explain(
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    target: Any = None,
    only: str | list[str] | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: Cast = None,
    missing: Missing = "error",
    map: bool = False,
    per_host: PerHostRule = "same",
    host: int = 0,
    hosts: int = 1,
) -> RestorePlan:
    """Return what `restore` with the same arguments would read, without reading any chunk.

    Raise what `restore` raises, except `Corrupt` for damaged chunks.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> _ = tstore.save("memory://of-explain", {"w": np.ones((256, 256)), "b": np.zeros(2)}, step=7)
    >>> tstore.explain("memory://of-explain", only="w").arrays
    {'w': 524288}
    """
    check_one_version(step, at)
    request = Request(only, rename, dtype, missing, per_host, host, hosts)
    async with opened(store, "r") as opened_store:
        snapshot = await chosen_snapshot(opened_store, step, at)
        source = await Source.read(snapshot, request)
        reading = Reading(source, request, unallocated)
        leaves = source.leaves(target, request)
        mapped, copied = await map_leaves(source, request, leaves) if map else ({}, {})
        for path, leaf in leaves.items():
            if path not in mapped:
                reading.add(path, leaf)
        plan = await guard_expiry(opened_store.log.reader, snapshot.version, run(reading.plan))
        return plan._replace(copied=copied)


async def _map_snapshot(snapshot: Snapshot, target: Any, request: Request, verify: Verify) -> Mapped:
    """Map the arrays that a request selects, and read those that can't be mapped."""
    source = await Source.read(snapshot, request)
    leaves = source.leaves(target, request)
    mapped, copied = await map_leaves(source, request, leaves)
    reading = Reading(source, request, new_values)
    for path in copied:
        reading.add(path, leaves[path])
    paths = dict.fromkeys(source.places.get(path, path) for path in leaves) if source.places else leaves
    arrays = dict.fromkeys(paths) | await reading.read()  # in the order of the tree

    async def built(arrays: Mapping[str, Any]) -> Any:
        return await _built(source, target, arrays)

    return Mapped(snapshot.location, arrays, mapped, copied, verify, built)


async def _built(source: Source, target: Any, arrays: Mapping[str, Any]) -> Any:
    """Return the structure of a target, or without one that of the checkpoint, with these arrays."""
    if target is None:
        return await source.tree(arrays)
    with parsing(f"{source.snapshot.location}: its structure"):
        return unflatten_like(target, arrays, source.scalars)


async def _restore_snapshot(snapshot: Snapshot, into: Into, request: Request, packed: bool) -> Any:
    source = await Source.read(snapshot, request)
    reading = Reading(source, request, new_values)
    quantized: dict[str, Any] = {}  # the target's leaves at the paths of arrays to return as codes
    for path, leaf in source.leaves(into.target, request).items():
        if packed and (meta := source.node(path).meta).shape and is_packed(meta):
            quantized[path] = leaf
        else:
            reading.add(path, leaf)
    codes = await _packed_arrays(source, quantized) if quantized else {}
    arrays = codes | await reading.read()
    arrays |= {path: into.leaves[path] for path in arrays.keys() & into.leaves.keys()}
    return await _built(source, into.tree, arrays)


async def _packed_arrays(source: Source, leaves: Mapping[str, Any]) -> dict[str, exmy.Quantized | PackedShards]:
    """Return the codes of arrays in eXmY formats, or of the regions of `Shards`, by path."""
    shapes = {path: source.node(path).meta.shape for path in leaves}
    indices = {
        path: leaf.layout.indices if isinstance(leaf, Shards) else [tuple(slice(0, n) for n in shapes[path])]
        for path, leaf in leaves.items()
    }
    regions = [(source.stored[path], index) for path in leaves for index in indices[path]]
    codes = iter(await source.snapshot.read_packed_regions(regions))
    arrays: dict[str, exmy.Quantized | PackedShards] = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, Shards):
            parts = [(index, next(codes)) for index in indices[path]]
            arrays[path] = PackedShards(leaf.shape, leaf.dtype, parts)
        else:
            arrays[path] = next(codes)
    return arrays
