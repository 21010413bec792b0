"""Benchmarks of tstore, its peers and the raw limit of the machine, interleaved in one run.

Run `python -m bench.save`, `bench.jobs`, `bench.backends`, `bench.writers`, `bench.scale` or `bench.exmy`.
`machine`: the machine and its page cache. `processes`: hosts that a program calls. `figures`: the figures of a
contender, and their ratios. `bars`: the targets of figures. `command`: what the command lines have in common.
"""
