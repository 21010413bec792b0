"""Copying a store from one URL to another.

1. `inventory`: the manifests and packs that versions need, and the checksum of each block.
2. `source_records`: the commit records to create, from one unchanged history of the source.
3. `destination`: the state of the destination, and the objects created and replaced there.
4. `transfer`: the transfer of packs, which checks every piece before it is written.
5. `copy`: the protocol: which objects are copied, and the order in which they appear.
"""
