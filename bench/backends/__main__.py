"""Saves and restores of one checkpoint by several host processes: tstore and its peers on each storage.

    pip install -e '.[bench,test]' && python -m bench.backends --json figures.json

With tstore, all hosts save one checkpoint in one commit; with the others, each host writes its own objects,
without a commit. The time includes connecting. Each round starts new server processes on loopback. Every
contender saves and restores the same bytes, in an order that rotates by one each round. Figures are medians of
rounds, ratios are medians of the paired ratios of the rounds: quote ratios. Requests are those of all hosts;
memory is the highest peak of a host, without its arrays. Restored values are checked after the clock has stopped.
Linux only.
"""

from __future__ import annotations

import click

from bench import program
from bench.backends import latency
from bench.backends.rounds import ARRAYS, Measurement, Served
from bench.backends.servers import SERVERS


@program.command(__doc__)
@program.rounds_option(5)
@click.option("--hosts", default=8, type=program.COUNT)
@click.option("--size", default=256, type=program.COUNT, help="MiB of the checkpoint.")
@program.names_option("--only", [*SERVERS, "latency"])
@program.json_option
@program.dir_option
def main(run: program.Run, rounds: int, hosts: int, size: int, only: list[str]) -> None:
    rows = size * 2**20 // hosts // ARRAYS // 4096
    work = Served("checkpoint", "", ARRAYS, (rows * hosts, 1024), (max(1, min(rows, 1024)), 1024))
    measured = Measurement(run.folder, run.log)
    measured.work, measured.hosts = work, hosts
    for turn in range(rounds):
        for server in (s for s in only if s in SERVERS):
            run.log(f"round {turn + 1} of {rounds}: {server}")
            measured.round(server, turn)
    run.show(*measured.tables())
    bars, document = measured.bars(), measured.data()
    if "latency" in only:
        delayed = latency.measure(rounds)
        run.show(f"{delayed}")
        bars += delayed.bars()
        document["latency"] = delayed._asdict()
    run.finish(bars, **document)


if __name__ == "__main__":
    main()
