"""Named checkpoints: when a save only adds a name to the one before, and what another job saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tstore
from tstore.errors import Conflict

torch = pytest.importorskip("torch")

from tstore.torch import save  # noqa: E402
from tstore.trainers.named_steps import named_steps  # noqa: E402


def test_a_tree_that_differs_in_signs_of_zeros_is_saved(tmp_path: Path) -> None:
    steps = named_steps(str(tmp_path / "s"))
    values = torch.zeros(1 << 22)  # the first save is under way when the second begins
    steps.save("first", {"w": values}, 1)
    steps.save("second", {"w": -values}, 2)
    assert [steps.restore(name)["w"].signbit().any().item() for name in ("first", "second")] == [False, True]


def test_a_step_that_another_job_saved_during_a_save_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "s")
    steps = named_steps(url)

    async def save_after_another(*arguments: Any, **options: Any) -> int:
        await tstore.save(url, {"w": [1.0]}, 1000)  # after the look for the steps of others
        return await save(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr("tstore.trainers.named_steps.save", save_after_another)
        steps.save("first", {"w": torch.zeros(3)}, 1)
        steps.wait()
    steps.save("second", {"w": torch.ones(3)}, 2)
    with pytest.raises(Conflict, match="another job saved step 1000, as version 1"):
        steps.wait()
