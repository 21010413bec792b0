"""Threads, event loops, the memory budget and the clock. Nothing here depends on stores.

1. `pool`: worker threads, which make blocking calls. `concurrency`: other ways to make many calls. `budget`: the
   memory for the buffers of the process. `pacing`: the pauses of a save in the background.
2. `event_loops`: the loop for requests to servers, the loop behind `tstore.sync` and `save_async`, and values per
   loop.
3. `world`: the clock and random numbers, which a simulation replaces.
"""

from __future__ import annotations

from exmy.user_warnings import LIBRARIES

LIBRARIES.add("tstore")
