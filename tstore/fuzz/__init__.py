"""Random operations on real stores, compared with a plain model: `python -m tstore.fuzz --seconds 60`.

1. `journal`: what workers did, were told and saw. `worker` is one of them; `transactions`, `checkpoints`: what
   they do; `verbs`: how often. `crew`: workers in processes, some of which are killed.
2. `timeline`: the versions of a store as the model has them. `odd`: calls with odd arguments.
3. `episode`: one store from its creation to its end. `places`: where stores lie. `__main__`: the command.
"""
