"""The log of commits: numbered records, each created once.

1. `log`: the log itself, with the commit protocol; start here. `group_commit`: commits of one process that share a
   record. `repaired`: what a commit may not depend on. `roots`: writing the root of a version.
2. `reader`: the newest version (`search`), and the records above a version. `records`: the records, cached;
   `commits`: their bytes, in objects of their own or in archives. `chain`: whether each is in its place.
   `trees`: the tree as of a version. `objects`: metadata objects, fetched and decoded; `pages`,
   `segments`: parts of them, read when needed, as verified `ranges`.
3. `expiry`: whether a version is still alive. `history`: the commits as users see them. `marker`: the object that
   makes a folder a store.
"""
