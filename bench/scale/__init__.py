"""Benchmarks of costs that grow with a store: `python -m bench.scale`."""
