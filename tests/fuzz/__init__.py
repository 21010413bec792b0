"""Random operations on real stores, compared with a model: `python -m tests.fuzz --seconds 60`.

1. `worker`: calls random operations, defined in `transactions` and `checkpoints` and weighted in `verbs`.
   `journal`: records the calls and their results. `processes`: workers in processes, some of which are killed.
2. `timeline`: the model of the versions of a store. `odd`: calls with odd arguments.
3. `episode`: one store from creation to removal. `places`: storage for it. `__main__`: the command.
"""
