"""Benchmarks of several hosts on every backend, beside other clients of its server: `python -m bench.backends`."""
