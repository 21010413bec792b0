"""Benchmarks of reading and writing parts of arrays, beside peers: `python -m bench.arrays`."""
