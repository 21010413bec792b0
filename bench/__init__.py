"""Benchmarks of tstore, its peers and the raw limit of the machine, interleaved in one run.

Run `python -m bench.save`, `bench.backends`, `bench.writers` or `bench.exmy`.
`machine`: the machine and its page cache. `bars`: the targets of figures.
"""
