"""Training with Hugging Face's `Trainer`, for the tests: a small model, on the CPU."""

from __future__ import annotations

import math
import os
import pathlib
import resource
import tempfile
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers

import tstore.sync as tstore
from tests.trainers.killing import STEPS, losses
from tstore.cli import main
from tstore.errors import InvalidArgument
from tstore.trainers.huggingface import TStoreCallback

Report = Callable[[int, float], None]

torch.set_num_threads(1)


class Reporter(transformers.TrainerCallback):
    def __init__(self, report: Report) -> None:
        self._report = report

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self._report(state.global_step, logs["loss"])


def new_model(lora: bool, width: int = 16) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=width, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, attention_dropout=0.1, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, lora_dropout=0.1)) if lora else model


def _count_seen(model: Any, _: Any, inputs: Any) -> None:
    model.seen += inputs["input_ids"].sum()


def fit(
    url: str, report: Report = lambda step, loss: None, *, lora: bool = False, steps: int = STEPS, width: int = 16,
    keep: Any = None, **options: Any,
) -> tuple[Any, TStoreCallback]:  # fmt: skip
    torch.set_num_threads(1)
    tokens = torch.randint(0, 32, (40, 8), generator=torch.Generator().manual_seed(1)).tolist()
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(dir="."),
        **{
            "max_steps": steps, "per_device_train_batch_size": 4, "logging_steps": 1, "save_steps": 3,
            "save_total_limit": 2, "disable_tqdm": True, "report_to": [], "use_cpu": True,
            "learning_rate": 1e-2, "lr_scheduler_type": "constant", **options,
        },
    )  # fmt: skip
    callback = TStoreCallback(url, keep=keep)
    model = new_model(lora, width)
    if "RANK" in os.environ:  # a buffer that differs between processes, as the statistics of BatchNorm do
        model.register_buffer("seen", torch.zeros(1))
        model.register_forward_pre_hook(_count_seen, with_kwargs=True)
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data[:4],
        callbacks=[callback, Reporter(report)],
    )
    trainer.train(resume_from_checkpoint=callback.latest())
    assert not list(pathlib.Path(arguments.output_dir).iterdir())  # the Trainer writes no folder of its own
    return trainer, callback


def train(url: str, kills: int = 0, ranks: int = 1, lora: bool = False, steps: int = STEPS) -> dict[int, float]:
    options = {"eval_strategy": "steps", "eval_steps": 3} if ranks > 1 else {}
    return losses(lambda report: fit(url, report, lora=lora, steps=steps, **options), kills, ranks)


def unwritable(url: str) -> None:
    """Resume where one process can't write the folder, which is an error in both."""

    def train(report: Report) -> None:
        _, callback = fit(url, report, steps=3)
        tempfile.tempdir = "absent" if os.environ["RANK"] == "0" else None
        with pytest.raises((FileNotFoundError, InvalidArgument), match="absent"):
            callback.latest()

    losses(train, ranks=2)


def history(url: str) -> list[int]:
    """Resume with one step left, and return the steps of the history."""
    trainer, _ = fit(url, steps=13)
    return [entry["step"] for entry in trainer.state.log_history if "loss" in entry]


def paths(url: str) -> list[str]:
    with tstore.open(url) as store:
        return sorted(path for path in store.snapshot().paths() if path.startswith("model/"))


def pretrained(url: str, lora: bool = False) -> bool:
    """Return whether `from_pretrained` reads the folder made of a step as the model that was trained."""
    trainer, _ = fit(url, steps=3, lora=lora)
    assert main(["export", url, "folder", "--step", "3", "--subtree", "model"]) == 0
    if lora:
        model = peft.PeftModel.from_pretrained(new_model(lora=False), "folder")
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained("folder")
    assert main(["quantize", url, "--subtree", "model", "--min-sqnr", "30", "--tag", "small"]) == 0
    assert main(["export", url, "small", "--at", "small", "--subtree", "model"]) == 0
    files = [{p.name: p.read_bytes() for p in pathlib.Path(f).glob("*.json")} for f in ("folder", "small")]
    assert files[0] == files[1] != {}
    state = model.state_dict()
    return all(torch.equal(value, state[key]) for key, value in trainer.model.state_dict().items())


def kept(url: str, **options: Any) -> list[int]:
    fit(url, **options)
    return tstore.steps(url)


def without_numbers(url: str) -> list[int]:
    """Train until the loss is NaN, keep the best step, and return the steps."""
    keep = tstore.Keep(last=1, best=(1, "eval_loss"))
    options = {"learning_rate": 1e30, "eval_strategy": "steps", "eval_steps": 3}
    trainer, _ = fit(url, steps=9, keep=keep, **options)
    assert math.isnan(trainer.state.log_history[-2]["eval_loss"]), trainer.state.log_history
    return tstore.steps(url)


def full_disk(url: str) -> None:
    """Train with a disk that is full from step 7 on."""

    def fill(step: int, loss: float) -> None:
        if step == 7:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))

    fit(url, fill, steps=12, width=64)


def best(url: str) -> dict[str, Any]:
    fit(url, steps=12, keep=tstore.Keep(last=1, best=(1, "eval_loss")), eval_strategy="steps", eval_steps=3)
    with tstore.Checkpointer(url) as checkpoints:
        return {"steps": tstore.steps(url), "best": checkpoints.best("eval_loss")}


def damaged(url: str) -> None:
    """Resume from a step of which a byte is damaged."""
    fit(url, steps=6)
    for pack in pathlib.Path(url, "txn").glob("*/pack-*"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.chmod(0o644)
        pack.write_bytes(data)
    fit(url, steps=9)


def without_resume(url: str) -> None:
    """Begin anew in a store that has the steps of another run."""
    fit(url, steps=9)
    transformers.Trainer.train, train = lambda self, **_: train(self), transformers.Trainer.train
    fit(url, steps=9)
