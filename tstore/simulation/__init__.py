"""Deterministic simulation of many hosts on one faulty store, in virtual time: `python -m tstore.simulation`.

1. `runs`: one run, or many. `__main__`: the command. `scenario`: the parameters of a run, drawn from its seed.
2. `virtual`: an event loop with virtual time. `storage`: object storage that injects faults. `weather`: the clock,
   the random numbers and the fault probabilities of a host. `miniature`: reduces large constants of the protocol.
3. `workload`: the work of a host, chosen at random from `edits`, `groups` and `upkeep`. `site`: a running host.
4. `history`: records what hosts did and saw. `judge`: reads the final store. `checker`, `retained`: check it
   against the history and a model. `store_model`: a model of a store, as dicts of NumPy arrays.
"""
