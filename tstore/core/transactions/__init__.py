"""Transactions: staged changes on top of a version, and how they become a commit, by one host or by many.

1. `transaction`: the public face; start here. `staging`: its private side. `lifecycle`: its state and operations.
2. `handles`: the arrays as their users read and write them. `staged_tree`, `staged_array`: the staged changes;
   `staged_manifest`: their manifest, and the packs of others to which it refers; `tag_edits`: the tags. `patches`:
   parts of chunks to change. `appends`: values whose region the commit allots. `copies`: arrays copied into a
   transaction. `encoded`: chunks as their encoded bytes, as stores of Zarr see them. `read_set`: what a
   serializable transaction has read. `conflicts`: newer commits that conflict, or over which changes are applied
   again; commits after which a transaction can never be committed. `compacting`: older references that the commit
   restates.
3. `cooperative`: the protocol by which many hosts make one commit. `membership`: one host of a transaction, and
   the keys of what hosts write. `attempts`: the token of one start of a job. `fragments`: what each host
   contributes, and the tree in which they are merged. `agreement`: whether all hosts made the same call, with the
   same values. `decision`: whether the transaction may be committed, or a host that gave up has withdrawn it.
   `pending`: the transactions under way, and which of their hosts have delivered their fragments.
"""
