"""The union of trees that differ from host to host."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

import tstore.sync as tstore
from tstore import PerHost, Shards
from tstore.checkpoint.union import Outline, united
from tstore.errors import Inconsistent


class State(NamedTuple):
    step: int
    params: Any


def parts(trees: Sequence[Any], teams: Sequence[dict[str, int]]) -> list[Any]:
    """Return what each host saves, from the trees of all and the teams of their shards."""
    outlines = [Outline.of(tree, own).with_checksums(tree) for tree, own in zip(trees, teams, strict=True)]
    members: dict[bytes, list[int]] = {}
    for host, outline in enumerate(outlines):
        members.setdefault(outline.digest(), []).append(host)
    different = [outlines[hosts[0]] for hosts in members.values()]
    return [
        united(tree, outlines[host], different, list(members.values()), host) for host, tree in enumerate(trees)
    ]


def saved(trees: Sequence[Any]) -> Any:
    url, attempt = f"memory://{uuid.uuid4()}", uuid.uuid4().hex
    with ThreadPoolExecutor(len(trees)) as hosts:
        calls = [
            hosts.submit(tstore.save, url, tree, 0, host=host, hosts=len(trees), attempt=attempt)
            for host, tree in enumerate(trees)
        ]
        assert {call.result() for call in calls} == {1}
    return tstore.restore(url)


def test_every_host_saves_the_layers_that_it_holds() -> None:
    def tree(host: int) -> Any:
        layers = {f"layer{i}": np.full(3, i) for i in range(6) if i % 3 == host % 3}
        return State(7, {**layers, "shared": np.ones(2), "list": [host // 9, None, "x"]})

    trees = [tree(host) for host in range(4)]  # hosts 0 and 3 hold the same layers
    for host in (0, 3):
        trees[host].params["scalar"] = np.float32(2)
    restored = saved(parts(trees, [{}] * 4))
    assert restored["step"] == 7
    assert {k: v.tolist() for k, v in restored["params"].items() if k.startswith("layer")} == {
        f"layer{i}": [i] * 3 for i in range(6)
    }
    assert restored["params"]["shared"].tolist() == [1, 1]
    assert restored["params"]["list"] == [0, None, "x"]
    assert restored["params"]["scalar"] == 2


def test_one_of_several_teams_writes_an_array() -> None:
    w = np.arange(12).reshape(4, 3)

    def tree(host: int) -> Any:
        half = slice(2 * (host % 2), 2 * (host % 2) + 2)
        return {"w": Shards(w.shape, w.dtype, [((half, slice(0, 3)), w[half])])}

    teams = [{"w": host // 2} for host in range(4)]
    whole = parts([tree(host) for host in range(4)], teams)
    assert sorted(len(part["w"].parts) for part in whole) == [0, 0, 1, 1]
    assert np.array_equal(saved(whole)["w"], w)


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        ({"a": {"n": 1}}, {"a": {"n": 2}}, "a/n"),
        ({"a": [1, 2]}, {"a": [1]}, "a"),
        ({"a": np.ones(2)}, {"a": np.ones(3)}, "a: float64[2] and float64[3]"),
        ({"a": np.ones(2)}, {"a": {"b": np.ones(2)}}, "a"),
        (State(1, {}), State(2, {}), "step"),
        ({"a": {5: np.ones(2)}}, {"a": {"5": np.zeros(2)}}, "a/5"),
        ({True: 1}, {"True": 1}, "True"),
        ({"a": PerHost(1)}, {"a": {"b": np.ones(2)}}, "a"),
        ({"a": {"b": np.ones(2)}}, {"a": PerHost(1)}, "a"),
        ({"a": PerHost(1)}, {"a": {}}, "a"),
        (PerHost(1), {"a": np.ones(2)}, "the tree"),
        ({"a": np.zeros(2), "x": 1}, {"a": -np.zeros(2), "y": 1}, "a: hosts [1] differ from host 0"),
        ({"a": Shards((4,), "f4")}, {"a": Shards((4,), "f4", shard_shape=(2,))}, "a: float32[4] in shards of [4]"),
    ],
)
def test_trees_that_contradict_each_other(one: Any, other: Any, path: str) -> None:
    with pytest.raises(Inconsistent) as caught:
        parts([one, other], [{}, {}])
    assert any(text.startswith(path) for text in caught.value.paths)


def test_values_that_not_all_hosts_have_are_compared_between_those_that_have_them() -> None:
    first = {"tied": np.ones(2), "layer0": np.ones(2), "n": np.float32(1)}
    others = [{"layer1": np.ones(2)}, {"tied": np.zeros(2), "n": np.float32(2)}]
    like_first = {**first, "tied": np.zeros(2)}
    for trees, host in (([first, *others], 2), ([first, like_first, others[0]], 1)):
        with pytest.raises(Inconsistent, match=r"tstore\.PerHost") as caught:
            parts(trees, [{}] * 3)
        assert f"tied: hosts [{host}] differ from host 0" in caught.value.paths
