"""Benchmarks of training jobs that save and restore, in JAX and PyTorch, beside peers: `python -m bench.jobs`."""
