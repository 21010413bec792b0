"""A trainer publishes weights; three processes answer with the newest, of which one is killed and one is slow.

Each answer must come from exactly one version: the example computes it again from the checkpoint of that version.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import tstore.sync as tstore

STEPS = 12
SIZE = 192
QUESTION = np.ones(SIZE, "float32")


def model(weights: dict[str, Any], x: np.ndarray[Any, Any]) -> float:
    """Return an answer that depends on all weights."""
    for layer in weights["layers"]:
        x = np.tanh(layer["w"] @ x + layer["b"])
    return float(x.sum())


def empty() -> dict[str, Any]:
    """Return memory for the weights."""
    return {"layers": [{"w": np.zeros((SIZE, SIZE), "float32"), "b": np.zeros(SIZE, "float32")} for _ in range(4)]}


def train(url: str) -> None:
    """Publish a version every few milliseconds; most weights of a step stay as they were."""
    rng = np.random.default_rng(0)
    weights = empty()
    for step in range(1, STEPS + 1):
        for layer in weights["layers"]:
            layer["b"] += rng.standard_normal(SIZE).astype("float32")
        weights["layers"][step % 4]["w"] += rng.standard_normal((SIZE, SIZE)).astype("float32") / SIZE
        tstore.save(url, weights, step)
        time.sleep(0.1)


def serve(url: str, answers: str, pause: float) -> None:
    """Answer in one thread while another follows the run; end with its last step."""
    store = tstore.open(url, "r")
    follower = store.follow(tags="step/*", versions="newest")
    weights = empty()
    follower.update(into=weights)
    ended = threading.Event()

    def answer() -> None:
        with Path(answers).open("a") as file:
            while not ended.is_set():
                with follower.lock:  # no update meanwhile
                    line = json.dumps({"version": follower.held, "answer": model(weights, QUESTION)})
                print(line, file=file, flush=True)
                time.sleep(0.01)

    thread = threading.Thread(target=answer)
    thread.start()
    while f"step/{STEPS}" not in store.tags() or follower.held != store.tags()[f"step/{STEPS}"]:
        time.sleep(pause)
        follower.update(into=weights, timeout=1)
    time.sleep(0.1)
    ended.set()
    thread.join()


def main() -> None:
    """Run the trainer and the followers, and check every answer."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"{folder}/policy"
        tstore.save(url, empty(), 0)
        context = multiprocessing.get_context("spawn")
        pauses = {"quick": 0.0, "slow": 0.7, "killed": 0.0}
        files = {name: f"{folder}/{name}" for name in pauses}
        followers = {name: context.Process(target=serve, args=(url, files[name], pauses[name])) for name in pauses}
        for process in followers.values():
            process.start()
        while not all(Path(file).exists() for file in files.values()):
            time.sleep(0.05)
        trainer = threading.Thread(target=train, args=(url,))
        trainer.start()
        time.sleep(0.4)
        followers["killed"].kill()
        followers["killed"].join()
        followers["killed"] = context.Process(target=serve, args=(url, files["killed"], 0.0))
        followers["killed"].start()  # begins with the newest version
        trainer.join()
        for process in followers.values():
            process.join()
        expected: dict[int, float] = {}
        for name, file in files.items():
            lines = [json.loads(line) for line in Path(file).read_text().splitlines() if line.endswith("}")]
            for version in {line["version"] for line in lines} - expected.keys():
                expected[version] = model(tstore.restore(url, at=version), QUESTION)
            mixed = [line for line in lines if line["answer"] != expected[line["version"]]]
            seen = sorted({line["version"] for line in lines})
            print(f"{name}: {len(lines)} answers from {len(seen)} versions up to {seen[-1]}, {len(mixed)} mixed")
            assert not mixed
            assert seen[-1] == STEPS + 1


if __name__ == "__main__":
    main()
