"""The shape of shards that fits every region of a layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tstore.errors import InvalidArgument
from tstore.sharding import Mesh, P, common_shard_shape


@given(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(1, 5), st.integers(1, 4))
def test_it_is_the_shard_shape_of_a_mesh(shape: list[int], data: int, model: int) -> None:
    mesh = Mesh({"data": data, "model": model})
    spec = P(*(["model", "data", None][: len(shape)]))
    found = common_shard_shape(shape, [s.index for s in mesh.shards(shape, spec)])
    expected = mesh.shard_shape(shape, spec)
    assert found == expected or 0 in shape


def test_it_divides_the_edges_of_nested_shards() -> None:
    rows = [(0, 3), (3, 5), (5, 8), (8, 10)]
    assert common_shard_shape([10, 4], [(slice(a, b), slice(0, 4)) for a, b in rows]) == (1, 4)
    assert common_shard_shape([12], [(slice(0, 8),), (slice(8, 12),)]) == (8,)
    assert common_shard_shape([12], [(slice(0, 4),), (slice(4, 10),), (slice(10, 12),)]) == (2,)
    assert common_shard_shape([12], []) == (12,)
    assert common_shard_shape([], [()]) == ()


@pytest.mark.parametrize("index", [(slice(0, 13),), (slice(3, 2),), (slice(0, 3), slice(0, 1))])
def test_an_index_outside_of_the_array_is_refused(index: tuple[slice, ...]) -> None:
    with pytest.raises(InvalidArgument, match="not a region of shape"):
        common_shard_shape([12], [index])
