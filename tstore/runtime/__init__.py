"""Threads, event loops and time: the one place of concurrency; nothing here knows of stores.

1. `threads`: daemon threads that outlive the main thread's last statement.
2. `pool`: blocking calls in worker threads, requests on the I/O loop, and the byte budget of both.
3. `io_loop`: the loop behind `tstore.sync`.
4. `concurrency`: many awaited calls, a bounded number of them at once.
5. `world`: the clock and the random numbers, which a simulation replaces.
"""
