"""Threads, event loops, memory and time: the one place of concurrency; nothing here knows of stores.

1. `threads`: daemon threads that outlive the main thread's last statement.
2. `pool`: blocking calls in worker threads. `budget`: the bytes that they may hold.
3. `io_loop`: the loop on which requests to servers are awaited. `background`: the loop behind `tstore.sync`.
4. `concurrency`: many awaited calls, a bounded number of them at once. `per_loop`: state of one event loop.
5. `world`: the clock and the random numbers, which a simulation replaces.
"""
