"""Loading a saved state: into memory, mapped and streamed, beside raw reads and the loaders of servers.

    pip install -e '.[bench]' && python -m bench.loading --json figures.json

Each loader hands out all arrays in each round, in turn, and the times include opening. Only tstore verifies
checksums, except where it says so. "first" ends when one array was read, "whole" when all are handed out, "read"
when every byte of all was summed, and "cold" is "read" without cached pages. Figures are medians of interleaved
rounds, ratios medians of their paired ratios. Loaders that are not installed are left out. Linux only.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

import tstore.sync as tstore
from bench import machine, program
from bench.bars import Bar
from bench.figures import NONE, fastest
from bench.report import figures_table, seconds
from bench.rounds import Rounds, Skipped
from bench.workloads import Arrays, Values, Weights, large, leaves

Named = Iterator[tuple[str, Values]]

WORKLOADS = ("large", "leaves")
MEASURES = ("first", "whole", "read", "cold")
_PROCESSES = 8


def raw(folder: Path, into: Arrays) -> Named:
    """Read the bytes of one file into touched memory, in two threads."""
    fd, offsets, end = os.open(folder / "raw", os.O_RDONLY), {}, 0
    for name, values in into.items():
        offsets[name], end = end, end + values.nbytes

    def read(name: str) -> None:
        view, at = memoryview(into[name]).cast("B"), 0
        while at < len(view):
            at += os.preadv(fd, [view[at : at + (1 << 20)]], offsets[name] + at)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(read, into))
    os.close(fd)
    yield from into.items()


def restored_into(folder: Path, into: Arrays) -> Named:
    """Restore into touched memory."""
    yield from tstore.restore(folder / "tstore", into=into).items()


def restored(folder: Path, _: Arrays) -> Named:
    """Restore into new arrays."""
    yield from tstore.restore(folder / "tstore").items()


def mapped(folder: Path, _: Arrays) -> Named:
    """Map, and verify each array when it is handed out."""
    yield from tstore.restore(folder / "tstore", map=True).items()


def mapped_unverified(folder: Path, _: Arrays) -> Named:
    """Map, as peers do, without verifying anything."""
    yield from tstore.restore(folder / "tstore", map=True, verify="never").items()


def streamed(folder: Path, _: Arrays) -> Named:
    """Stream tensors."""
    yield from ((name, t.numpy()) for name, t in tstore.torch.stream(folder / "tstore", group=""))


def safetensors(folder: Path, _: Arrays) -> Named:
    """Map one file."""
    from safetensors import safe_open

    with safe_open(folder / "safetensors", "pt") as file:
        yield from ((name, file.get_tensor(name).numpy()) for name in file.keys())  # noqa: SIM118 - no mapping


def torch_load(folder: Path, _: Arrays) -> Named:
    """Map one file of `torch.save`."""
    import torch

    state = torch.load(folder / "torch", mmap=True, weights_only=True)
    yield from ((name, tensor.numpy()) for name, tensor in state.items())


def runai(folder: Path, _: Arrays) -> Named:
    """Stream one file of safetensors, as vLLM can."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(folder / "safetensors"))
        yield from ((name, tensor.numpy()) for name, tensor in streamer.get_tensors())


def fastsafetensors(folder: Path, _: Arrays) -> Named:
    """Read one file of safetensors to the CPU."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
    loader.add_filenames({0: [str(folder / "safetensors")]})
    buffers = loader.copy_files_to_device()
    yield from ((name, buffers.get_tensor(name).numpy()) for name in buffers.key_to_rank_lidx)
    buffers.close()
    loader.close()


def tensorstore(folder: Path, into: Arrays) -> Named:
    """Read arrays of a zarr3 store, all at once."""
    import tensorstore as ts

    opened = {name: ts.open(_spec(folder, name), open=True) for name in into}
    reads = {name: array.result().read() for name, array in opened.items()}
    yield from ((name, read.result()) for name, read in reads.items())


def _spec(folder: Path, name: str) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": f"file://{folder}/ocdbt"}, "path": name}


LOADERS: Mapping[str, Callable[[Path, Arrays], Named]] = {
    "raw": raw,
    "tstore into": restored_into,
    "tstore restore": restored,
    "tstore map": mapped,
    "tstore map unverified": mapped_unverified,
    "tstore stream": streamed,
    "safetensors": safetensors,
    "torch.load mmap": torch_load,
    "runai": runai,
    "fastsafetensors": fastsafetensors,
    "tensorstore": tensorstore,
}
PEERS = ("safetensors", "torch.load mmap", "runai", "fastsafetensors", "tensorstore")


def save(folder: Path, arrays: Arrays) -> None:
    """Save the arrays in the format of each loader that is installed."""
    import torch
    from safetensors.numpy import save_file

    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    tstore.save(folder / "tstore", arrays, 0)
    save_file(arrays, folder / "safetensors")
    torch.save(tensors, folder / "torch")
    with (folder / "raw").open("wb") as file:
        file.writelines(memoryview(values).cast("B") for values in arrays.values())
    try:
        import tensorstore as ts
    except ImportError:
        return
    for name, values in arrays.items():
        metadata = {"shape": values.shape, "data_type": "float32"}
        ts.open({**_spec(folder, name), "metadata": metadata}, create=True).result().write(values).result()


def summed(values: Values) -> int:
    """Read every byte of an array."""
    return int(values.reshape(-1).view(np.uint64).sum())


class LoadingRounds(Rounds):
    """Rounds of all loaders; the figures are seconds by measure."""

    def measure(self, work: Weights, rounds: int) -> None:
        folder = self.folder / work.name
        folder.mkdir(parents=True)
        arrays = dict(work.items(0, 1))
        save(folder, arrays)
        total = sum(map(summed, arrays.values()))
        into = {name: np.ones_like(values) for name, values in arrays.items()}
        for turn in range(-1, rounds):  # the first round imports and caches
            for name in self.names(LOADERS, turn + 1, work.name):
                with self.attempt(work.name, name):
                    figures = self.timed(LOADERS[name], folder, into, total)
                    if turn >= 0:
                        self.add(work.name, name, turn, figures)

    def timed(
        self, load: Callable[[Path, Arrays], Named], folder: Path, into: Arrays, total: int
    ) -> dict[str, float]:
        """Return the seconds of each measure; raise `Skipped` without the library, or for other values."""
        figures = {}
        for measure in MEASURES:
            (machine.evict if measure == "cold" else machine.warm)(folder)
            start, found = time.perf_counter(), 0
            try:
                for _, values in load(folder, into):
                    if measure != "whole":
                        found += summed(values)
                    if measure == "first":
                        break
            except ImportError as error:
                raise Skipped(str(error)) from error
            figures[measure] = time.perf_counter() - start
            if measure in ("read", "cold") and found != total:
                raise Skipped("the values differ from those that were saved")
        return figures


def _load_and_wait(folder: Path, ready: Any, load: Any, gone: Any) -> None:
    """Hand out and read everything when `load` is set, and stay until `gone` is."""
    ready.release()
    load.wait()
    arrays = [values for _, values in mapped(folder, {})]
    list(map(summed, arrays))
    ready.release()
    gone.wait()


def memory(folder: Path, processes: int) -> int:
    """Return the bytes that processes take together to map and read a store; a shared page counts once."""
    context = multiprocessing.get_context("spawn")
    ready, load, gone = context.Semaphore(0), context.Event(), context.Event()
    started = [context.Process(target=_load_and_wait, args=(folder, ready, load, gone)) for _ in range(processes)]
    totals = []
    for process in started:
        process.start()
    for event in (load, gone):
        for _ in started:
            ready.acquire()
        totals.append(sum(_proportional_size(process.pid) for process in started))
        event.set()
    for process in started:
        process.join()
    return totals[1] - totals[0]


def _proportional_size(process: int | None) -> int:
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text().split()
    return int(rollup[rollup.index("Pss:") + 1]) << 10


@program.command(__doc__)
@program.rounds_option(5)
@program.names_option("--only", list(WORKLOADS))
@click.option("--size", default=1024, type=program.COUNT, help="MiB of the large arrays.")
@click.option("--leaves", "count", default=10_000, type=program.COUNT, help="Number of leaves of 4 KiB.")
@program.json_option
@program.dir_option
def main(run: program.Run, rounds: int, only: list[str], size: int, count: int) -> None:
    bench = LoadingRounds(run.folder, run.log)
    bars = []
    workloads = {w.name: w for w in (replace(large(size << 20), grouped=False), leaves(count, grouped=False))}
    for work in (workloads[name] for name in only):
        bench.measure(work, rounds)
        figures = bench.results[work.name]
        run.show(figures_table(work.title, figures, [(m, m, seconds) for m in MEASURES]))
        for name, peers, measure, need in (
            ("tstore into", ("raw",), "read", 0.95 if work.name == "large" else 0.75),
            ("tstore map unverified", ("safetensors",), "read", 1.0),
            ("tstore map", ("safetensors",), "read", 0.8),
            ("tstore stream", ("runai",), "read", 1.1),
            ("tstore stream", ("fastsafetensors",), "read", 1.1),
            ("tstore stream", ("runai",), "cold", 1.1),
            ("tstore restore", ("safetensors",), "read", 1.0),
        ):
            lead = fastest(figures, peers, measure).ratio(measure, figures.get(name, NONE))
            bars.append(Bar(f"{work.name}: {name} {measure} ÷ {peers[0]}", need, lead))
        for measure, most in (("first", 5e-3), ("whole", 20e-3 if work.name == "large" else 60e-3)):
            found = figures["tstore map unverified"].median(measure)
            bars.append(Bar(f"{work.name}: mapped, {measure}", 1e3 * most, 1e3 * found, most=True, unit=" ms"))
    folder = run.folder / only[0]
    shared = memory(folder, _PROCESSES) / memory(folder, 1)
    bars.append(Bar(f"memory that {_PROCESSES} processes map ÷ one's", 1.1, shared, most=True))
    run.finish(
        bars,
        unit="seconds",
        workloads={w: {n: f.as_data() for n, f in fs.items()} for w, fs in bench.results.items()},
    )


if __name__ == "__main__":
    main()
