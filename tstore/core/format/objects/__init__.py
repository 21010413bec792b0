"""Metadata objects: records, roots, fragments and manifests, with the references to chunks; pure, no I/O.

1. `chunk_rows` and `chunk_refs`: references to chunks, in `columns`; `segments`: those of long arrays, read when
   needed; `layers`: older and newer references of one array; `merges`: older ones, restated by a later commit.
2. `references`: manifests; `manifest_checks`: checks of their columns; `short_manifests`: those of few chunks;
   `documents`: metadata documents shared by nodes.
3. `records`: records, roots and fragments; `archives`: many old records together; `collection`: what a garbage
   collection decided. `object_ref`: references to manifests that are objects; `pages`: those of long ones, which
   are cut by path. `encoding`: all of these as bytes; `roots`: roots, long ones with pages.
"""
