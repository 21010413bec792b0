"""Threads, event loops, memory budget and clock: all concurrency primitives, independent of stores.

1. `threads`: daemon threads that run until interpreter exit.
2. `pool`: blocking calls in worker threads; `budget`: the memory that they may use.
3. `io_loop`: the event loop for requests to servers; `background`: the event loop behind `tstore.sync`.
4. `concurrency`: many awaited calls with bounded concurrency; `per_loop`: the state of one event loop.
5. `world`: the clock and random numbers, which a simulation replaces.
"""
