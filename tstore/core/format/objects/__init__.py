"""Metadata objects: records, roots, fragments and manifests, with the references to chunks; pure, no I/O.

1. `chunk_rows` and `chunk_refs`: references to chunks, in columns; `segments`: those of long arrays, read when
   needed; `tables`: older and newer references of one array, in rows and sorted runs; `compactions`: older ones,
   restated by a later commit.
2. `references`: manifests; `wellformed`: checks of decoded values; `documents`: metadata documents shared by
   nodes.
3. `records`: records, roots and fragments; `collection`: what a garbage collection decided. `object_ref`:
   references to manifests that are objects; `pages`: those of long ones, which are cut by path. `encoding`: all of
   these as bytes, and archives of many old records; `roots`: roots, long ones with pages.
"""
