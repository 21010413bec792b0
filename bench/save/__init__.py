"""Benchmarks of saving and restoring in one process, beside peers: `python -m bench.save`."""
