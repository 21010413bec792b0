"""Benchmarks of several hosts on every kind of storage, beside other clients: `python -m bench.backends`."""
