"""Benchmarks of tstore, its peers and the raw limit of the machine, interleaved in one run.

Run `python -m bench.save`, `bench.jobs`, `bench.backends`, `bench.writers`, `bench.arrays`, `bench.scale`,
`bench.exmy`, `bench.page` or `bench.breadth`. `machine`: the machine and its page cache. `processes`: hosts that
a program calls. `figures`: the figures of a contender, and their ratios. `cost`: what work costs a process.
`rounds`: the contenders in turn, by piece of work. `cost_table`: their costs. `bars`: the targets of figures.
`command`: what the command lines share.
"""
