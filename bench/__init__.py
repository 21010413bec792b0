"""Benchmarks of tstore, its peers and the raw limit of the machine, interleaved in one run.

Run `python -m bench.save`, `bench.backends`, `bench.writers` or `bench.exmy`.
`machine`: CPU, memory, page cache. `bars`: the target of each figure.
"""
