"""A training job on two hosts is preempted and resumes on three: save, restart, restore on another mesh.

    python examples/train_and_resume.py

Each host is a process. The store lies in a temporary folder.
"""

from __future__ import annotations

import multiprocessing
import tempfile

import numpy as np

import tstore.sync as tstore
from tstore.sharding import Mesh, P

SHAPE = (600, 256)
SPEC = P("data", None)


def train(store: str, host: int, hosts: int, attempt: str, steps: range) -> None:
    """Run one host: restore its rows of the newest step, if any, then train and save step by step."""
    mesh = Mesh({"data": hosts})
    [index] = mesh.host_shards(host, SHAPE, SPEC)
    w = np.zeros(SHAPE, "float32")[index]
    if tstore.steps(store):
        target = {"w": tstore.Shards.wanted(SHAPE, "float32", mesh, SPEC, host), "step": 0}
        state = tstore.restore(store, target=target)
        [(_, w)] = state["w"].parts
        assert state["step"] == steps.start - 1
    for step in steps:
        w = w + 1
        shards = tstore.Shards(SHAPE, "float32", [(index, w)], shard_shape=mesh.shard_shape(SHAPE, SPEC))
        tstore.save(store, {"w": shards, "step": step}, step, host=host, hosts=hosts, attempt=attempt)


def start(store: str, hosts: int, attempt: str, steps: range) -> None:
    """Run a job on a number of hosts until it ends."""
    context = multiprocessing.get_context("spawn")
    jobs = [context.Process(target=train, args=(store, h, hosts, attempt, steps)) for h in range(hosts)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert not any(job.exitcode for job in jobs)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        tstore.open(folder, "x")  # creates the store now, not with its first transaction
        start(folder, hosts=2, attempt="job-1.0", steps=range(3))
        start(folder, hosts=3, attempt="job-1.1", steps=range(3, 5))
        print("steps:", tstore.steps(folder))
        assert np.all(tstore.restore(folder)["w"] == 5)
