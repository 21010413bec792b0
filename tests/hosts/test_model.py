"""The generated model: realistic, incompressible, fast, and reproducible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tstore.errors import InvalidArgument
from tstore.lab.hosts.model import advance, spec_for, transformer
from tstore.sharding import Mesh, P

SMALL = 2_000_000


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}/{key}" if path else str(key))
    else:
        yield path, tree


@pytest.mark.parametrize("size", [16_384, 100_000, 1_000_000, 10_000_000, 100_000_000])
def test_size_and_dimensions(size: int) -> None:
    flat = dict(leaves(transformer(size)))
    total = sum(a.nbytes for a in flat.values())
    assert abs(total - size) < size * (0.02 if size >= 1_000_000 else 0.1)
    assert all(n % 8 == 0 for a in flat.values() for n in a.shape)
    assert {a.dtype for path, a in flat.items() if path != "step"} == {np.dtype("f4")}
    assert all(np.isfinite(a).all() for a in flat.values())


def test_structure() -> None:
    tree = transformer(SMALL)
    assert tree["step"].dtype == np.int64
    assert tree["step"] == 0
    layers = tree["params"]["layers"]
    assert list(layers) == list(range(len(layers)))
    assert len(layers) >= 2
    assert list(layers[0]) == ["attn", "mlp", "norm1", "norm2"]
    assert list(layers[0]["attn"]) == ["q", "k", "v", "o"]
    assert list(layers[0]["mlp"]) == ["up", "down"]


def test_the_same_seed_gives_the_same_and_another_seed_another() -> None:
    one, same, other = (dict(leaves(transformer(SMALL, seed))) for seed in (1, 1, 2))
    assert all(one[path].tobytes() == same[path].tobytes() for path in one)
    assert all(one[path].tobytes() != other[path].tobytes() for path in one if path != "step")


def test_no_two_blocks_of_4_kib_are_alike() -> None:
    seen = set()
    for path, array in leaves(transformer(30_000_000)):
        data = array.tobytes()
        for start in range(0, len(data), 4096):
            block = data[start : start + 4096]
            assert block not in seen, path
            seen.add(block)


def test_weights_are_heavy_tailed_with_outlier_channels() -> None:
    up = transformer(20_000_000)["params"]["layers"][0]["mlp"]["up"].astype(float)
    scales = up.std(axis=0)
    assert scales.max() > 4 * np.median(scales)
    column = up[:, np.argsort(scales)[scales.size // 2]]
    every = ((up - up.mean()) ** 4).mean() / up.var() ** 2
    assert every > 6  # 3 would be a normal distribution
    assert np.abs(column).max() > 3 * column.std()


def test_advance_changes_all_but_the_embedding() -> None:
    tree = transformer(SMALL)
    before = {path: array.tobytes() for path, array in leaves(tree)}
    moved = advance(tree, 7)
    assert moved["step"] == 7
    assert moved["step"].dtype == np.int64
    old, new = dict(leaves(tree)), dict(leaves(moved))
    assert list(old) == list(new)
    for path, array in new.items():
        assert (array.shape, array.dtype) == (old[path].shape, old[path].dtype)
        assert (array.tobytes() == before[path]) == path.startswith("params/embed/"), path
        assert old[path].tobytes() == before[path]
        if path != "step":
            np.testing.assert_allclose(array, old[path], rtol=0.5)
    again, later, other = advance(tree, 7), advance(tree, 8), advance(tree, 7, seed=1)
    assert all(a.tobytes() == new[path].tobytes() for path, a in leaves(again))
    for tree in (later, other):
        norm = tree["params"]["norm"]
        assert norm.tobytes() != new["params/norm"].tobytes()


def test_specs_divide_evenly_on_the_mesh() -> None:
    mesh = Mesh({"data": 4, "model": 2})
    for _, array in leaves(transformer(SMALL)):
        spec = spec_for(array.shape)
        assert spec == (P("data", "model") if array.ndim == 2 else P())
        sizes = {tuple(i.stop - i.start for i in s.index) for s in mesh.shards(array.shape, spec)}
        assert sizes == {mesh.shard_shape(array.shape, spec)}


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((), P()),
        ((384,), P()),
        ((8, 6), P("data", "model")),
        ((6, 8), P("model", "data")),
        ((8, 5), P(("data", "model"))),
        ((1, 512), P(None, ("data", "model"))),
        ((4, 5), P("data")),
        ((5, 4), P(None, "data")),
        ((6, 5), P("model")),
        ((5, 6), P(None, "model")),
        ((5, 7), P()),
        ((0, 8), P()),
        ((8, 6, 3), P("data", "model")),
    ],
)
def test_specs_use_as_many_devices_as_divide(shape: tuple[int, ...], spec: P) -> None:
    actual = spec_for(shape)
    assert tuple(actual) == tuple(spec) or tuple(actual) == (*spec, None)


def test_too_small() -> None:
    with pytest.raises(InvalidArgument, match="16384"):
        transformer(1000)


class CountedGenerator:
    """A generator of random numbers that counts them."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        draw = getattr(self._generator, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            result = draw(*arguments, **options)
            self.count += np.size(result)
            return result

        return counted


def test_few_random_numbers_make_a_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = CountedGenerator(np.random.default_rng(0))
    monkeypatch.setattr(np.random, "default_rng", lambda _seed: counted)
    transformer(100_000_000)  # 25 million weights
    assert counted.count < 2_500_000
