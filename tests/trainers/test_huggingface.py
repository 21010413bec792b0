"""Hugging Face's `Trainer` saves to a store through a callback, and resumes after kills with the same losses."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import tstore.sync as tstore
from tests.trainers.killing import KILLS, STEPS, Jobs, jobs

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "accelerate", "peft"))),
    reason="transformers, accelerate and peft are not all installed",
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with jobs("tests.trainers.huggingface_job", tmp_path_factory) as calls:
        yield calls


@pytest.mark.parametrize(("lora", "ranks"), [(False, 1), (True, 1), (False, 2)])
def test_a_killed_run_has_the_losses_of_another_one(job: Jobs, tmp_path: Path, lora: bool, ranks: int) -> None:
    url = str(tmp_path / "s")
    whole = job("train", url=str(tmp_path / "whole"), lora=lora, ranks=ranks)
    assert job("train", url=url, lora=lora, ranks=ranks, kills=KILLS) == whole
    assert len(whole) == STEPS
    assert tstore.steps(url) == [(STEPS - 1) // 3 * 3, STEPS]
    assert all(("lora_" in path) == lora for path in job("paths", url=url))
    with tstore.open(url) as store:
        assert store.verify().ok
        store.collect(tstore.Keep(last=2), abandoned=timedelta())
        assert store.collect(tstore.Keep(last=2), abandoned=timedelta(), dry_run=True).objects == 0
        assert store.pending() == []


def test_a_run_goes_on_with_more_steps_and_another_number_of_ranks(job: Jobs, tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    whole = job("train", url=str(tmp_path / "whole"), steps=12)
    assert job("train", url=url, steps=6) | job("train", url=url, steps=12) == whole
    assert job("history", url=url) == list(range(1, 14))
    assert job("train", url=str(tmp_path / "t"), steps=6, ranks=2).keys() == set("123456")
    assert job("train", url=str(tmp_path / "t"), steps=9).keys() == set("789")


def test_steps_are_kept_by_their_number_or_their_metric(job: Jobs, tmp_path: Path) -> None:
    assert job("kept", url=str(tmp_path / "a"), steps=12, save_total_limit=3) == [6, 9, 12]
    assert job("kept", url=str(tmp_path / "b"), steps=20, save_strategy="epoch") == [10, 20]
    kept = job("best", url=str(tmp_path / "c"))
    assert kept["steps"] == sorted({kept["best"], 12})
    assert job("without_numbers", url=str(tmp_path / "nan")) == [9]


@pytest.mark.parametrize("lora", [False, True])
def test_a_step_is_exported_as_a_pretrained_folder(job: Jobs, tmp_path: Path, lora: bool) -> None:
    assert job("pretrained", url=str(tmp_path / "s"), lora=lora)


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("damaged", {}, "Corrupt: "),
        ("full_disk", {}, "StorageFull: "),
        ("without_resume", {}, "InvalidArgument: .*step 3 comes before step 9, the newest"),
        (
            "kept",
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3},
            "InvalidArgument: TStore",
        ),
    ],
)
def test_what_fails_is_told(job: Jobs, tmp_path: Path, name: str, arguments: dict[str, str], error: str) -> None:
    assert re.match(error, job.error(name, url=str(tmp_path / "s"), **arguments))


def test_another_model_and_another_folder_are_refused(job: Jobs, tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    job("kept", url=url, steps=3)
    assert "size mismatch" in job.error("kept", url=url, width=8)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "file").touch()
    assert job.error("kept", url=str(tmp_path / "t"), steps=6).startswith("NotAStore: ")
    tstore.save(tmp_path / "u", {"w": [1.0]}, 1)
    assert "is not of TStoreCallback" in job.error("kept", url=str(tmp_path / "u"))
    job("unwritable", url=str(tmp_path / "v"))
