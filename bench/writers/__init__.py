"""Benchmarks of many hosts on one store, beside tensorstore and Icechunk: `python -m bench.writers`."""
