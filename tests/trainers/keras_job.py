"""Training with Keras, for the tests: a small model, on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tstore.sync as tstore
from tests.trainers.killing import STEPS, losses
from tstore.errors import TStoreError
from tstore.trainers.keras import BackupAndRestore, ModelCheckpoint, restore_model

warnings.simplefilter("default")  # Keras calls what NumPy and PyTorch will remove

BATCHES = 5
X = np.random.default_rng(0).random((8 * BATCHES, 4), dtype="f4")


class Losses(keras.callbacks.Callback):
    """Reports the loss after each batch."""

    def __init__(self, report: Callable[[int, float], None]) -> None:
        super().__init__()
        self._report, self._first = report, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._first = epoch * BATCHES

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._report(self._first + batch, float(logs["loss"]))


def model(units: int = 8, name: str = "first") -> Any:
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(units, activation="relu", name=name),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.3, name="dropout"),
        keras.layers.Dense(1, name="last"),
    ]
    built = keras.Sequential([keras.Input((4,)), *layers], name="net")
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)
    built.compile(keras.optimizers.Adam(schedule), loss="mse")
    return built


def fit(net: Any, *callbacks: Any, epochs: int = 2) -> Any:
    return net.fit(X, X.sum(1), epochs=epochs, batch_size=8, verbose=0, callbacks=list(callbacks)).history


def train(url: str, kills: int = 0) -> dict[int, float]:
    return losses(lambda report: _train(url, report), kills)


def _train(url: str, report: Callable[[int, float], None]) -> None:
    backup = BackupAndRestore(url, double_checkpoint=True, delete_checkpoint=False)
    net = model()
    np.random.random(tstore.Checkpointer(url).latest() or 0)  # the state of the generator is restored with a step
    fit(net, backup, Losses(report), epochs=STEPS // BATCHES)


def check(url: str) -> None:
    """Check what users of Keras's callbacks reported."""

    def refusal(call: Any, *words: str) -> None:
        with pytest.raises(TStoreError) as raised:
            call()
        assert all(word in str(raised.value) for word in words), raised.value

    fit(model(), BackupAndRestore(f"{url}/b"), epochs=0)
    assert not Path(url, "b").exists()

    # a longer run goes on where the first ended; a finished one begins anew
    net, backup = model(), BackupAndRestore(f"{url}/b", delete_checkpoint=False)
    assert len(fit(net, backup, epochs=2)["loss"]) == 2
    resumed = model()
    assert len(fit(resumed, BackupAndRestore(f"{url}/b"), epochs=3)["loss"]) == 1
    assert int(resumed.optimizer.iterations) == 3 * BATCHES
    assert tstore.steps(f"{url}/b") == []
    assert len(fit(model(), BackupAndRestore(f"{url}/b", 3, delete_checkpoint=False), epochs=2)["loss"]) == 2
    assert tstore.steps(f"{url}/b") == [9]  # every third batch

    # a callback that is used again begins anew
    backup = BackupAndRestore(f"{url}/again")
    assert [len(fit(model(), backup, epochs=epochs)["loss"]) for epochs in (3, 2)] == [3, 2]

    # a kill after a model was saved, and before its backup
    fit(model(), ModelCheckpoint(f"{url}/models"), epochs=3)
    fit(model(), BackupAndRestore(f"{url}/until 2", delete_checkpoint=False), epochs=2)
    fit(model(), BackupAndRestore(f"{url}/until 2"), ModelCheckpoint(f"{url}/models"), epochs=4)
    assert tstore.steps(f"{url}/models") == [BATCHES, 2 * BATCHES, 3 * BATCHES, 4 * BATCHES]

    # another model, a renamed layer, a URL of something else, another job
    refusal(lambda: fit(model(16), BackupAndRestore(f"{url}/b")), "first/kernel", "[4, 8]", "[4, 16]")
    refusal(lambda: fit(model(name="renamed"), BackupAndRestore(f"{url}/b")), "renamed/kernel", "first/kernel")
    Path(url, "notes").mkdir()
    Path(url, "notes", "a.txt").touch()
    refusal(lambda: BackupAndRestore(f"{url}/notes"), "notes", "contains other files")
    first, second = ModelCheckpoint(f"{url}/two"), ModelCheckpoint(f"{url}/two")
    fit(model(), first, epochs=2)
    refusal(lambda: fit(model(), second, epochs=1), f"{url}/two", "step 5 ", "rollback")
    refusal(lambda: BackupAndRestore(f"{url}/b", 0), "save_freq=0", "'epoch' or a number of batches")

    # names that would be equal without their numbers, a model without an optimizer, and equal names
    def layers(*names: str) -> Any:
        built = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4, name=name) for name in names)])
        built.compile("sgd", loss="mse")
        return built

    net, fresh = layers("x_1", "x_2_1", "x_3"), layers("x_1", "x_2_1", "x_3")
    net.fit(X, X, verbose=0, callbacks=[ModelCheckpoint(f"{url}/numbers")])
    restored = keras.Sequential(fresh.layers)
    restored.build((None, 4))
    restore_model(restored, f"{url}/numbers")
    assert all(map(np.array_equal, net.get_weights(), restored.get_weights()))

    class Twins(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="twins")
            self.twins = [keras.layers.Dense(4, name="twin") for _ in range(2)]

        def call(self, x: Any) -> Any:
            return self.twins[1](self.twins[0](x))

    twins = Twins()
    twins.compile("sgd", loss="mse")
    twins(X)
    saved = ModelCheckpoint(f"{url}/twins")
    refusal(lambda: twins.fit(X, X, verbose=0, callbacks=[saved]), "twins/twin/kernel", "a name of its own")

    # a damaged step
    twice = BackupAndRestore(f"{url}/d", double_checkpoint=True, delete_checkpoint=False)
    fit(model(40_000), twice, epochs=2)
    assert tstore.steps(f"{url}/d") == [BATCHES, 2 * BATCHES]
    pack = max(Path(url, "d", "txn").glob("*/pack-*"), key=lambda path: path.stat().st_mtime_ns)
    pack.write_bytes(bytes(pack.stat().st_size))
    refusal(
        lambda: fit(model(40_000), BackupAndRestore(f"{url}/d")), f"step {2 * BATCHES}", f"rollback({BATCHES})"
    )
    again = BackupAndRestore(f"{url}/d", double_checkpoint=True, delete_checkpoint=False)
    assert len(fit(model(40_000), again, epochs=2)["loss"]) == 1


def check_best(url: str) -> None:
    """Check which steps `ModelCheckpoint` saves and keeps."""

    class Scores(keras.callbacks.Callback):
        def __init__(self, *scores: float) -> None:
            super().__init__()
            self._scores = scores

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["score"] = self._scores[epoch]

    options: dict[str, Any] = {"monitor": "score", "mode": "max", "save_best_only": True}
    net, nan = model(), float("nan")
    fit(net, Scores(nan, 1.0, 3.0, nan), ModelCheckpoint(f"{url}/best", **options), epochs=4)
    assert tstore.steps(f"{url}/best") == [3 * BATCHES]
    fit(
        net, Scores(2.0, 4.0, 3.0), ModelCheckpoint(f"{url}/best", **options), epochs=3
    )  # knows the best of before
    assert tstore.steps(f"{url}/best") == [6 * BATCHES]
    keep = tstore.Keep(last=1, best=(2, "score"))
    fit(model(), Scores(4, nan, 1, 2, 3), ModelCheckpoint(f"{url}/k", save_weights_only=True, keep=keep), epochs=5)
    assert tstore.steps(f"{url}/k") == [3 * BATCHES, 4 * BATCHES, 5 * BATCHES]
    assert "optimizer" not in tstore.restore(f"{url}/k")
    restored = model()
    restore_model(restored, f"{url}/k", 3 * BATCHES)
    stored = tstore.restore(f"{url}/k", 3 * BATCHES)["model"]["net"]["first"]["kernel"]
    assert np.array_equal(keras.ops.convert_to_numpy(restored.get_layer("first").kernel), stored)
    with tstore.open(f"{url}/k") as store:
        assert store.collect(keep, dry_run=True).versions == []
