"""Checkpoints: a nested structure of arrays as one commit, saved by any number of hosts and restored by others.

1. `structure`: the containers, as a document and the leaves at their paths. `leaves`: what other libraries' arrays
   are to NumPy. `shards`: one host's part of a leaf. `patterns`: globs over paths.
2. `steps`: which commits are checkpoints.
3. `save` and `restore`.

The checkpoint of step 100 is the commit with the tag `step/100`. Its tree consists of the arrays alone; the root
group's attributes hold the structure document.
"""
