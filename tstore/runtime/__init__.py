"""Threads, event loops, memory budget and clock: all concurrency primitives, independent of stores.

1. `pool`: worker threads and blocking calls in them; `budget`: the memory that they may use.
2. `event_loops`: the loop for requests to servers, the loop behind `tstore.sync`, and the state of any one loop.
3. `concurrency`: many awaited calls with bounded concurrency.
4. `world`: the clock and random numbers, which a simulation replaces.
"""
