"""Checkpoints: a nested structure of arrays as one commit, saved by any number of hosts and restored by others.

1. `structure`: containers, split into a document and leaves, and built again. `leaves`: arrays of other libraries
   as NumPy arrays, `Shards`, one host's part of an array, and `PerHost`. `per_host`: the values of hosts as bytes.
2. `save`: save a tree as one commit, with `options`; `checkpoint`: its transaction. `jobs`: the write jobs of its
   arrays. `replicated`: checksums of the values that hosts must share. `union`: one tree from trees that differ
   between hosts.
3. `background`: saves while the caller continues, to a `background_store`, from the copies that `staging` makes.
   `series`: those of a job, and their outcomes. `checkpointer`: saves at the steps that `policies` choose.
   `rollback`: going on from an earlier step of a job. `job_store`: the store of a job, or its tiers.
4. `request`: what a restore asks for. `source`: the checkpoint that it reads, and whether a target fits.
   `into`: arrays of the caller to fill. `reading`: the regions that it reads. `mapped`: arrays in mapped packs.
   `restore`: the restore itself, and the plan of its reads. `stream`: arrays one after the other.

The checkpoint of step 100 is the commit with the tag `step/100`. Its tree has only the arrays; the attributes of
the root group hold the structure document.
"""
