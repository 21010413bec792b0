"""Threads, event loops, the memory budget and the clock. Nothing here knows of stores.

1. `pool`: worker threads, which make blocking calls. `quick_calls`: those that are quick enough to need no thread.
   `computing`: those that only compute, which a cancellation ends. `with_caller`: those of many items in the
   calling thread, which others help. `budget`: the memory for the buffers of the process. `pacing`: the pauses of
   a save in the background.
2. `event_loops`: the loop for requests to servers, and values kept per loop. `background_loop`: the loop behind
   `tstore.sync` and `save_async`.
3. `concurrency`: many awaited calls with bounded concurrency. `shared_calls`: one call for many tasks.
4. `world`: the clock and random numbers, which a simulation replaces.
"""

from __future__ import annotations

from exmy.user_warnings import LIBRARIES

LIBRARIES.add("tstore")
