"""Transactions: what is staged over a version, and how it becomes a commit, by one host or by many.

1. `transaction`: the whole: staging, committing, aborting. `lifecycle`: its state, and operations under way.
2. `staged_array`, `staged_tree`: what it has changed and not yet committed; `tags`: what it does with tags;
   `read_set`: what it has read, where it is serializable. `validation`: whether newer commits allow its own.
3. `group`: the protocol by which many hosts make one commit; `fragments`: what each contributes, merged;
   `pending`: who has delivered, and who is missing.
"""
