"""Benchmarks of tstore, its peers and the raw limit of the machine, interleaved in one run.

Run `python -m bench.save`, `bench.jobs`, `bench.backends`, `bench.writers`, `bench.arrays`, `bench.scale`,
`bench.exmy`, `bench.page`, `bench.tiers` or `bench.breadth`.

What they measure: `workloads` are data; `contender` is the interface of all contenders, which are in `peers`, a
module for each library; `states` and `chunks` are what a process does for its contender, and its cost. How:
`rounds` puts contenders in turn; `processes` are hosts that a program calls; `machine` has the page cache and peak
memory; `cost` is what work costs a process. What comes out: `figures` and their ratios, `bars` (targets), `report`
(tables), `program` (options, the folder, `--json`).
"""
