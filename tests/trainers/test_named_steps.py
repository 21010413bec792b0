"""Named checkpoints: when a save only adds a name to the one before."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tstore.trainers.named_steps import named_steps  # noqa: E402


def test_a_tree_that_differs_in_signs_of_zeros_is_saved(tmp_path: Path) -> None:
    steps = named_steps(str(tmp_path / "s"))
    values = torch.zeros(1 << 22)  # the first save is under way when the second begins
    steps.save("first", {"w": values}, 1)
    steps.save("second", {"w": -values}, 2)
    assert [steps.restore(name)["w"].signbit().any().item() for name in ("first", "second")] == [False, True]
