"""Transactions: staged changes on top of a version, and how they become a commit, by one host or by many.

1. `transaction`: the public face; start here. `staging`: its private side, with `lifecycle`: its state and
   operations under way.
2. `staged_tree`, `staged_array`: what is staged. `tags`: which tags it sets. `read_set`: what a serializable
   transaction has read. `validation`: whether newer commits conflict with it.
3. `cooperative`: the protocol by which many hosts make one commit. `membership`: a host's place and the keys of
   what hosts write. `fragments`: what each host contributes, and merging it. `merging`: the tree in which they
   merge. `pending`: which hosts have delivered, and which are absent.
"""
