"""Tiers of stores for one job: local storage and that of other hosts in front of a durable store.

1. `resume`: the protocol, and the decision from which step a job goes on; `objects`: what hosts tell each other.
2. `holders`: the parts of steps that this host holds, and the store that consists of parts held by many.
3. `peers`: the server of a host, and the copies that it makes of the parts of others.
4. `tiers`: `tstore.Tiers`; `store`: the saves and restores of one host; `local`: its local store; `pushes`: from
   there to the durable one.
"""
