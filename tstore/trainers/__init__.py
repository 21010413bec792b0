"""Plugins for trainers, so that their users save to a store by changing a few lines.

Each module is for one framework, and imports it. None is imported before it is used.
"""
