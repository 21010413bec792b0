"""Measurements: tstore, its peers and the raw limit of the machine, interleaved in one run.

Run `python -m bench.save`, `bench.backends`, `bench.writers` or `bench.exmy`.
`machine`: its CPU, memory and limits. `bars`: what each figure must reach.
"""
