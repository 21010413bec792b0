"""The codecs: `python -m bench.exmy speed`, `quality`, `lossless` or `big`."""
