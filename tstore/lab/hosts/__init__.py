"""Simulated hosts of a training job, each a process, for `tstore demo` and `tstore bench`.

1. `forks`: starts many processes at the cost of one.
2. `processes`: the processes of a job, and the commands to them.
3. `model`: the state of a transformer to save.
4. `benchmark`: measures a storage with many writers at once.
"""
