"""Restoring parts of a large checkpoint: equal to the same parts of all of it, at the cost of what is read."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tstore
from tests.support.counted_reads import count_reads
from tests.support.thresholds import Thresholds
from tstore.checkpoint import source
from tstore.checkpoint.request import Request
from tstore.checkpoint.source import Source
from tstore.core.format.objects import pages
from tstore.core.format.patterns import compile_patterns, extent_of
from tstore.core.format.tree_parts import part_of
from tstore.errors import NotFound
from tstore.sharding import Mesh, P

NAMES = st.sampled_from(["a", "b", "ab", "a0", "5", "array", "é", "a b", "%", "x/y", "Ω"])
KEYS = NAMES | st.sampled_from([5, 5.0, True, b"a", ""])
SCALARS = st.sampled_from([1, 0.5, "array", "a/b", None, True, b"w"])
ARRAYS = st.integers(0, 99).map(lambda n: np.array([n]))
TREES: st.SearchStrategy[Any] = st.recursive(
    ARRAYS | SCALARS | ARRAYS.map(lambda a: a[0]),
    lambda node: (
        st.dictionaries(NAMES, node, max_size=5)
        | st.dictionaries(NAMES, ARRAYS, min_size=1, max_size=5)
        | st.dictionaries(KEYS, node, max_size=4)
        | st.lists(node, max_size=3)
        | st.lists(node, max_size=3).map(tuple)
    ),
    max_leaves=24,
)
GLOBS = st.lists(
    st.lists(NAMES | st.sampled_from(["*", "**", "a*", "0", "1", "?"]), min_size=1, max_size=4).map("/".join),
    min_size=1,
    max_size=2,
)


class Empty(NamedTuple):
    """A state without values, as `optax.EmptyState`."""


@pytest.fixture
def short_pages(thresholds: Thresholds) -> None:
    thresholds(PAGE_BYTES=4000, SHORT_MANIFEST=4000)


@pytest.fixture(scope="module")
def any_part() -> Iterator[None]:
    """Cut out parts however large they are: those of the tests are most of their structures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tstore.core.format.tree_parts.LARGEST_SHARE", 100)
        patch.setattr(pages, "PAGE_BYTES", 300)
        patch.setattr(pages, "SHORT_MANIFEST", 300)
        yield


async def outcome(url: str, only: list[str], target: Any = None) -> Any:
    """Return what a restore returns, as text, or its error."""
    try:
        return repr(await tstore.restore(url, only=only, target=target, missing="keep"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# ---- equal to the whole


@pytest.mark.usefixtures("any_part")
@given(tree=TREES, other=TREES, only=GLOBS)
async def test_a_part_is_restored_as_from_the_whole_structure(tree: Any, other: Any, only: list[str]) -> None:
    url = f"memory://{uuid.uuid4()}"
    await tstore.save(url, {"top": tree, "a": other}, 1)
    part = [await outcome(url, only), await outcome(url, only, {"top": tree, "a": other})]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "part_of", lambda *arguments: None)
        assert part == [await outcome(url, only), await outcome(url, only, {"top": tree, "a": other})]


@pytest.mark.usefixtures("any_part")
@given(tree=TREES, changes=st.lists(st.tuples(st.booleans(), NAMES, NAMES), max_size=4), only=GLOBS)
async def test_later_changes_count_as_if_all_metadata_was_read(
    tree: Any, changes: list[tuple[bool, str, str]], only: list[str]
) -> None:
    url = f"memory://{uuid.uuid4()}"
    await tstore.save(url, {"a": tree, "b": {"a": np.ones(1), "lr": 0.5}, "ab": {"n": 5}, "5": 5}, 1)
    store = await tstore.open(url)
    for creates, *names in changes:
        path = "/".join(name.replace("/", "") for name in names if name != "%")
        async with store.transaction() as tx:
            try:
                if creates:
                    await (await tx.create_array(path, (1,), "i8")).write(1)
                else:
                    await tx.delete(path)
            except tstore.errors.TStoreError:
                pass
    snapshot, request = await store.snapshot(), Request(only, None, None, "error")
    part = await Source.read(snapshot, request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "part_of", lambda *arguments: None)
        whole = await Source.read(snapshot, request)
    assert part.scalars == whole.scalars
    assert set(filter(request.matches, part.stored)) == set(filter(request.matches, whole.stored))


@given(only=GLOBS, paths=st.lists(st.lists(NAMES, min_size=1, max_size=4).map("/".join), max_size=20))
def test_all_matches_of_globs_are_in_their_extent(only: list[str], paths: list[str]) -> None:
    matches, extent = compile_patterns(only), extent_of(only)
    assert all(path in extent for path in paths if matches(path))


def test_the_last_character_of_unicode_begins_a_pattern() -> None:
    assert extent_of("\U0010ffff*").starts == ("",)
    assert extent_of("a\U0010ffff*").starts == ("a",)


@pytest.mark.parametrize(
    "structure",
    [
        *(b"", b"null", b"[", b"[]", b'["dict",5]', b'["dict",[5]]', b'["dict",[[["str","a"]]]]'),
        *(b'["arrays","a",[5]]', b'["list",' * 3000 + b'["none"]' + b"]" * 3000),
        b'["dict",[[["str","\\u0061"],["array","a"]]]]',
    ],
)
def test_no_part_of_an_invalid_structure_is_used(structure: bytes) -> None:
    assert part_of(structure, extent_of("a")) is None


# ---- at the cost of the part


async def test_a_group_of_many_costs_what_the_group_costs(
    tmp_path: Path, short_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {f"g{g:03}": {f"a{a}": np.full(4, 10 * g + a) for a in range(10)} for g in range(300)}
    await tstore.save(str(tmp_path), tree | {"n": 5}, 1)
    sizes = count_reads(monkeypatch)
    everything = await tstore.restore(str(tmp_path))
    whole = sum(sizes)
    sizes.clear()
    part = await tstore.restore(str(tmp_path), only="g123/**")
    assert [part["g123"][f"a{a}"].tolist() for a in range(10)] == [[1230 + a] * 4 for a in range(10)]
    assert list(part) == ["g123"]
    structure = 30_000  # of all arrays; it is an attribute of the root group
    assert sum(sizes) < structure + 2 * 4000 + 2000 < whole / 8
    assert len(sizes) <= 10
    sizes.clear()
    target = {"g123": {f"a{a}": np.zeros(4, "i8") for a in range(10)}, "n": 0}
    again = await tstore.restore(str(tmp_path), only=["g123/**", "n"], target=target)
    assert (again["g123"]["a7"].tolist(), again["n"]) == ([1237] * 4, 5)
    assert sum(sizes) < structure + 2 * 4000 + 2000
    with pytest.raises(NotFound, match="'g123' selects no arrays, but groups"):  # advice needs all paths
        await tstore.restore(str(tmp_path), only="g123")
    assert everything["n"] == 5


async def test_a_group_whose_name_begins_others_costs_what_the_group_costs(
    tmp_path: Path, short_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {str(g): {f"a{a}": np.full(4, 10 * g + a) for a in range(10)} for g in range(300)}
    await tstore.save(str(tmp_path), {"layers": layers}, 1)  # "layers/1", but also "layers/10" and "layers/100"
    sizes = count_reads(monkeypatch)
    part = await tstore.restore(str(tmp_path), only="layers/1/**")
    assert [part["layers"]["1"][f"a{a}"].tolist() for a in range(10)] == [[10 + a] * 4 for a in range(10)]
    assert list(part["layers"]) == ["1"]
    assert sum(sizes) < 30_000 + 2 * 4000 + 2000  # as in the test above


async def test_shards_read_the_segments_of_their_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds
) -> None:
    thresholds(SEGMENT_ROWS=1000)
    rows = 1 << 16
    async with await tstore.open(str(tmp_path)) as store, store.transaction(tag="step/1") as tx:
        w = await tx.create_array("w", (rows, 2), "i8", chunks=(1, 2))
        await w.write(np.arange(2 * rows).reshape(rows, 2))
    sizes = count_reads(monkeypatch)
    target = {"w": tstore.Shards.wanted((rows, 2), np.dtype("i8"), Mesh({"x": 64}), P("x"), host=17)}
    [(index, values)] = (await tstore.restore(str(tmp_path), target=target))["w"].parts
    assert values.tolist() == np.arange(2 * rows).reshape(rows, 2)[index].tolist()
    manifest = sum(file.stat().st_size for file in tmp_path.glob("txn/*/*")) - 16 * rows
    assert sum(sizes) < 16 * rows / 64 + manifest / 8


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("epoch", {"epoch": 3}),
        (["epoch", "w"], {"w": 1.0, "epoch": 3}),
        ("pair/**", {"pair": (2.0, 5)}),
        ("layers/1/*", {"layers": [None, {"n": 8, "w": 4.0}]}),
        (["state/**", "bias"], {"bias": None, "state": ({}, None, {"a": [], "w": 5.0})}),
        ("state/0", {"state": ({}, None, None)}),
        (["state/2/w", "*"], {"w": 1.0, "epoch": 3, "bias": None, "state": (None, None, {"w": 5.0})}),
        (
            "**",
            {
                "w": 1.0,
                "epoch": 3,
                "pair": (2.0, 5),
                "layers": [{"n": 7, "w": 3.0}, {"n": 8, "w": 4.0}],
                "bias": None,
                "state": ({}, None, {"a": [], "w": 5.0}),
            },
        ),
    ],
)
@pytest.mark.parametrize("per_host", [{}, {"rng": tstore.PerHost({"seed": 1})}])
async def test_python_scalars_none_and_empty_containers_are_selected_as_arrays_are(
    only: Any, expected: Any, per_host: dict[str, Any]
) -> None:
    """Whatever else is in the tree, also a value of each host, which no array is."""
    state = (Empty(), None, {"a": [], "w": np.array([5.0])})
    url = f"memory://{uuid.uuid4()}"
    layers = [{"n": 7, "w": np.array([3.0])}, {"n": 8, "w": np.array([4.0])}]
    tree = {"w": np.array([1.0]), "epoch": 3, "pair": (np.array([2.0]), 5), "layers": layers}
    tree |= {"bias": None, "state": state}
    await tstore.save(url, tree | per_host, step=1)
    restored = await tstore.restore(url, only=only)
    restored.pop("rng", None)
    assert restored == expected
