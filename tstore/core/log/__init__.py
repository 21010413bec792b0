"""The log of commits: numbered records, each created once.

1. `log`: the log itself, with the commit protocol; start here. `group_commit`: commits of one process that share a
   record. `roots`: writing the root of a version.
2. `reader`: the newest version, and the records above a version. `records`: the records, cached, and whether each
   is in its place; `commits`: their bytes, in objects of their own or in archives. `trees`: the tree as of a
   version. `objects`: metadata objects, fetched and decoded; `pages`: parts of them, read when needed.
3. `expiry`: whether a version is still alive. `history`: the commits as users see them. `marker`: the object that
   makes a folder a store.
"""
