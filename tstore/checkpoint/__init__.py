"""Checkpoints: a nested structure of arrays as one commit, saved by any number of hosts and restored by others.

1. `structure` takes containers apart and builds them again. `leaves` turns arrays of other libraries into NumPy
   arrays. `shards` is one host's part of a leaf.
2. `save` and `restore`.

The checkpoint of step 100 is the commit with the tag `step/100`. Its tree has only the arrays; the attributes of
the root group hold the structure document.
"""
