"""The upkeep of a store.

1. `verify`: check every record, manifest and chunk. `repair`: void a commit whose record cannot be read.
2. `gc`: remove versions that no rule keeps, and what was never committed.
3. `contents`: what a version holds. `diff`: what changed between two.
"""
