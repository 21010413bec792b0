"""Plugins for trainers, so that their users save to a store by changing a few lines.

Each module is for one framework, imports it, and is imported only when it is used:
`huggingface`, `keras`, `lightning`, `orbax` and `torchtitan`.

`named_steps`: checkpoints with names, for trainers that remove them themselves.
"""
