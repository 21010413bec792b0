"""Checkpoints: a nested structure of arrays as one commit, saved by any number of hosts and restored by others.

1. `structure`: containers, taken apart and built again. `leaves`: the arrays of other libraries as NumPy arrays.
   `shards`: one host's part of a leaf.
2. `save` and `restore`.

The checkpoint of step 100 is the commit with the tag `step/100`. Its tree consists of the arrays alone; the root
group's attributes hold the structure document.
"""
