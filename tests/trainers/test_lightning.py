"""Lightning saves to a store with its own callbacks, and resumes after kills with the same losses."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tstore.sync as tstore
from tests.trainers.killing import KILLS, STEPS, Jobs, jobs

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="Lightning is not installed")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with jobs("tests.trainers.lightning_job", tmp_path_factory) as calls:
        yield calls


@pytest.mark.parametrize(("strategy", "ranks"), [("auto", 1), ("ddp", 2), ("fsdp2", 2)])
def test_a_killed_run_has_the_losses_of_one_that_is_not(
    job: Jobs, tmp_path: Path, strategy: str, ranks: int
) -> None:
    whole = job("train", url=str(tmp_path / "whole"), strategy=strategy, ranks=ranks)
    killed = job("train", url=str(tmp_path / "s"), strategy=strategy, ranks=ranks, kills=KILLS)
    assert killed == whole
    assert len(whole) == STEPS
    state = job("state_of", url=str(tmp_path / "s"))
    assert state["ok"]
    assert state["garbage"] == 0
    assert "last.ckpt" in state["names"]
    assert 3 <= len(state["names"]) <= 3 + KILLS  # a kill may come before the removal of the one that was replaced


def test_a_run_that_ends_early_goes_on_with_more_steps(job: Jobs, tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    whole = job("train", url=str(tmp_path / "whole"), steps=24)
    first = job("train", url=url, steps=12)
    tstore.quantize(url, {"state_dict/**": "e4m3"})  # whose tag, step/12/e4m3, is no file of Lightning's
    assert first | job("train", url=url, steps=24) == whole
    resumed = job("dies_inside_a_save", url=str(tmp_path / "d"), steps=24)
    assert resumed.items() < whole.items()
    assert resumed["23"] == whole["23"]


def test_top_k_and_last_are_tags(job: Jobs, tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    assert job("names_of", url=url, steps=12, save_top_k=-1, every_n_train_steps=1) == [
        *sorted(f"epoch={(step - 1) // 10}-step={step}.ckpt" for step in range(1, 13)),
        "last.ckpt",
    ]
    with tstore.open(url) as store:
        tags = store.tags()
    assert tags["last.ckpt"] == tags["epoch=1-step=12.ckpt"] == tags["step/12"]
    assert "last.ckpt" in job("without_numbers", url=str(tmp_path / "nan"))
    best = str(tmp_path / "best")
    assert job("best", url=best) == {"path": f"tstore::{best}/epoch=0-step=6.ckpt", "tested": [True, False]}


def test_a_save_may_take_longer_than_the_interval(job: Jobs, tmp_path: Path) -> None:
    whole = job("train", url=str(tmp_path / "whole"), steps=12)
    assert job("slow_saves", url=str(tmp_path / "s")) == whole


def test_a_checkpoint_is_loaded_without_an_import_of_the_plugin(job: Jobs, tmp_path: Path) -> None:
    assert job("found_by_installation", url=str(tmp_path / "s"))


@pytest.mark.parametrize(
    ("before", "after"), [(("ddp", 2), ("auto", 1)), (("fsdp2", 2), ("auto", 1)), (("auto", 1), ("fsdp2", 2))]
)
def test_another_number_of_ranks_resumes(
    job: Jobs, tmp_path: Path, before: tuple[str, int], after: tuple[str, int]
) -> None:
    url = str(tmp_path / "s")
    job("train", url=url, strategy=before[0], ranks=before[1], steps=6)
    assert job("resumed_elsewhere", url=url, strategy=after[0], ranks=after[1])


def test_hyper_parameters_that_a_store_cannot_hold_are_left_out(job: Jobs, tmp_path: Path) -> None:
    assert job("loaded", url=str(tmp_path / "s")) == {
        "same": True,
        "hparams": {
            "width": "5",
            "name": "'net'",
            "mode": "None",
            "where": "PosixPath('x')",
        },  # a default, and passed
        "warnings": [
            "left out of the checkpoints, because a store can't hold their values: hyper_parameters/mode, "
            "hyper_parameters/where; pass them to load_from_checkpoint, or exclude them with "
            "save_hyperparameters(ignore=…)"
        ],
    }


def test_fabric_saves_and_loads(job: Jobs, tmp_path: Path) -> None:
    assert job("fabric", url=str(tmp_path / "s")) == {"same": True, "step": 7, "steps": [7]}


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("full_disk", {}, "StorageFull: "),
        ("damaged", {}, r"Corrupt: last.ckpt: .*; the other checkpoints of .* are: epoch=0-step="),
        ("beside_another_job", {}, r"Conflict: .*another job saved step 1000, as version \d+, while this one"),
        (
            "names_of",
            {"dirpath": "/tmp/x"},
            "InvalidArgument: .*epoch=0-step=3.ckpt: expected the URL of a checkpoint",
        ),
    ],
)
def test_what_fails_is_told(job: Jobs, tmp_path: Path, name: str, arguments: dict[str, str], error: str) -> None:
    assert re.match(error, job.error(name, url=str(tmp_path / "s"), **arguments))


def test_a_checkpoint_of_another_model_is_refused(job: Jobs, tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    job("names_of", url=url, steps=3)
    assert "size mismatch for last.weight" in job.error("names_of", url=url, model={"width": 9})
    assert 'Unexpected key(s) in state_dict: "net.0.weight"' in job.error(
        "names_of", url=url, model={"name": "new"}
    )


def test_a_folder_with_other_files_is_refused(job: Jobs, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "file").touch()
    assert re.match("NotAStore: .*", job.error("names_of", url=str(tmp_path / "s")))
