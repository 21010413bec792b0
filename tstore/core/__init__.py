"""The transactional store: commits, snapshots and arrays, and everything that they are built on.

Each of these imports only from those before it:

1. `hints`: what to use instead of names of other libraries. `runtime/`: threads, event loops, the memory budget.
2. `format/`: bytes to objects and back, without I/O; FORMAT.md describes every byte. `storage/`: bytes by key.
3. `data/`: values into packs, and back. `log/`: the commit protocol.
4. `array`: a chunked array and its views. `calls`: calls that can be chained. `snapshot`: a version to read.
5. `transactions/`: staged changes, and how one or many hosts commit them. `maintenance/`: verification, repair,
   garbage collection. `following`: new versions as they come, and arrays in memory that are kept at the newest.
6. `store`: all of it under one URL. `opening`: `tstore.open`. `pickling`: stores and arrays in other processes.
7. `steps`, `tags`: checkpoints by step, and names of versions. `copying/`: a store from one URL to another.
"""
