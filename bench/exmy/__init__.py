"""Benchmarks of the codecs: `python -m bench.exmy speed`, `quality`, `lossless`, `checkpoint` or `model`."""
