"""Saves and restores of one process beside its peers: `python -m bench.save`."""
