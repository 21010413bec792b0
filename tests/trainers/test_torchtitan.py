"""The checkpoint manager for torchtitan, with its own containers of optimizers and schedulers.

Its `Trainer` needs a GPU, so a loop makes the calls of the `Trainer` to the manager here.
"""

from __future__ import annotations

import json
import random
import signal
import uuid
from datetime import timedelta
from pathlib import Path

import pytest

import tstore.sync as tstore
from tests.support.forks import forks
from tstore.errors import InvalidArgument, StructureMismatch

torch = pytest.importorskip("torch")
pytest.importorskip("torchtitan", reason="torchtitan is not installed")

from tests.trainers.killing import KILLS  # noqa: E402
from tests.trainers.torchtitan_job import STEPS, Job  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:To get the last learning rate", "ignore::DeprecationWarning")

CODE = """
    import json, os, traceback, warnings
    from tests.trainers.torchtitan_job import Job

    warnings.filterwarnings("ignore", "To get the last learning rate")  # torchtitan's schedulers cause it
    url, steps, kill_at = arguments
    try:
        os.write(out, json.dumps(Job(url).train(steps, kill_at)).encode())
    except Exception:
        os.write(out, traceback.format_exc().encode())
        raise
"""


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4()}"


def test_a_job_resumes_bit_for_bit_and_goes_on_after_its_last_step(url: str) -> None:
    whole = Job(f"{url}-whole").train(STEPS)
    assert len(whole) == STEPS
    assert Job(url).train(6) == whole[:6]
    resumed = Job(url)
    assert resumed.train(STEPS) == whole[4:]
    assert resumed.ntokens_seen == 32 * STEPS
    assert tstore.steps(url) == [8, 12]
    assert Job(url).train(STEPS) == []  # the last step has the whole state
    assert list(tstore.restore(url, only="model/**")["model"]) == ["layer.weight", "layer.bias"]
    with tstore.open(url) as store:
        assert store.verify().ok
        assert store.collect(tstore.Keep(last=2)).bytes == 0


def test_a_job_that_is_killed_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, chance = Job(tmp_path / "whole").train(STEPS), random.Random(2)
    url, resumed = tmp_path / "s", tmp_path / "losses"
    with forks(CODE, "tests.trainers.torchtitan_job") as processes:
        for _ in range(KILLS):
            job = processes.start(tmp_path / "killed", url, STEPS, chance.randrange(1, STEPS))
            # 0 if it resumed after that step
            assert processes.wait(job) in (0, -signal.SIGKILL), (tmp_path / "killed").read_text()
            with tstore.Checkpointer(url) as checkpoints:
                if checkpoints.latest() == STEPS:
                    checkpoints.rollback(checkpoints.steps()[0].step)
        assert processes.wait(processes.start(resumed, url, STEPS, 0)) == 0
    losses = json.loads(resumed.read_text())
    assert losses == whole[-len(losses) :]
    assert tstore.restore(url)["train_state"] == tstore.restore(tmp_path / "whole")["train_state"]
    for name, values in tstore.restore(url, only="model/**")["model"].items():
        assert (values == tstore.restore(tmp_path / "whole", only="model/**")["model"][name]).all()
    with tstore.open(url) as store:
        store.collect(tstore.Keep(last=2), abandoned=timedelta())
        assert store.verify().ok


def test_another_job_starts_from_the_weights_alone(url: str, tmp_path: Path) -> None:
    other = Job(tmp_path / "other")
    other.train(STEPS)
    job = Job(url, initial_load_path=str(tmp_path / "other"))
    assert job.checkpointer.load()
    assert job.step == 0
    assert torch.equal(job.model.layer.weight, other.model.layer.weight)
    job.checkpointer.close()
    with pytest.raises(StructureMismatch, match=r"renamed\.weight"):
        Job(url, "renamed", initial_load_path=str(tmp_path / "other")).checkpointer.load()
    assert not Job(url).checkpointer.load()  # a fresh start
    fresh = Job(tmp_path / "other", exclude_from_loading=["optimizer", "lr_scheduler"])
    assert fresh.checkpointer.load()
    assert fresh.step == STEPS
    assert fresh.schedulers.state_dict()["last_epoch"] == 0
    fresh.checkpointer.close()


def test_what_is_not_for_stores_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"last_save_in_hf: .* tstore export"):
        Job(tmp_path, last_save_in_hf=True)
    assert not Job(url, enable=False).checkpointer.load()
    job = Job(url, load_only=True)
    job.train(STEPS)
    with pytest.raises(tstore.errors.NotAStore):
        tstore.steps(url)
