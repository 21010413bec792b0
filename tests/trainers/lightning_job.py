"""Training with Lightning, for the tests: a small model, on the CPU."""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import os
import pathlib
import resource
import signal
import sys
import threading
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import fsspec
import lightning.pytorch as pl
import torch
from fsspec.registry import _registry, known_implementations
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard

import tstore.sync as tstore
from tests.trainers.killing import STEPS, losses
from tstore.trainers.lightning import CheckpointIO, ModelParallelStrategy, RandomStates
from tstore.trainers.named_steps import NamedSteps

Report = Callable[[int, float], None]

torch.set_num_threads(1)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Mode(enum.Enum):
    FAST = 1


class Batches:
    """A shuffled data loader that saves its position."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._epoch = self._position = 0

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Any]:
        if self._position == len(self):
            self._epoch, self._position = self._epoch + 1, 0
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(self._epoch)).tolist()
        while self._position < len(self):
            x = torch.randn(
                8, 4, generator=torch.Generator().manual_seed(order[self._position] + 100 * self._rank)
            )
            self._position += 1
            yield x, x.sum(1, keepdim=True)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._position = state["epoch"], state["position"]


class Net(pl.LightningModule):
    def __init__(self, width: int = 8, where: Any = pathlib.Path("x"), mode: Any = Mode.FAST, name: str = "net"):
        super().__init__()
        self.save_hyperparameters()
        setattr(self, name, torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Dropout(0.3)))
        self.last = torch.nn.Linear(width, 1)
        self.name = name
        self.report: Report = lambda step, loss: None
        self.metric: Callable[[int], float] | None = None

    def configure_model(self) -> None:
        if self._trainer and isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.last, mesh=self.device_mesh["data_parallel"])
            fully_shard(getattr(self, self.name), mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        loss = ((self.last(getattr(self, self.name)(x)) - y) ** 2).mean()
        self.log("loss", loss if self.metric is None else torch.tensor(self.metric(self.global_step)))
        self.report(self.global_step, loss.item())
        return loss

    def test_step(self, batch: Any, index: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def fit(
    url: str,
    report: Report = lambda step, loss: None,
    *,
    steps: int = STEPS,
    ckpt_path: Any = "last",
    model: dict[str, Any] | None = None,
    metric: Callable[[int], float] | None = None,
    strategy: Any = "auto",
    devices: int = 1,
    callbacks: Sequence[pl.Callback] = (),
    **options: Any,
) -> tuple[pl.Trainer, Net, ModelCheckpoint]:
    torch.set_num_threads(1)
    pl.seed_everything(1)
    net = Net(**(model or {}))
    net.report, net.metric = report, metric
    checkpoints = ModelCheckpoint(
        **{
            "dirpath": f"tstore::{url}",
            "save_top_k": 2,
            "monitor": "loss",
            "every_n_train_steps": 3,
            "save_last": True,
            **options,
        }
    )
    trainer = pl.Trainer(
        max_steps=steps,
        plugins=[CheckpointIO()],
        callbacks=[checkpoints, RandomStates(), *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
    )
    trainer.fit(net, Batches(trainer.global_rank), ckpt_path=ckpt_path)
    return trainer, net, checkpoints


def chosen(strategy: str, ranks: int) -> Any:
    return ModelParallelStrategy(ranks, 1, process_group_backend="gloo") if strategy == "fsdp2" else strategy


def train(
    url: str, kills: int = 0, ranks: int = 1, strategy: str = "auto", steps: int = STEPS
) -> dict[int, float]:
    def run(report: Report) -> None:
        fit(url, report, strategy=chosen(strategy, ranks), devices=ranks, steps=steps)

    return losses(run, kills, ranks)


def names_of(url: str, **options: Any) -> list[str]:
    """Train, and return the names in the folder."""
    fit(url, **options)
    folder = f"tstore::{url}"
    return [path.removeprefix(f"{folder}/") for path in fsspec.url_to_fs(folder)[0].ls(folder, detail=False)]


def without_numbers(url: str) -> list[str]:
    """Train with a metric that is NaN at every second step; return the names."""
    return names_of(url, steps=12, metric=lambda step: math.nan if step % 2 else float(step), save_top_k=2)


def best(url: str) -> dict[str, Any]:
    """Test the best checkpoint, and return its path and whether the test was of it, and of the last one."""
    trainer, net, checkpoints = fit(url, steps=12, metric=lambda step: abs(step - 5))
    last = {key: value.clone() for key, value in net.state_dict().items()}
    trainer.test(net, Batches(0), ckpt_path="best", verbose=False)
    saved = CheckpointIO().load_checkpoint(checkpoints.best_model_path)["state_dict"]
    same = [
        all(torch.equal(value, state[key]) for key, value in net.state_dict().items()) for state in (saved, last)
    ]
    return {"path": checkpoints.best_model_path, "tested": same}


def slow_saves(url: str) -> dict[int, float]:
    """Return the losses of a run whose first commit ends only when the next checkpoint is due."""
    link, due = os.link, threading.Event()

    def held(source: Any, target: Any, **options: Any) -> None:
        if "/commits/" in str(target):
            assert due.wait(60)
        link(source, target, **options)

    class Due(pl.Callback):
        def on_save_checkpoint(self, trainer: Any, net: Any, checkpoint: dict[str, Any]) -> None:
            if checkpoint["global_step"] == 6:
                assert tstore.steps(url) == []
                due.set()

    def run(report: Report) -> None:
        os.link = held
        fit(url, report, steps=12, save_last=False, callbacks=[Due()])

    return losses(run)


def found_by_installation(url: str) -> bool:
    """Return whether `load_from_checkpoint` has the entry point of the installed package open a checkpoint."""
    _, net, checkpoints = fit(url, steps=3)
    for registered in (known_implementations, _registry):
        registered.pop("tstore", None)
    project = tomllib.loads(pathlib.Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    installed = pathlib.Path("site", "tstore_of_tests-1.dist-info")
    installed.mkdir(parents=True)
    lines = [f"{name} = {value}" for name, value in project["project"]["entry-points"]["fsspec.specs"].items()]
    installed.joinpath("entry_points.txt").write_text("\n".join(["[fsspec.specs]", *lines]))
    sys.path.insert(0, str(installed.parent))
    fsspec.process_entries()
    model = Net.load_from_checkpoint(checkpoints.last_model_path)
    return all(torch.equal(value, model.state_dict()[key]) for key, value in net.state_dict().items())


def resumed_elsewhere(url: str, strategy: str, ranks: int) -> bool:
    """Return whether a run of another kind that resumes and saves at once saves the same values."""

    def run(report: Report) -> None:
        trainer, _, _ = fit(url, steps=6, strategy=chosen(strategy, ranks), devices=ranks)
        trainer.save_checkpoint(f"tstore::{url}/again.ckpt")
        trainer.strategy.checkpoint_io.teardown()

    losses(run, ranks=ranks)
    one, other = (CheckpointIO().load_checkpoint(f"tstore::{url}/{name}.ckpt") for name in ("last", "again"))
    pairs = [(one["state_dict"], other["state_dict"])]
    pairs += [
        (a["state"][i], b["state"][i])
        for a, b in zip(one["optimizer_states"], other["optimizer_states"], strict=True)
        for i in a["state"]
    ]
    return all(torch.equal(a[key], b[key]) and a[key].any() for a, b in pairs for key in a)


def dies_inside_a_save(url: str, steps: int) -> dict[int, float]:
    """Return the losses after a run was killed when a save had written the values, and before its commit."""
    link, mark = os.link, pathlib.Path(f"{url}.killed")

    def fatal(source: Any, target: Any, **options: Any) -> None:
        if "/commits/" in str(target) and os.path.exists(f"{url}/commits/{5:020}") and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        link(source, target, **options)

    def run(report: Report) -> None:
        os.link = fatal
        fit(url, report, steps=steps)

    with contextlib.suppress(AssertionError):  # the first one is killed
        losses(run)
    assert mark.exists()
    return losses(run)


def full_disk(url: str) -> None:
    """Train with a disk that is full from step 7 on."""

    def fill(step: int, loss: float) -> None:
        if step == 7:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))

    fit(url, fill, model={"width": 5000})


def damaged(url: str) -> None:
    """Resume from a checkpoint of which a byte is damaged."""
    fit(url, steps=9)
    with tstore.open(url) as store:
        version = store.tags()["last.ckpt"]
        newest = next(commit.transaction for commit in store.history() if commit.version == version)
    for pack in pathlib.Path(url, "txn", newest).glob("pack-*"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.chmod(0o644)
        pack.write_bytes(data)
    fit(url, steps=12)


def beside_another_job(url: str) -> None:
    """Train while another job saves to the same folder."""

    def interfere(step: int, loss: float) -> None:
        if step == 4:
            other = NamedSteps(url)
            other.save("other.ckpt", {"w": torch.zeros(2)}, 1000)
            other.wait()

    fit(url, interfere, steps=12)


def loaded(url: str) -> dict[str, Any]:
    """Return what `load_from_checkpoint` makes of a checkpoint, and the warnings of the training."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, net, checkpoints = fit(url, steps=6, model={"width": 5})
    model = Net.load_from_checkpoint(checkpoints.last_model_path, mode=None)
    same = all(torch.equal(value, model.state_dict()[key]) for key, value in net.state_dict().items())
    texts = [str(warning.message) for warning in caught if "left out" in str(warning.message)]
    return {"same": same, "hparams": {k: repr(v) for k, v in model.hparams.items()}, "warnings": texts}


def fabric(url: str) -> dict[str, Any]:
    """Save with Fabric, change the state, and load it again."""
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[CheckpointIO()])
    fabric.launch()
    net = torch.nn.Linear(3, 2)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = net.weight.detach().clone()
    state = {"model": model, "optimizer": optimizer, "step": 7}
    fabric.save(f"tstore::{url}/a.ckpt", state)
    with torch.no_grad():
        net.weight.zero_()
    state["step"] = 0
    fabric.load(f"tstore::{url}/a.ckpt", state)
    return {"same": torch.equal(net.weight, before), "step": state["step"], "steps": tstore.steps(url)}


def state_of(url: str) -> dict[str, Any]:
    """Return the names of a folder, what is damaged, and whether garbage is left after a collection."""
    with tstore.open(url, "r+") as store:
        names = [tag for tag in store.tags() if tag.endswith(".ckpt")]
        store.collect(abandoned=timedelta(0))
        left = store.collect(abandoned=timedelta(0), dry_run=True).objects + len(store.pending())
        return {"names": sorted(names), "ok": store.verify().ok, "garbage": left}
