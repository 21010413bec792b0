"""Threads, event loops, the memory budget and the clock. Nothing here knows of stores.

1. `pool`: worker threads, which make blocking calls. `concurrency`: other ways to make many calls. `budget`: the
   memory for the buffers of the process. `pacing`: the pauses of a save in the background.
2. `event_loops`: the loop for requests to servers, that behind `tstore.sync` and `save_async`, and values kept per
   loop.
3. `world`: the clock and random numbers, which a simulation replaces.
"""

from __future__ import annotations

from exmy.user_warnings import LIBRARIES

LIBRARIES.add("tstore")
