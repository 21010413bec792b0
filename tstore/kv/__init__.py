"""Bytes by key: the backends under a store; nothing here knows of arrays."""
