"""Copying a store between any two backends.

1. `inventory`: what versions are made of, and how each block of a pack is checked.
2. `shipment`: packs on their way, checked before they are written.
3. `copy`: the protocol: what is moved, and in which order it appears.
"""
