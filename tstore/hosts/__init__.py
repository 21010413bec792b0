"""Simulated hosts of a training job, each a process, for `tstore demo` and `tstore bench`.

1. `processes`: starts the processes and calls them over pipes.
2. `model`: the state of a transformer to save.
3. `benchmark`: measures a storage with many writers at once.
"""
