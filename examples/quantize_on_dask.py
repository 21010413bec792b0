"""Quantize a checkpoint on a Dask cluster: its workers read, encode and write the arrays.

Any `concurrent.futures.Executor` will do; its workers must reach the store by its URL. Without arguments this
starts a cluster of two processes. Or pass the address of a scheduler, and a store:

    python examples/quantize_on_dask.py [SCHEDULER STORE]
"""

import sys

import numpy as np
from distributed import Client, LocalCluster

import tstore.sync as tstore


def main(scheduler: str | None = None, url: str = "checkpoints") -> None:
    if scheduler is None:
        rng = np.random.default_rng(0)
        tree = {"embed": rng.normal(size=(4000, 256)).astype("f4")}
        tree |= {f"layers.{i}.w": (rng.standard_t(4, (512, 512)) / 16).astype("f4") for i in range(8)}
        tree |= {f"layers.{i}.norm": np.ones(512, "f4") for i in range(8)}
        tstore.save(url, tree, step=1000)
        cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1")
        with cluster, Client(cluster) as client:
            quantize(client, url)
    else:
        with Client(scheduler) as client:
            quantize(client, url)


def quantize(client: Client, url: str) -> None:
    report = tstore.quantize(url, {"**norm": None}, bits=5.0, executor=client.get_executor())
    for array in report.worst[:3]:
        print(f"{array.path}: {array.format}, {array.bits_per_value:.2f} bits per value, {array.sqnr:.1f} dB")
    print(f"{report.tag}: {report.bits_per_value:.2f} bits per value, {report.sqnr:.1f} dB")


if __name__ == "__main__":
    main(*sys.argv[1:])
