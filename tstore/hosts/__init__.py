"""Simulated hosts of a training job, each a process, for `tstore demo` and `tstore bench`.

1. `processes`: the processes, driven over pipes. 2. `model`: a transformer to save. 3. `benchmark`: what a storage
   gives to many writers at once.
"""
