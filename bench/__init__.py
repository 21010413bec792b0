"""Benchmarks of tstore, its peers and the raw limit of the machine, interleaved in one run.

Run `python -m bench.save`, `bench.jobs`, `bench.backends`, `bench.writers` or `bench.exmy`.
`machine`: the machine and its page cache. `processes`: hosts that a program calls. `figures` are compared, and
`bars` are their targets. `command`: what the command lines have in common.
"""
