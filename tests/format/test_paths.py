"""The rules of paths, checked for all paths at once, equal those stated for one path or two."""

from __future__ import annotations

import contextlib
import random

import pytest

from tests.support.fuzzing import bounded_time
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.objects.records import Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.wellformed import check_paths
from tstore.core.format.paths import checked_path, is_at_or_below
from tstore.core.format.tree.tree import Tree, group_document
from tstore.core.format.tree.validation import next_tree, run_steps
from tstore.errors import Corrupt, InvalidArgument

NAMES = ["a", "b", "a.", "a-b", "aa", "é", "a b"]  # some sort before "/", some after
ARRAY, GROUP = ArrayMeta.new((8,), "f4", (8,)).document, group_document({})


def path(choice: random.Random) -> str:
    return "/".join(choice.choices(NAMES, k=choice.choice((1, 1, 2, 3, 4))))


def after(tree: Tree, nodes: dict[str, bytes], deleted: tuple[str, ...] = ()) -> Tree:
    manifest = Manifest.from_nodes([(path, document, True, ()) for path, document in nodes.items()])
    record = Record(f"t{tree.version}", tree.version, 1.0, deleted=deleted, manifests=(manifest,))
    return run_steps(next_tree(tree.version + 1, record, [manifest], tree))


def is_nested(nodes: dict[str, bytes]) -> bool:
    arrays = [path for path, document in nodes.items() if document == ARRAY]
    return any(other != array and is_at_or_below(other, array) for array in arrays for other in nodes)


@pytest.mark.parametrize("seed", range(10))
def test_a_node_below_an_array_is_refused(seed: int) -> None:
    choice, tree, nodes = random.Random(seed), Tree.empty(), dict[str, bytes]()
    for _ in range(100):
        made = {path(choice): choice.choice((ARRAY, GROUP, GROUP)) for _ in range(choice.choice((1, 2, 5)))}
        deleted = tuple(path(choice) for _ in range(choice.choice((0, 1, 3))))
        kept = {p: d for p, d in nodes.items() if not any(is_at_or_below(p, top) for top in deleted)}
        assert set(tree.nodes.without(deleted)) == kept.keys()
        if is_nested(kept | made):
            with pytest.raises(Corrupt, match="below the array"):
                after(tree, made, deleted)
        else:
            tree, nodes = after(tree, made, deleted), kept | made
    assert tree.nodes.keys() == nodes.keys()
    assert not tree.nodes.without(("",))


ODD = [
    "",
    "/",
    "a/",
    "/a",
    "a//b",
    ".",
    "..",
    "a/..",
    "./a",
    "zarr.json",
    "a/zarr.json/b",
    "a\nb",
    "\x00",
    "é\x1f",
]
FINE = ["a", ".a", "a..", "...", "zarr.json.", "a/b", "\x7f", "é/\u200b", "\x85"]


@pytest.mark.parametrize("odd", ODD)
def test_one_odd_path_among_many_is_named(odd: str) -> None:
    with contextlib.suppress(InvalidArgument):
        assert checked_path(odd) != odd  # without its outer slashes
    check_paths(FINE)
    with pytest.raises(Corrupt, match="is not the path of a node"):
        check_paths([*FINE, odd, *FINE])


def test_paths_of_many_levels_cost_no_more_than_their_bytes() -> None:
    nodes = {f"n{i}" + "/a" * 250: ARRAY for i in range(20_000)}
    with bounded_time(4):
        tree = after(Tree.empty(), nodes)
        assert len(tree.nodes.without(("n0", "n1/a"))) == len(nodes) - 2
