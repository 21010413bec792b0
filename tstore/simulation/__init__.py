"""Many hosts on one store in virtual time, with every fault that may happen: `python -m tstore.simulation`.

1. `runs`: one run, and many. `__main__`: the command. `scenario`: the circumstances of a run, drawn from its seed.
2. `virtual`: an event loop with virtual time. `storage`: object storage where requests go wrong. `weather`: the
   clock, random numbers and bad luck of one host. `miniature`: large constants made small.
3. `workload`: what a host does at its `site`: `edits`, `groups`, `upkeep`.
4. `history`: what hosts did and saw. `judge`: what a new host finds at the end. `checker`, `retained`: whether a
   store that keeps its promises could have led to that. `store_model`: that store, as dicts of NumPy arrays.
"""
