"""Storage in a folder of a POSIX file system.

1. `store`: the storage. `confined`: the same without following links, for a server.
2. `atomic_file`: a file that appears whole or not at all. `offer`: a record that takes the first free number.
   `pack`: packs, preallocated and written in place. `listing`: listings in pages.
"""
