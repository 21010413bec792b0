"""Storage in a folder of a POSIX file system.

1. `store`: the storage.
2. `atomic_file`: files that appear whole or not at all.
3. `pack`: files written in place, uploads of known size, and reading whole files. `listing`: listings in pages.
   `mapping`: files as memory.
"""
