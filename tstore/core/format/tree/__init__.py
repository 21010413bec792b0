"""The tree of a version, and the rules by which a commit may change it; pure, no I/O.

1. `node`: a group or array with its chunks, also those of another shape; `nodes`: those of a version;
   `stored_nodes`: those of manifests, and what changed after them.
2. `tree`: the nodes and tags, and the application of commits. `changes`: what a commit changes, and when two
   commits conflict. `differing_chunks`: the chunks that differ between two versions. `validation`: whether a
   record can be the next commit. `added_chunks`: the chunks that it adds.
3. `retention`: which versions to keep, the ledger of living versions, and what a garbage collection may delete.
"""
