"""Storage in a folder of a POSIX file system.

1. `store`: the storage.
2. `atomic_file`: files that appear whole or not at all. `linking`: how they get their names.
3. `pack`: files written in place, and uploads of known size. `listing`: listings in pages. `whole_files`: reading
   whole files, many short ones at once.
"""
