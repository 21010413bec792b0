"""Iterators of Grain in a `PerHost`: saved by their state, restored in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grain
import pytest

import tstore.sync as tstore
from tstore.errors import InvalidArgument


def iterator(batches: int = 0) -> Any:
    """Return an iterator after its first batches."""
    result = iter(grain.MapDataset.range(100).shuffle(seed=1).batch(4))
    for _ in range(batches):
        next(result)
    return result


def test_a_resumed_iterator_continues_where_it_was_when_the_save_began(tmp_path: Path) -> None:
    batches = iterator(3)
    with tstore.jax.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"data": tstore.PerHost(batches)})
        expected = next(batches)
        resumed = iterator()
        assert checkpoints.restore_latest({"data": tstore.PerHost(resumed)})["data"].value is resumed
    assert (next(resumed) == expected).all()


def test_a_list_of_all_states_leaves_the_iterator_alone(tmp_path: Path) -> None:
    tstore.jax.save(tmp_path, {"data": tstore.PerHost(iterator(3))}, step=1)
    own = iterator()
    states = tstore.jax.restore(tmp_path, target={"data": tstore.PerHost(own)}, per_host="all")["data"]
    assert states == [iterator(3).get_state()]
    assert own.get_state() == iterator().get_state()


def test_a_state_of_another_kind_is_refused(tmp_path: Path) -> None:
    tstore.jax.save(tmp_path, {"data": tstore.PerHost({"position": 3})}, step=1)
    with pytest.raises(InvalidArgument, match=r"^data: the .* of the target can't take the state .*only=…"):
        tstore.jax.restore(tmp_path, target={"data": tstore.PerHost(iterator())})


def test_an_iterator_outside_of_a_value_of_each_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"^data: .* pass its get_state\(\), in a tstore.PerHost"):
        tstore.jax.save(tmp_path, {"data": iterator()}, step=1)
