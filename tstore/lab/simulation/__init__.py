"""Deterministic simulation of many hosts on one faulty store, in virtual time: `python -m tstore.lab.simulation`.

1. `runs`: one run, or many. `__main__`: the command. `scenario`: the parameters of a run, drawn from its seed.
2. `virtual`: an event loop with virtual time, and the clock, random numbers and fault rates of a host.
   `storage`: object storage that injects faults. `repairs`: a repair alongside the other work.
3. `client`: the store as opened by a host. `workload`: the random work of a host, with `edits`,
   `zarr_edits` and `cooperation`.
4. `history`: what hosts did and saw. `replay`: the states that it must have led to. `judge`: reads the final
   store. `checker`: checks it against the history (`write_sets`).
"""
