"""Hosts on every backend beside what else speaks to its server: `python -m bench.backends`."""
