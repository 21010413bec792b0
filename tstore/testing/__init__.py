"""What tests of tstore, and of things built on it, need.

1. `model`: a realistic model to save. `hosts`: simulated hosts, a process each. `benchmark`: what these measure of
   a place.
2. `conformance`: whether a backend keeps its `promises`; `subject`: the place that is judged, `racers`: processes
   that race there, `relay`: replies that are lost on the way.
3. `simulation`: the protocol in time that is `virtual`, on a `storage` where everything goes wrong that may;
   `workload`: what hosts do there, `history`: what they saw, `checker`: whether that could be.
4. `faults`: a backend that fails where it is told to.
"""
