"""The log of commits: numbered records, each created once.

1. `log`: the commit protocol. Start here. `group_commit`: commits of one process that go out together.
2. `search`: the newest of numbered objects. `objects`: metadata objects, read and decoded. `recent`: a bounded map
   of what was read. `reader`: which record is the newest, and the tree as of a version. `decisions`:
   what garbage collections decided.
3. `expiry`: whether a version still lives. `history`: what the records tell people. `marker`: what makes a place a
   store.
"""
