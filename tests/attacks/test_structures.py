"""Structure documents written into a root group by another program: the checkpoint is restored or refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import tracemalloc
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

import tstore
from tests.support.collisions import equal_hashes
from tests.support.fuzzing import ABSURD, bounded_time, changed, fuzz, mutated, nested
from tests.support.thresholds import Thresholds
from tstore.checkpoint.structure import flatten, scalars_in, unflatten, unflatten_like
from tstore.convert.exporting import export_safetensors
from tstore.core.format.objects.documents import Document
from tstore.core.format.tree_document import is_document, paths_in, stored_document
from tstore.errors import Corrupt, InvalidArgument, TStoreError


class State(NamedTuple):
    mu: Any
    count: int


@dataclasses.dataclass
class Model:
    w: Any
    name: str


TREE = {
    "params": [np.ones(3), {"b": np.arange(4), 5: 1, "5": 2.5, b"x": None}, {"k": np.ones(2), "q": np.ones(1)}],
    "opt": State(np.zeros((2, 2)), 7),
    "model": Model(np.float32(1), "net"),
    "odd": (1j, True, "text", b"\xff", float("nan"), -(10**20), ()),
}
DOCUMENT, LEAVES = flatten(TREE)
VALUES = {path: np.asarray(leaf) for path, leaf in LEAVES.items()}
WORDS = [
    "array",
    "arrays",
    "scalar",
    "dict",
    "list",
    "tuple",
    "dataclass",
    "namedtuple",
    "none",
    "int",
    "float",
    "complex",
]
ODD: list[Any] = [*ABSURD, *WORDS, *LEAVES, "bool", "str", "bytes", "object", "__class__", "..", "a/b", "%"]
ODD += [["none"], ["list", []], ["dict", []], ["int", "5"], ["int", "9" * 5000], ["float", "0x1p99999"], ["tuple"]]
ODD += [["arrays", "params/2/", ["k", "k"]], ["arrays", "params/2/", []], ["arrays", "", ["zarr.json", 5]]]
ODD += [["array", "params/0"], ["scalar", "opt/0"], ["complex", "1 2 3"], ["bytes", "zz"], ["bool", "maybe"]]


def document(choice: random.Random) -> Any:
    """Return a mutated structure document, or None if it is not JSON any more."""
    value: Any = DOCUMENT
    if choice.random() < 0.1:
        try:
            return msgspec.json.decode(mutated(json.dumps(DOCUMENT).encode(), choice))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
    if choice.random() < 0.05:
        levels = choice.choice((100, 150, 190, 210, 300, 450))
        for _ in range(levels):
            value = choice.choice((["list", [value]], ["dict", [[["str", "k"], value]]], [value], {"a": value}))
        return value
    for _ in range(choice.choice((1, 1, 2, 5))):
        value = changed(value, choice, ODD)
    return value


def test_odd_structures() -> None:
    def attack(choice: random.Random) -> bool:
        stored = document(choice)
        paths = list(VALUES)
        structure = stored_document(stored, paths)
        if structure is None:
            try:
                there = list(paths_in(stored))
            except Exception:  # it is not a document
                return False
            structure = stored_document(stored, there)
            if structure is None or not set(there) <= VALUES.keys():
                return False
        tree = unflatten(structure, VALUES)
        repr(tree)
        some = {path: VALUES[path] for path in paths if choice.random() < 0.5}
        unflatten(structure, some)
        unflatten_like(TREE, some, scalars_in(structure))
        return True

    fuzz("structures", attack, 1500)


def test_odd_structures_in_a_store(tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        store = runner.run(tstore.open(f"memory://{uuid.uuid4()}"))
        runner.run(tstore.save(store, TREE, 1))
        snapshot = runner.run(store.snapshot())
        root = snapshot.tree.nodes[""]
        good = root.document

        def attack(choice: random.Random) -> bool:
            fields = json.loads(good)
            fields["attributes"]["tstore"]["structure"] = document(choice)
            root.metadata = Document(json.dumps(fields).encode("utf-8", "surrogatepass"))
            if choice.random() < 0.1:
                deep = b'"structure":' + nested(choice).encode() + b',"x":'
                root.metadata = Document(good.replace(b'"structure":', deep))
            out = tmp_path / str(uuid.uuid4())
            accepted = True
            for call in (
                lambda: tstore.restore(store, 1),
                lambda: tstore.restore(store, 1, target=TREE),
                lambda: tstore.restore(store, 1, only="params/**"),
                lambda: export_safetensors(store, out, step=1),
            ):
                try:
                    runner.run(call())
                except TStoreError:
                    accepted = False
            out.unlink(missing_ok=True)
            return accepted

        fuzz("structures in a store", attack, 150)


async def test_a_key_that_a_dict_has_twice() -> None:
    """Also if only a part of the tree is restored: its scalars are counted."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    await tstore.save(store, {"w": np.ones(2), "x": np.ones(2), "a": 1}, 1)
    root = (await store.snapshot()).tree.nodes[""]
    once = b'[["str","a"],["int","1"]]'
    assert root.document.count(once) == 1
    root.metadata = Document(root.document.replace(once, once + b"," + once))
    restored = await asyncio.wait_for(tstore.restore(store, 1, only=["w", "a"]), 30)
    assert restored["w"].tolist() == [1, 1]


def test_keys_that_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and complex numbers are hashed without a secret; NaNs are different keys with the same text."""
    monkeypatch.setattr("tstore.core.format.tree_document._MAX_SECONDS", 0.3)
    numbers = [["int", str(n)] for n in equal_hashes(40_000)]
    lines = [["complex", f"{float(-1_000_003 * n).hex()} {float(n).hex()}"] for n in range(1, 40_000)]
    for keys in (numbers, lines):
        document = ["dict", [[key, ["int", "1"]] for key in keys]]
        assert is_document(document)
        for visit in (scalars_in, lambda document: unflatten(document, {})):
            with bounded_time(15), pytest.raises(ValueError, match="numbers as keys of dicts collide"):
                visit(document)
    document = ["dict", [[["float", "nan"], ["none"]] for _ in range(40_000)] + [[["str", "a"], ["int", "1"]]]]
    with bounded_time(2), pytest.raises(ValueError, match="over 16 keys that are written nan"):
        scalars_in(document)
    with bounded_time(2), pytest.raises(InvalidArgument, match="over 16 keys that are written nan"):
        flatten({float("nan"): None for _ in range(40_000)})
    honest = {3**40 + 2**40 * i: i for i in range(100_000)} | {math.nan: 1, 5: 2, "5": 3, b"5": 4, 0.5: 5}
    assert repr(unflatten(flatten(honest)[0], {})) == repr(honest)


@pytest.mark.parametrize("levels", [201, 300, 490, 980])
def test_a_structure_deeper_than_any_tree_is_invalid(levels: int) -> None:
    structure: Any = ["array", "w"]
    for _ in range(levels):
        structure = ["list", [structure]]
    with bounded_time(2):
        assert stored_document(structure, ["w"]) is None


def test_a_short_structure_with_endless_paths_is_invalid() -> None:
    """A start of many characters stands before each of the keys; so 1 MB could mean terabytes of paths."""
    arrays = ["arrays", "k" * (1 << 20), [str(i) for i in range(1025)]]
    tracemalloc.start()
    for structure in (arrays, ["dict", [[["str", "a"], ["list", [["none"], arrays]]]]]):
        assert stored_document(structure, ["w"]) is None
        assert not is_document(structure)
    assert tracemalloc.get_traced_memory()[1] < 40 << 20
    tracemalloc.stop()


async def test_the_paths_of_scalars_are_bounded(monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds) -> None:
    """Nested dicts with long keys, or many scalars below one, have paths far longer than the document."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    deep: Any = 1
    for _ in range(199):
        deep = {"k" * 300: deep}
    many = {"k" * 4000: dict.fromkeys(range(10_000), 1)}
    thresholds(_MAX_PATHS=10 << 20)
    for tree, message in (
        (deep, "4,215 characters, more than 4,096"),
        (many, "more than 10,485,760 characters"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            await tstore.save(store, {"x": tree, "w": np.ones(3)}, 1)
        with monkeypatch.context() as patch:  # as another program could write it
            patch.setattr("tstore.checkpoint.structure._MAX_PATHS", 1 << 40)
            patch.setattr("tstore.checkpoint.structure.path_excess_message", lambda path: "")
            await tstore.save(store, {"x": tree, "w": np.ones(3)}, 1, overwrite=True)
        for target in (None, {"w": np.ones(3)}):
            tracemalloc.start()
            with pytest.raises(Corrupt, match="its structure does not have the format"):
                await tstore.restore(store, 1, target=target)
            assert tracemalloc.get_traced_memory()[1] < 40 << 20
            tracemalloc.stop()
