"""The format of a store: names of objects, bytes to objects and back, and what follows from them; pure, no I/O.

1. `layout`: the names of all objects. `bounds`: how long each may be. `arguments`: what callers may put into them.
2. `frame`: the kind, format version and checksum around every metadata object. `records`: records, roots and
   fragments. `references`: where objects lie; manifests. `encoding`: all of these to bytes and back. `wellformed`:
   the checks of what is decoded. `collection_size`: how much the record of a garbage collection may hold.
   `tree_document`: the structure of a saved tree.
3. `grid`: chunk grids and basic indexing. `compressors`, `codecs`: the codec chain of a chunk. `array_metadata`:
   the `zarr.json` of an array. `checksums`: those of objects and chunks. `chunk_refs`: references to chunks, as
   columns. `chunk_layers`: tables of them over each other.
4. `tree`: the groups and arrays of a version, what a commit changes in them, and when two commits conflict.
   `validation`: whether a record can be the next commit.
5. `retention`: which versions to keep, and the ledger of living versions. `condemned`: what a garbage collection
   may delete. `patterns`: globs over paths.
"""
