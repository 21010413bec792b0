"""Commits: numbered records, each created once, and what follows from them.

1. `frame`: the bytes around every metadata object. `references`: manifests. `manifest`: records and the rest.
   `wellformed`: the checks of all that is decoded. `tree`: what a version holds, and how commits overlap.
2. `search`: finding the newest of numbered objects. `objects`: reading them. `recent`: a bounded map of what was
   read. `records`: which record is the newest, and what the tree is as of a version.
3. `log`: the commit protocol: start here. `queue`: commits of one process that go out together.
4. `retention`: which versions stay, by rules. `expiry`: whether a version still lives. `condemned`: what a garbage
   collection may decide.
5. `validation`: whether a record can be the next commit. `history`: what the records tell people.
"""
