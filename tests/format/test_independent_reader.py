"""A reader written from the documents alone reads stores of every kind as tstore does, and refuses damage."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import tstore.sync as tstore
from tests.support import independent_reader, kinds_of_stores
from tests.support.independent_reader import Expired, Newer, Refused, Store
from tests.support.independent_reader.checkpoints import restore, step
from tests.support.kinds_of_stores import EXTENDED, KINDS, Pair, Point, flip
from tstore import PerHost
from tstore.errors import SnapshotExpired
from tstore.lab.simulation.scenario import override_constants


def same(a: Any, b: Any, ordered: bool = True) -> bool:
    """Return whether the reader's value `a` is that of tstore, bit for bit."""
    match b:
        case PerHost():
            return same(a, b.value, ordered)
        case Pair() | Point():
            return same(a, vars(b) if isinstance(b, Pair) else b._asdict(), ordered)
        case dict():
            keys = [(type(k), k) for k in a] == [(type(k), k) for k in b]
            return (keys if ordered else a.keys() == b.keys()) and all(same(a[k], b[k], ordered) for k in b)
        case list() | tuple():
            return (
                type(a) is type(b)
                and len(a) == len(b)
                and all(same(*each, ordered) for each in zip(a, b, strict=True))
            )
        case np.ndarray() | np.generic():
            a, b = np.asarray(a), np.asarray(b)
            if a.dtype == object:
                return a.shape == b.shape and bool(a.tolist() == b.tolist())
            if b.dtype.name in EXTENDED:
                b = b.astype(a.dtype) if "int" in b.dtype.name else b.view(a.dtype)
            return a.shape == b.shape and a.dtype == b.dtype.newbyteorder("<") and a.tobytes() == b.tobytes()
    return type(a) is type(b) and repr(a) == repr(b)


def check_numbers(reader: Store, tree: Any, path: str, codes: Any, values: Any) -> None:
    """Check what the reader makes of the bytes of floats that NumPy lacks."""
    ours = tree[path][0]["_array"].type.values(codes)
    with np.errstate(invalid="ignore"):
        theirs = values.astype("f8")
    assert np.array_equal(ours, theirs, equal_nan=True), path
    assert (np.signbit(ours) == np.signbit(theirs))[~np.isnan(ours)].all(), path


def compare(url: str, hosts: int = 1, **intervals: int) -> Store:
    """Compare all versions, tags, arrays and checkpoints that the reader and tstore read; return the reader."""
    reader = open_independently(url, intervals)
    with (
        override_constants(**intervals) if intervals else contextlib.nullcontext(),
        tstore.open(url, "r") as store,
    ):
        newest = store.snapshot().version
        assert reader.newest() == reader.probe() == newest
        assert reader.tags() == store.tags()
        messages = {c.transaction: c.message for c in store.history()}
        parts = [part for record in reader.versions() for part in record.parts or [record] if not record.void]
        assert {p.transaction: p.message for p in parts if p.transaction in messages} == messages
        for version in range(1, newest + 1):
            try:
                snapshot = store.snapshot(version)
            except SnapshotExpired:
                with pytest.raises(Expired):
                    reader.tree(version)
                continue
            tree = reader.tree(version)
            assert [p for p, (d, _) in tree.items() if d["node_type"] == "array"] == list(snapshot)
            assert (tree[""][0].get("attributes", {}) if "" in tree else {}) == snapshot.attributes()
            for path in snapshot:
                ours, theirs = reader.read(version, path, tree), snapshot.array(path).read()
                assert same(ours, theirs), (version, path)
                if theirs.dtype.name in EXTENDED and "int" not in theirs.dtype.name:
                    check_numbers(reader, tree, path, ours, theirs)
            attributes = snapshot.attributes().get("tstore", {})
            for host in range(hosts if "structure" in attributes else 0):
                several = {"host": host, "hosts": hosts} if hosts > 1 else {}
                theirs = tstore.restore(url, at=version, **several)
                ordered = Path(url).name != "other_arrays"
                assert same(restore(reader, version, host, hosts), theirs, ordered), version
        if steps := tstore.steps(store):
            assert step(reader) == step(reader, max(steps)) == store.tags()[f"step/{max(steps)}"]
    return reader


def open_independently(url: str, intervals: dict[str, int]) -> Store:
    return Store(url, intervals.get("ARCHIVE_EVERY", 512), intervals.get("ROOT_EVERY", 64))


FEATURES = {
    "history": {"archive", "collection", "dropped tag", "deletion", "root", "root with a parent"},
    "default_intervals": {"appended values", "root"},
    "segments": {"segments"},
    "short_segments": {"segments", "compaction"},
    "pages": {"pages", "separate manifest", "root with pages", "root with a base", "deletion"},
    "hosts": {"replaced tree"},
    "quantized": {"copy", "collection", "root after copies"},
    "one_record": {"parts"},
    "repaired": {"void", "lost commit", "root"},
}


def features(reader: Store) -> set[str]:
    found = set()
    for r in reader.versions():
        nodes = [] if reader.expired(r.version) else [n for nodes in reader.manifests(r) for n in nodes]
        references = [m for m in r.manifests if m[0] == "object"]
        found |= {
            *(["archive"] if not Path(reader.folder, "commits", f"{r.version:020}").exists() else []),
            *(["collection"] if r.alive is not None else []),
            *(["dropped tag"] if r.dropped else []),
            *(["deletion"] if r.deleted else []),
            *(["replaced tree"] if r.replaces else []),
            *(["copy"] if r.source else []),
            *(["parts"] if r.parts else []),
            *(["void"] if r.void else []),
            *(["lost commit"] if r.resumes else []),
            *(["separate manifest"] if references else []),
            *(["pages"] if any(len(m) > 5 and m[5] for m in references) else []),
            *(["appended values"] if any(flags & 2 for _, _, flags, _, _ in nodes) else []),
            *(["compaction"] if any(compaction for _, _, _, compaction, _ in nodes) else []),
            *(["segments"] if any(not isinstance(s, dict) for *_, runs in nodes for s in runs) else []),
        }
    for path in Path(reader.folder, "roots").glob("*"):
        root = reader.root(int(path.name))
        reader.root_nodes(root)
        found |= {
            "root",
            *(["root with a parent"] if root.parent else []),
            *(["root with pages"] if root.front else []),
            *(["root with a base"] if root.base is not None else []),
            *(["root after copies"] if root.copies else []),
        }
    return found


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_reads_what_tstore_reads(make: Callable[[str], dict[str, int] | None], tmp_path: Path) -> None:
    url = str(tmp_path / make.__name__)
    reader = compare(url, **(make(url) or {}))
    missing = FEATURES.get(make.__name__, set()) - features(reader)
    assert not missing


def test_imports_nothing_of_tstore() -> None:
    assert independent_reader.__file__ is not None
    allowed = {*sys.stdlib_module_names, "msgspec", "numcodecs", "numpy", "xxhash"}
    for path in Path(independent_reader.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                own = name.startswith(independent_reader.__name__)
                assert own or name.partition(".")[0] in allowed, (path.name, name)


def read_everything(url: Path) -> None:
    reader = Store(url, kinds_of_stores.ROOTS["ARCHIVE_EVERY"], kinds_of_stores.ROOTS["ROOT_EVERY"])
    for path in url.glob("roots/*"):
        reader.root_nodes(reader.root(int(path.name)))
    for record in reader.versions():
        reader.manifests(record)
        tree = reader.tree(record.version)
        for path, (document, _) in tree.items():
            if document["node_type"] == "array":
                reader.read(record.version, path, tree)


@pytest.fixture(scope="module")
def all_objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with objects of every kind, of which no version has expired."""
    url = tmp_path_factory.mktemp("all") / "store"
    with override_constants(
        **kinds_of_stores.ROOTS, MIN_SEGMENTED=4, SHORT_MANIFEST=1000, PAGE_BYTES=400, INLINE_MANIFEST_BYTES=900
    ):
        store = tstore.open(url)
        for i in range(20):
            with store.transaction() as tx:
                if i == 0:
                    for name in "abcde":
                        tx.create_array(name, (1000,), "i8", (100,)).write(0)
                else:
                    tx.array("abcde"[i % 5])[i * 40 :].write(i)
        store.collect()
        store.collect()
    read_everything(url)
    return url


@pytest.mark.parametrize(
    "objects", ["tstore.json", "commits/*", "archives/*", "roots/*", "txn/*/manifest*", "txn/*/pack-*"]
)
def test_refuses_flipped_bytes(objects: str, all_objects: Path) -> None:
    path = max(all_objects.glob(objects), key=lambda path: path.stat().st_size)
    data = path.read_bytes()
    uuid = data.find(b'"uuid"') + 10  # a changed key of the marker, even "checksum", is one that readers ignore
    for at in [uuid] if path.suffix else np.linspace(0, len(data) - 1, 4).astype(int).tolist():
        flip(path, at)
        with pytest.raises(Refused):
            read_everything(all_objects)
        flip(path, at)
    path.write_bytes(data[:-1])
    with pytest.raises(Refused):
        read_everything(all_objects)
    path.write_bytes(data)


def test_tells_newer_formats_from_damage(tmp_path: Path) -> None:
    with tstore.open(tmp_path).transaction() as tx:
        tx.create_array("a", data=np.arange(3))
    marker, record = tmp_path / "tstore.json", tmp_path / "commits" / f"{1:020}"
    before, body = marker.read_bytes(), bytearray(record.read_bytes()[:-16])
    body[7] = 9
    record.write_bytes(body + xxhash.xxh3_128_digest(body))
    with pytest.raises(Newer):
        Store(tmp_path).tree(1)
    marker.write_bytes(before.replace(b'"format":1', b'"format":2'))
    with pytest.raises(Newer):
        Store(tmp_path)
