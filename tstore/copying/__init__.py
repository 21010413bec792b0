"""Copying a store between any two backends.

1. `inventory`: what versions are made of, and how each block of a pack is checked.
2. `source_records`: the records that a copy creates, of one history.
3. `destination`: what is at the destination already, and how objects are created and replaced there.
4. `transfer`: packs on their way, checked before they are written.
5. `copy`: the protocol: what is moved, and in which order it appears.
"""
