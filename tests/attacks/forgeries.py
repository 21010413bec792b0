"""Forged metadata with valid checksums: references to missing objects, to itself, or to objects of others.

A forgery takes public knowledge of a store (`Known`) and returns a key and the bytes to store there.
"""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from tests.support.forging import placed_in, sealed
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.objects.encoding import decode
from tstore.core.format.objects.records import Collection, Record

__all__ = [
    "COLLECTIONS",
    "CONDEMNING",
    "FIELDS",
    "HEAVY",
    "OTHERS",
    "ROOTS",
    "Forgery",
    "Known",
    "array",
    "commit",
    "framed",
    "manifest",
    "record",
    "record_of",
]

_PLAIN = [{"name": "bytes", "configuration": {"endian": "little"}}]
_CHUNK = struct.pack("<8f", *range(8))
DOCUMENT = ArrayMeta.new((8,), "f4", (8,), codecs=_PLAIN).document
DEEP = msgspec.Raw(b"\x91" * 5_000 + b"\xc0")


class Known(NamedTuple):
    """What every reader of a store knows."""

    newest: int
    gc: int
    """The version of the newest garbage collection."""
    transactions: dict[int, str]
    objects: tuple[str, ...]
    """All keys."""
    expired: tuple[str, ...]
    folder: Path

    @staticmethod
    def of(folder: Path, expired: tuple[str, ...]) -> Known:
        """Read this from a store in a folder."""
        keys = tuple(sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()))
        records = [key for key in keys if key.startswith("commits/")]
        read = [decode((folder / key).read_bytes(), Record) for key in records]
        gcs = [number for number, record in enumerate(read, 1) if record.collection is not None]
        named = {number: record.transaction for number, record in enumerate(read, 1)}
        return Known(len(records), gcs[-1], named, keys, expired, folder)

    def first(self, part: str) -> str:
        """Return the first key that contains a text."""
        return next(key for key in self.objects if part in key)

    def read(self, key: str) -> bytes:
        """Return the bytes of an object."""
        return (self.folder / key).read_bytes()

    def collection(self) -> Collection:
        """Return the decisions of the newest garbage collection."""
        decided = decode(self.read(commit(self.gc)), Record).collection
        assert decided is not None
        return decided


Forgery = Callable[[Known], tuple[str, bytes]]


def commit(number: int) -> str:
    return f"commits/{number:020d}"


def root(number: int) -> str:
    return f"roots/{number:020d}"


def framed(kind: bytes, body: Any, version: int = 1) -> bytes:
    """Return a frame with a valid checksum; `body` is a value for msgpack, or packed bytes."""
    packed = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return sealed(kind + bytes([version]), packed)


def next_record(known: Known, body: Any, version: int = 1) -> tuple[str, bytes]:
    """Return the key and the frame of the record after those of a store."""
    number = known.newest + 1
    return commit(number), placed_in(known.folder, number, framed(b"R", body, version))


def manifest(**changes: Any) -> list[Any]:
    """Return the fields of a manifest of one small array, with changes."""
    fields: dict[str, Any] = {
        "packs": [""],
        "inline": [_CHUNK],
        "documents": [DOCUMENT],
        "paths": ["forged"],
        "document": struct.pack("<I", 0),
        "replaces_node": b"\1",
        "count": struct.pack("<Q", 1),
        "number": struct.pack("<Q", 0),
        "pack": struct.pack("<I", 0),
        "offset": struct.pack("<Q", 0),
        "length": struct.pack("<Q", len(_CHUNK)),
        "checks": xxhash.xxh3_128_digest(_CHUNK),
    }
    assert changes.keys() <= fields.keys()
    return ["manifest", *(fields | changes).values()]


def record(known: Known, **changes: Any) -> list[Any]:
    """Return the fields of a valid next record, with changes."""
    fields: dict[str, Any] = {
        "transaction": f"forged{known.newest}",
        "base": known.newest,
        "time": time.time(),
        "message": "",
        "tags": [],
        "replaces": False,
        "deleted": [],
        "manifests": [manifest()],
        "bytes_added": len(_CHUNK),
        "void": False,
        "metadata": {},
        "durable": True,
        "collected": known.gc,
        "reused": [],
        "collection": None,
        "parts": [],
        "dropped": [],
        "tagged": {},
    }
    assert changes.keys() <= fields.keys()
    return list((fields | changes).values())


def record_of(changes: Callable[[Known], dict[str, Any]]) -> Forgery:
    """Return the forgery of the next record with these changes."""

    def forge(known: Known) -> tuple[str, bytes]:
        changed = changes(known)
        retags = changed.get("dropped") or changed.get("tagged")
        version = 3 if retags else 2 if changed.get("collection") else 1
        return next_record(known, record(known, **changed), version)

    return forge


def array(**changes: Any) -> list[Any]:
    """Return a manifest of an array whose document has these changes."""
    fields = msgspec.json.decode(DOCUMENT) | changes
    return manifest(documents=[msgspec.json.encode(fields)])


def _small(number: int) -> bytes:
    return struct.pack("<Q", number)


def _pack(known: Known, key: str, offset: int, length: int, checks: bytes = b"\0" * 16) -> dict[str, Any]:
    """Return the fields of a record whose array is in a pack."""
    where = manifest(packs=[key], inline=[], offset=_small(offset), length=_small(length), checks=checks)
    return {"manifests": [where], "reused": [key]}


FIELDS: dict[str, Callable[[Known], dict[str, Any]]] = {
    # its references
    "a manifest that does not exist": lambda k: {"manifests": [["object", "txn/none/manifest", 100, b"\0" * 16]]},
    "a manifest of another length": lambda k: {
        "manifests": [["object", key := k.first("/manifest"), 7, k.read(key)[-16:]]]
    },
    "a manifest of another checksum": lambda k: {
        "manifests": [["object", key := k.first("/manifest"), len(k.read(key)), b"\1" * 16]]
    },
    "a pack as its manifest": lambda k: {
        "manifests": [["object", key := k.first("/pack"), len(k.read(key)), k.read(key)[-16:]]]
    },
    "a record as its manifest": lambda k: {
        "manifests": [["object", commit(2), len(k.read(commit(2))), k.read(commit(2))[-16:]]]
    },
    "the marker as its manifest": lambda k: {
        "manifests": [["object", "tstore.json", len(k.read("tstore.json")), k.read("tstore.json")[-16:]]]
    },
    "a path out as its manifest": lambda k: {"manifests": [["object", "txn/a/../../x", 9, b"\0" * 16]]},
    "a pack that does not exist": lambda k: _pack(k, "txn/none/pack-0-0", 0, 32),
    "a pack that a gc removed": lambda k: _pack(k, f"txn/{k.expired[0]}/pack-0-0", 0, 32),
    "beyond the end of a pack": lambda k: _pack(k, k.first("/pack"), 1 << 40, 32),
    "other bytes of a pack": lambda k: _pack(k, k.first("/pack"), 0, 32, xxhash.xxh3_128_digest(_CHUNK)),
    "2^61 bytes of a pack": lambda k: _pack(k, k.first("/pack"), 0, 1 << 61, b"\0" * 16),
    "the marker as its pack": lambda k: _pack(k, "tstore.json", 0, 32),
    "a pack that it does not list as reused": lambda k: _pack(k, k.first("/pack"), 0, 32) | {"reused": []},
    "an inline chunk of another checksum": lambda k: {"manifests": [manifest(checks=b"\2" * 16)]},
    "more rows than there are": lambda k: {"manifests": [manifest(count=_small(1 << 62))]},
    "a chunk outside the grid": lambda k: {"manifests": [manifest(number=_small(1 << 50))]},
    "a document that it does not hold": lambda k: {"manifests": [manifest(document=b"\xff\xff\0\0")]},
    "a chunk without bytes": lambda k: {
        "manifests": [manifest(inline=[b""], length=_small(0), checks=xxhash.xxh3_128_digest(b""))]
    },
    "the same manifest 1,000 times": lambda k: {"manifests": [manifest()] * 1000},
    # its arrays
    "a document that is invalid": lambda k: {"manifests": [manifest(documents=[b"{"])]},
    "a document that is empty": lambda k: {"manifests": [manifest(documents=[b""])]},
    "a document of another kind": lambda k: {"manifests": [manifest(documents=[b"[]"])]},
    "a deep document": lambda k: {"manifests": [manifest(documents=[b"[" * 100_000])]},
    "a deep attribute": lambda k: {"manifests": [array(attributes={"x": msgspec.Raw(b"[" * 2000 + b"]" * 2000)})]},
    "a shape of 2^70": lambda k: {"manifests": [array(shape=[1 << 70])]},
    "a shape below zero": lambda k: {"manifests": [array(shape=[-1])]},
    "a shape of text": lambda k: {"manifests": [array(shape="x")]},
    "a million dimensions": lambda k: {"manifests": [array(shape=[1] * 100_000)]},
    "a dtype that is unknown": lambda k: {"manifests": [array(data_type="object")]},
    "no codecs": lambda k: {"manifests": [array(codecs=[])]},
    "a fill value of text": lambda k: {"manifests": [array(fill_value="x")]},
    "a fill value of lists": lambda k: {"manifests": [array(fill_value=[[[]]])]},
    "attributes of tstore": lambda k: {"manifests": [array(attributes={"tstore": 5})]},
    "an empty path": lambda k: {"manifests": [manifest(paths=[""])]},
    "the path ..": lambda k: {"manifests": [manifest(paths=["../x"])]},
    "the path a//b": lambda k: {"manifests": [manifest(paths=["a//b"])]},
    "the path /": lambda k: {"manifests": [manifest(paths=["/"])]},
    "a path with NUL": lambda k: {"manifests": [manifest(paths=["a\0b"])]},
    "a path of 100,000 characters": lambda k: {"manifests": [manifest(paths=["a" * 100_000])]},
    "an array below an array": lambda k: {"manifests": [manifest(paths=["w/x"])]},
    # its own fields
    "the tag ''": lambda k: {"tags": [""]},
    "the tag of a line break": lambda k: {"tags": ["a\nb"]},
    "the tag step/": lambda k: {"tags": ["step/"]},
    "the tag step/007": lambda k: {"tags": ["step/007"]},
    "the tag of 10^5 digits": lambda k: {"tags": ["step/" + "9" * 100_000]},
    "the tag of a version": lambda k: {"tags": ["7"]},
    "a tag twice": lambda k: {"tags": ["x", "x"]},
    "a tag that it drops": lambda k: {"tags": ["x"], "dropped": ["x"]},
    "drops what is not a tag": lambda k: {"dropped": ["", "none", "a\nb"]},
    "tags itself as an earlier version": lambda k: {"tagged": {"x": k.newest + 1}},
    "tags version 0": lambda k: {"tagged": {"x": 0}},
    "tags a gc": lambda k: {"tagged": {"x": k.gc}},
    "tags an expired version": lambda k: {"tagged": {"x": 1}},
    "metrics that are a list": lambda k: {"metadata": {"metrics": [1, 2]}},
    "metrics that are text": lambda k: {"tags": ["step/77"], "metadata": {"metrics": {"loss": "low"}, "step": 77}},
    "metrics of 10^300": lambda k: {
        "tags": ["step/78"],
        "metadata": {"metrics": {"loss": 1e308, "": 1}, "step": 78},
    },
    "metadata that are deep": lambda k: {"metadata": {"x": DEEP}},
    "metadata with keys of numbers": lambda k: {"metadata": {5: 5}},
    "structure that is none": lambda k: {"tags": ["step/79"], "metadata": {"structure": 5, "step": "x"}},
    "a time of infinity": lambda k: {"time": float("inf")},
    "a time of NaN": lambda k: {"time": float("nan")},
    "a time beyond the calendar": lambda k: {"time": 1e300},
    "a time before it": lambda k: {"time": -1e12},
    "a base above itself": lambda k: {"base": k.newest + 1},
    "a base below zero": lambda k: {"base": -1},
    "itself as its gc": lambda k: {"collected": k.newest + 1},
    "no gc as its gc": lambda k: {"collected": k.newest},
    "nothing as its gc": lambda k: {"collected": 0},
    "a gc in the future": lambda k: {"collected": 1 << 61},
    "reuses the marker": lambda k: {"reused": ["tstore.json", commit(1), "latest"]},
    "reuses ''": lambda k: {"reused": ["", "..", "txn", "txn//x", "a\0b"]},
    "reuses what does not exist": lambda k: {"reused": ["txn/none/pack-0-0"]},
    "a transaction that is committed": lambda k: {"transaction": k.transactions[3]},
    "no transaction": lambda k: {"transaction": ""},
    "a path as its transaction": lambda k: {"transaction": "../../x"},
    "a transaction of 10^5 characters": lambda k: {"transaction": "a" * 100_000},
    "a void record with changes": lambda k: {"void": True, "tags": ["x"]},
    "parts of nobody": lambda k: {"parts": [["", float("nan"), "", [], -1, {}]]},
    "parts that are itself": lambda k: {"parts": [[f"forged{k.newest}", 0.0, "", [], 0, {}]] * 2},
    "parts that are committed": lambda k: {"parts": [[k.transactions[3], 0.0, "", ["x"], 0, {}]]},
    "deletes odd paths": lambda k: {"deleted": ["", "/", "..", "a//b"]},
    "bytes below zero": lambda k: {"bytes_added": -1},
    "a message of 1 MiB": lambda k: {"message": "x" * (1 << 20)},
    "a message of escapes": lambda k: {"message": "\x1b[2J\0\n"},
}
"""The faults of a record, with the fields that make them."""


def _alive(known: Known) -> list[Any]:
    """Return the ledger of the newest gc and later versions, as the record of the next gc has it."""
    old = [list(msgspec.to_builtins(entry)) for entry in known.collection().alive]
    for entry, kept in zip(old, known.collection().alive, strict=True):
        entry[:] = [getattr(kept, name) for name in kept.__struct_fields__]
    for number in range(known.gc + 1, known.newest + 1):
        made = decode(known.read(commit(number)), Record)
        if made.collection is None:
            metadata = made.metadata.get("metrics", {})
            old.append([number, made.transaction, made.time, made.tags, made.replaces, metadata, made.reused])
    return old


def _gc(known: Known, **changes: Any) -> dict[str, Any]:
    """Return the fields of the record of a gc that removes nothing, with changes."""
    fields: dict[str, Any] = {"alive": _alive(known), "expired": [], "tags": {}, "transactions": [], "objects": []}
    return {"manifests": [], "bytes_added": 0, "collection": list((fields | changes).values())}


def _expiring(known: Known, *versions: int) -> dict[str, Any]:
    """Return the fields of the record of a gc that expires versions and removes what they wrote."""
    alive = [entry for entry in _alive(known) if entry[0] not in versions]
    gone = [known.transactions[version] for version in versions]
    return _gc(known, alive=alive, expired=list(versions), transactions=gone)


COLLECTIONS: dict[str, Callable[[Known], dict[str, Any]]] = {
    "a gc of nothing": _gc,
    "a gc of versions 2 to 4": lambda k: _expiring(k, 2, 3, 4),
    "a gc of all versions": lambda k: _gc(k, alive=[], expired=list(range(2, k.newest + 1))),
    "a gc that forgets what lives": lambda k: _gc(k, alive=[]),
    "a gc of a living transaction": lambda k: _gc(k, transactions=[k.transactions[3]]),
}
"""Records of a gc that only an admin may create."""

CONDEMNING: dict[str, Callable[[Known], dict[str, Any]]] = {
    "a gc of the marker": lambda k: _gc(k, objects=["tstore.json"]),
    "a gc of records": lambda k: _gc(k, objects=[commit(1), commit(3), commit(k.newest)]),
    "a gc of the hint": lambda k: _gc(k, objects=["latest"]),
    "a gc of packs that are needed": lambda k: _gc(k, objects=[o for o in k.objects if "/pack-" in o]),
    "a gc of odd names": lambda k: _gc(
        k, objects=["", "..", "../x", "txn", "txn//x", "a\0b"], transactions=["", ".."]
    ),
    "a gc of versions that never were": lambda k: _gc(k, expired=[k.newest + 5, 1 << 60], tags={"x": 1 << 60}),
    "a gc with odd entries": lambda k: _gc(k, alive=[[1 << 60, "", float("nan"), [""], True, {"": 1}, [""]]]),
    "a gc with entries twice": lambda k: _gc(k, alive=_alive(k) * 2),
    "a gc whose gc is itself": lambda k: _gc(k) | {"collected": k.newest + 1},
    "a gc whose gc is none": lambda k: _gc(k) | {"collected": k.newest},
    "a gc that changes arrays": lambda k: _gc(k) | {"manifests": [manifest()]},
}
"""Records of a gc that nobody may create."""


def _root(known: Known, number: int, **changes: Any) -> bytes:
    """Return a root with false values that names the record of its number, if there is one."""
    check = known.read(commit(number))[-16:] if number <= known.newest else b"\0" * 16
    fields: dict[str, Any] = {"version": number, "record": check, "tags": {"step/1": 2}, "manifest": manifest()}
    return framed(b"T", list((fields | changes).values()))


@functools.cache
def _names() -> list[str]:
    return [f"{number:05x}" for number in range(1 << 20)]


def _many_metrics(known: Known, count: int) -> list[Any]:
    """Return the ledger of `_alive` with many metrics in its last version, which take 15 times their bytes."""
    *others, (version, transaction, moment, tags, replaces, _, holds) = _alive(known)
    return [
        *others,
        [version, transaction, moment, tags, replaces, dict.fromkeys(_names()[:count], 0), holds],
    ]


def _parts(count: int, values: int) -> list[Any]:
    """Return so many parts of a record, each with metadata of that many values."""
    return [[f"part{n}", 0.0, "", [], 0, {"x": [[]] * values}] for n in range(count)]


HEAVY: dict[str, tuple[int, Callable[[Known], dict[str, Any]]]] = {
    "8 gcs with 500,000 metrics": (8, lambda k: _gc(k, alive=_many_metrics(k, 500_000))),
    "32 gcs with 130,000 metrics": (32, lambda k: _gc(k, alive=_many_metrics(k, 130_000))),
    "8 gcs of 500,000 objects": (8, lambda k: _gc(k, objects=[f"txn/a/pack-{n}" for n in range(500_000)])),
    "2 gcs as long as may be": (2, lambda k: _gc(k, alive=_many_metrics(k, 1_048_000))),
    "a gc of 7,000,000 names": (
        1,
        lambda k: _gc(k, alive=[[n, "a", 0, [], False, {}, _names()] for n in range(1, 8)]),
    ),
    "100 records of 60,000 lists": (100, lambda k: {"manifests": [], "metadata": {"x": [[]] * 60_000}}),
    "24 records of 500,000 paths": (24, lambda k: {"manifests": [], "deleted": _names()[:500_000]}),
    "a record of 8,000,000 lists": (1, lambda k: {"manifests": [], "bytes_added": 0, "parts": _parts(1000, 8000)}),
}
"""Records that take much memory: the number of consecutive records, and the fields of each."""


ROOTS: dict[str, tuple[int, Forgery]] = {
    "a root of the future": (0, lambda k: (root(64), _root(k, 64))),
    "a root of a far future": (0, lambda k: (root(6400), _root(k, 6400))),
    "a root that names its record": (64, lambda k: (root(64), _root(k, 64))),
    "a root of deep tags": (64, lambda k: (root(64), _root(k, 64, tags=DEEP))),
    "a root of tags of nothing": (64, lambda k: (root(64), _root(k, 64, tags={"step/1": 10**12, "": 0}))),
    "a root of no multiple": (0, lambda k: (root(60), _root(k, 60))),
    "a root of zero": (0, lambda k: (root(0), _root(k, 64, version=0))),
}
"""Roots, and the version at which the store must be; the existing root of that version is removed first."""


def _fragment(known: Known, **changes: Any) -> tuple[str, bytes]:
    """Return the fragment of the absent host, with changes."""
    there = known.first("/part-")
    key = there.replace("/part-00001", "/part-00000")
    fields: dict[str, Any] = {
        "transaction": key.split("/")[1],
        "host": 0,
        "hosts": 2,
        "base": known.newest,
        "message": "",
        "tags": [],
        "replaces": False,
        "deleted": [],
        "manifest": manifest(),
        "bytes_added": 0,
        "structure": b"",
        "metadata": {},
        "durable": True,
    }
    return key, framed(b"F", list((fields | changes).values()))


def _others() -> Iterator[tuple[str, Forgery]]:
    yield "a record behind a gap", lambda k: (commit(k.newest + 2), framed(b"R", record(k)))
    yield "a record far ahead", lambda k: (commit(10**19), framed(b"R", record(k)))
    yield "a record of version 0", lambda k: (commit(0), framed(b"R", record(k)))
    yield "a record of a later format", lambda k: next_record(k, record(k), 9)
    yield "a root as a record", lambda k: (commit(k.newest + 1), _root(k, 64))
    yield (
        "a record of another checksum",
        lambda k: (commit(k.newest + 1), next_record(k, record(k))[1][:-1] + b"\0"),  # fmt: skip,
    )
    yield "a record with a tail", lambda k: next_record(k, msgspec.msgpack.encode(record(k)) + b"\xc0" * 9)
    yield "half a record", lambda k: next_record(k, msgspec.msgpack.encode(record(k))[:-9])
    yield "an empty record", lambda k: (commit(k.newest + 1), b"")
    yield "a hint far ahead", lambda k: ("latest", b"9999999999999999999")
    yield "a hint of zero", lambda k: ("latest", b"0")
    yield "a fragment of another transaction", lambda k: _fragment(k, transaction=k.transactions[3])
    yield "a fragment of another host", lambda k: _fragment(k, host=1)
    yield "a fragment of 10^12 hosts", lambda k: _fragment(k, hosts=10**12)
    yield "a fragment of a base below zero", lambda k: _fragment(k, base=-5)
    yield "a fragment of a base ahead", lambda k: _fragment(k, base=1 << 60)
    yield "a fragment of nothing", lambda k: _fragment(k, manifest=["object", "txn/none/manifest", 9, b"\0" * 16])
    yield "a fragment with odd tags", lambda k: _fragment(k, tags=["", "a\nb"])
    yield "a fragment with odd metadata", lambda k: _fragment(k, metadata={"metrics": [5], "x": DEEP})
    yield "a fragment with a deep structure", lambda k: _fragment(k, structure=b"[" * 100_000)
    yield "a heartbeat of the future", lambda k: (
        k.first("/part-").replace("/part-", "/alive-"), b'{"name":"half","time":1e308}'
    )  # fmt: skip
    yield "a heartbeat that is deep", lambda k: (k.first("/part-").replace("/part-", "/alive-"), b"[" * 4000)
    yield "a host that merges of 10^9", lambda k: ("txn/abc/merging-00000", b"9" * 10)


OTHERS: dict[str, Forgery] = dict(_others())
