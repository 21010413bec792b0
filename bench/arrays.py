"""Reads and writes of parts of a volume: all of it, boxes, chunks, elements and strides, beside peers.

    pip install -e '.[bench]' && python -m bench.arrays --json figures.json

A volume of uint16 values is written and read in chunks of each size, raw and compressed, by tstore, tensorstore,
zarr-python, icechunk and, as raw limits, plain files of the same bytes: without chunks, and chunk by chunk with
the same compressor. Measured are time, CPU time, peak memory (results included) and the bytes that system calls
moved, each in a new process, from the page cache (except in the row "read cold", before which the files leave it;
those of a tmpfs stay).
Figures are medians of interleaved rounds, ratios are medians of the paired ratios of the rounds: quote ratios.
Checks what is read, and asserts no figure. Linux only; needs free memory of three times the volume and free disk
of as much. One element of a compressed chunk takes all of it, so that of long chunks few should be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import click

from bench import machine, program, report
from bench.bars import Bar
from bench.chunks import ChunkProcess
from bench.contender import Contender
from bench.figures import lead
from bench.peers.icechunk import Icechunk
from bench.peers.raw import Raw, RawChunks, RawTwoFiles
from bench.peers.tensorstore import TensorStore, TensorStoreCaching, TensorStoreOcdbt
from bench.peers.tstore import TStore
from bench.peers.zarr import Zarr, ZarrFused
from bench.processes import Hosts
from bench.rounds import Results, Rounds
from bench.workloads import Volume, array_name

CONTENDERS: dict[str, type[Contender]] = {
    "raw1": Raw,
    "raw2": RawTwoFiles,
    "raw-chunks": RawChunks,
    "ts-file": TensorStore,
    "ts-ocdbt": TensorStoreOcdbt,
    "zarr": Zarr,
    "zarr-fused": ZarrFused,
    "icechunk": Icechunk,
    "tstore": TStore,
}
RAW = ("raw1", "raw2")
"""The limit of the machine, without chunks."""
RAW_CHUNKS = ("raw-chunks",)
"""The limit with chunks, encoded or not."""
TENSORSTORE = ("ts-file", "ts-ocdbt")
PEERS = ("ts-file", "ts-ocdbt", "zarr", "zarr-fused", "icechunk")
"""The contenders that a run can leave out."""
MANY_ARRAYS: dict[str, type[Contender]] = {
    "tstore": TStore,
    "ts-ocdbt": TensorStoreCaching,
    "icechunk": Icechunk,
    "zarr": Zarr,
}
"""The contenders with many arrays."""

WRITE, WRITE_DURABLE, READ_ALL, READ_COLD = "write", "write durable", "read", "read cold"
READS = (READ_ALL, READ_COLD, "boxes", "single chunks", "elements", "strided")
ARRAYS = ("write many arrays", "open many arrays")
ROWS = (WRITE, WRITE_DURABLE, *READS, "arrays")
"""The pieces of work on a volume, and that on many arrays."""

_CODECS = ("raw", "zstd")
_SMALL = 64
"""The side of chunks that zarr-python's pipeline of batches is slow with."""


class Sizes(NamedTuple):
    """How many regions of each kind are read."""

    boxes: int
    singles: int
    elements: int
    arrays: int


class ArrayRounds(Rounds):
    """Rounds of the chosen rows; the pieces of work are named after the volume and the row.

    Calls `save` after each piece of work, so that an interrupted run keeps its figures.
    """

    contenders = CONTENDERS
    sizes: Sizes
    rows: Sequence[str]
    save: Callable[[Results], None]

    def volume(self, volume: Volume, turn: int) -> None:
        """Write the volume, durably and not, and read parts of what was written last."""
        contenders = [name for name in CONTENDERS if name not in RAW or volume.codec == "raw"]
        for name in self.names(contenders, turn, work(volume, WRITE)):
            for row, durable in ((WRITE_DURABLE, True), (WRITE, False)):
                if (row in self.rows or not durable) and durable in CONTENDERS[name].durabilities:
                    with self.attempt(work(volume, row), name):
                        machine.clear(self.folder)
                        self._measure(volume, row, name, turn, "write", durable)
            if self.figures(work(volume, WRITE), name).error:
                continue
            for row, do, *argument in self._reads(volume):
                if row in self.rows and name not in _UNREAD.get(row, ()):
                    with self.attempt(work(volume, row), name):
                        prepare = machine.evict if row == READ_COLD else machine.warm
                        prepare(self.folder)
                        self._measure(volume, row, name, turn, do, *argument)
        machine.clear(self.folder)

    def many_arrays(self, turn: int) -> None:
        """Write many arrays in groups; open the store and read an element of one of them."""
        middle = self.sizes.arrays // 2
        calls: tuple[tuple[str, tuple[Any, ...]], ...] = (
            ("write_arrays", (self.sizes.arrays,)),
            ("read_one", (array_name(middle), 0, middle)),
        )
        for name in self.names(MANY_ARRAYS, turn, ARRAYS[0]):
            machine.clear(self.folder)
            for row, (do, arguments) in zip(ARRAYS, calls, strict=True):
                with self.attempt(row, name), Hosts(1, ChunkProcess, MANY_ARRAYS[name], self.folder) as process:
                    [cost] = process.call(do, *arguments)
                    self.add(row, name, turn, cost)
                    self.save(self.results)
        machine.clear(self.folder)

    def _reads(self, volume: Volume) -> list[tuple[str, str, Any] | tuple[str, str]]:
        sizes = self.sizes
        return [
            (READ_COLD, "read_all"),
            (READ_ALL, "read_all"),
            ("boxes", "read_boxes", volume.boxes(sizes.boxes)),
            ("single chunks", "read_boxes", volume.single_chunks(sizes.singles)),
            ("elements", "read_elements", volume.elements(sizes.elements)),
            ("strided", "read_boxes", [volume.strided()]),
        ]

    def _measure(self, volume: Volume, row: str, name: str, turn: int, do: str, *arguments: Any) -> None:
        with Hosts(1, ChunkProcess, CONTENDERS[name], self.folder, volume) as process:
            self.make_room(2 * volume.nbytes)
            [cost] = process.call(do, *arguments)
        self.add(work(volume, row), name, turn, cost)
        self.save(self.results)


_UNREAD = {row: RAW if row in ("boxes", "single chunks") else (*RAW, *RAW_CHUNKS) for row in READS[2:]}
"""The contenders that do not make a read."""


def work(volume: Volume, row: str) -> str:
    """Return the name of a piece of work on a volume."""
    return f"{volume.title}: {row}"


def bars(results: Results, volumes: Sequence[Volume]) -> list[Bar]:
    """Return the bars of the rows that ran: the time of the best of some peers ÷ that of tstore."""
    out: list[Bar] = []
    for volume in volumes:
        for row in (WRITE_DURABLE, WRITE, READ_ALL):
            name = work(volume, row)
            if name in results and (volume.codec == "raw" or row != READ_ALL):
                by_raw = lead(results[name], RAW if volume.codec == "raw" else RAW_CHUNKS)
                what, need, by = "tensorstore", 1.2 if row == READ_ALL else 1.5, lead(results[name], TENSORSTORE)
                if row != READ_ALL and by_raw >= 0.9:
                    what, need, by = "raw", 0.9, by_raw
                out.append(Bar(f"{name}: {what} ÷ tstore", need, by))
    for name, figures in results.items():
        out.append(Bar(f"{name}: best peer ÷ tstore", 0.8, lead(figures, PEERS)))
        # zarr-python never calls fsync, and a disk limits all alike
        if name.startswith(f"{_SMALL}³") and not name.endswith((WRITE_DURABLE, READ_COLD)):
            out.append(Bar(f"{name}: zarr-python ÷ tstore", 5, lead(figures, ("zarr",))))
    return out


@program.command(__doc__)
@program.rounds_option(3)
@program.names_option("--only", ROWS)
@program.names_option("--peers", PEERS, "; the raw limits and tstore always run")
@click.option("--side", default=1024, type=click.IntRange(8), help="Side of the volume, in values.")
@click.option("--chunks", default="64,256", help="Sides of chunks, comma-separated: divisors of the volume's.")
@program.names_option("--codecs", _CODECS)
@click.option("--boxes", default=100, type=program.COUNT, help="Misaligned boxes of 100 × 100 × 64 values.")
@click.option("--singles", default=1000, type=program.COUNT, help="Reads of one chunk, each at most once.")
@click.option("--elements", default=1000, type=program.COUNT, help="Tasks that read one element each.")
@click.option("--arrays", default=10_000, type=click.IntRange(10), help="Arrays of the store that is opened.")
@program.json_option
@program.dir_option
def main(
    run: program.Run, only: list[str], peers: list[str], side: int, chunks: str, codecs: list[str], **numbers: int
) -> None:
    rounds = numbers.pop("rounds")
    volumes = [Volume(side, int(chunk), codec) for chunk in chunks.split(",") for codec in codecs]
    if any(side % volume.chunk for volume in volumes):
        raise click.BadParameter(f"expected divisors of {side}, not {chunks}", param_hint="--chunks")
    bench = ArrayRounds(run.folder / "volume", run.log, PEERS, peers)
    bench.sizes, bench.rows = Sizes(**numbers), only
    document: dict[str, Any] = {"unit": "seconds and bytes of all reads of a row", "sizes": numbers}
    document["volumes"] = [volume._asdict() for volume in volumes]
    bench.save = lambda results: run.write(bars(results, volumes), works=report.as_data(results), **document)
    for turn in range(rounds):
        run.log(f"round {turn + 1} of {rounds}")
        for volume in volumes:
            if set(only) - {"arrays"}:
                bench.volume(volume, turn)
        if "arrays" in only:
            bench.many_arrays(turn)
    run.show(report.cost_table(bench.results))
    run.finish(bars(bench.results, volumes), works=report.as_data(bench.results), **document)


if __name__ == "__main__":
    main()
