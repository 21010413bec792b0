"""Long metadata documents that thousands of nodes share: each is parsed and compared once, not for each node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import tstore
from tests.support.forging import placed_in
from tests.support.fuzzing import bounded_time
from tstore.core.format.arrays import array_metadata
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.layout import commit_key
from tstore.core.format.objects.encoding import decode, encode
from tstore.core.format.objects.object_ref import reference
from tstore.core.format.objects.records import Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree.tree import Tree
from tstore.core.format.tree.validation import next_tree, run_steps
from tstore.core.maintenance.contents import listing
from tstore.errors import Corrupt, UnsupportedFormat

NODES, LISTS = 3000, 40_000  # to parse the document takes about 20 ms
SECONDS = 15
GROUP: dict[str, Any] = {"zarr_format": 3, "node_type": "group"}
ARRAY: dict[str, Any] = msgspec.json.decode(ArrayMeta.new((8,), "f4", (8,)).document)
KINDS = {"groups": GROUP, "arrays": ARRAY}
LONG = {"x": [[]] * LISTS}


def long(fields: dict[str, Any], mark: int = 0) -> bytes:
    return msgspec.json.encode({**fields, "attributes": {**LONG, "mark": mark}})


def nodes_of(document: bytes, replaces_node: bool = True) -> Manifest:
    made = Manifest.from_nodes([(f"n{i}", document, replaces_node, ()) for i in range(NODES)])
    return decode(encode(made), Manifest)


def after(tree: Tree, manifest: Manifest) -> Tree:
    record = Record(f"forged{tree.version}", tree.version, 1.0, manifests=(manifest,))
    return run_steps(next_tree(tree.version + 1, record, [manifest], tree))


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_document_is_validated_once(kind: str) -> None:
    document = long(KINDS[kind])
    with bounded_time(SECONDS):
        tree = after(Tree.empty(), nodes_of(document))
        tree = after(tree, nodes_of(document, replaces_node=False))
        other = Tree.from_root(tree.root(b"x" * 16).root)
        assert tree.differences(other, nodes=True) == []
        if kind == "arrays":
            assert len({id(node.meta) for node in tree.nodes.values()}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_many_documents_that_nodes_take_in_turn(kind: str) -> None:
    """No cache of the newest ones would help."""
    documents = [msgspec.json.encode({**KINDS[kind], "attributes": {"n": i, **LONG}}) for i in range(20)]
    with bounded_time(SECONDS):
        shared = Manifest.from_nodes([(f"n{i}", documents[i % 20], True, ()) for i in range(NODES)])
        tree = after(Tree.empty(), decode(encode(shared), Manifest))
        for node in tree.nodes.values():
            assert node.is_array == (kind == "arrays")
            assert not node.is_array or node.meta.shape == (8,)


@pytest.mark.parametrize("kind", KINDS)
async def test_clients_read_a_store_of_shared_documents(kind: str, tmp_path: Path) -> None:
    for version, mark in ((1, 0), (2, 1)):
        data = encode(nodes_of(long(KINDS[kind], mark)))
        key = f"txn/forged{version}/manifest-0"
        record = Record(f"forged{version}", version - 1, 1.0, manifests=(reference(key, data),))
        if version == 1:
            await (await tstore.open(tmp_path, "x")).close()
        (tmp_path / key).parent.mkdir(parents=True)
        (tmp_path / key).write_bytes(data)
        (tmp_path / commit_key(version)).parent.mkdir(exist_ok=True)
        (tmp_path / commit_key(version)).write_bytes(placed_in(tmp_path, version, encode(record)))
    async with await tstore.open(tmp_path, "r") as store:
        with bounded_time(SECONDS):
            assert (await store.verify()).ok
            assert len(listing(await store.snapshot()).arrays) == (NODES if kind == "arrays" else 0)
            changed = await store.diff(1, 2)
            assert len(changed.arrays if kind == "arrays" else changed.groups) == NODES


@pytest.mark.parametrize("kind", KINDS)
async def test_an_invalid_shared_document_is_parsed_once(kind: str) -> None:
    document = msgspec.json.encode(
        {**KINDS[kind], "codecs": [], "attributes": msgspec.Raw(b"[[]" + b",[]" * LISTS + b"]")}
    )
    nodes = nodes_of(document)
    with bounded_time(SECONDS), pytest.raises((Corrupt, UnsupportedFormat), match=r"^n0: "):
        after(Tree.empty(), nodes)
    with bounded_time(SECONDS):
        for _, metadata, _, _ in nodes.nodes():
            with pytest.raises((Corrupt, UnsupportedFormat)):
                _ = metadata.meta if metadata.is_array else metadata.check_group()


def test_what_is_cached_of_documents_is_bounded() -> None:
    """The attributes are not kept, nor is the metadata of long documents."""
    before = array_metadata.short_meta.cache_info().currsize
    assert ArrayMeta.parse(long(ARRAY)).attributes["x"] == [[]] * LISTS
    assert array_metadata.short_meta.cache_info().currsize == before
    short = ArrayMeta.parse(msgspec.json.encode({**ARRAY, "attributes": {"x": [[]] * 300}}))
    assert not any(isinstance(value, dict) for value in vars(short).values())


def test_long_codecs_are_refused() -> None:
    codecs = [{"name": "bytes", "configuration": {"endian": "little", "x": [[]] * LISTS}}]
    with pytest.raises(UnsupportedFormat, match="codecs of more than 2048 bytes"):
        ArrayMeta.parse(msgspec.json.encode({**ARRAY, "codecs": codecs}))
