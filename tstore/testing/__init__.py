"""What tests of tstore, and of things built on it, need.

1. `model`: a realistic model to save. `hosts`: simulated hosts, a process each. `benchmark`: what these measure of
   a place.
2. `conformance`: whether a backend keeps its `promises`; `subject`: the place that is judged, `racers`: processes
   that race there, `relay`: replies that are lost on the way.
3. `simulation`: the protocol in time that is `virtual`, on a `storage` where everything goes wrong that may; each
   host has its `weather`. `scenario`: the circumstances of a run; `miniature`: large numbers made small.
   `workload`: what a host does at its `site`: `edits`, `groups`, `upkeep`; `history`: what hosts saw; `judge`:
   what is found in the end; `checker`, `retained`: whether that could be.
4. `fuzz`: random operations on real stores beside a plain model, the `store_model`.
5. `faults`: a backend that fails where it is told to.
"""
