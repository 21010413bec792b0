"""The format of a store: names of objects, bytes to objects and back, and the rules between objects; pure, no I/O.

1. `layout`: the names of all objects. `bounds`: the maximum size of each object and of its parts.
   `arguments`: what callers may store. `plain_text`: sizes and tables as text.
2. `frame`: the kind, format version and checksum around every metadata object. `records`: records, roots and
   fragments. `references`: manifests; `manifest_checks`: checks of their columns; `short_manifests`: those of few
   chunks. `object_ref`: references to manifests that are objects; `pages`: those of long ones, which are cut by
   path. `encoding`: all as bytes; `roots`: roots, long ones with pages. `wellformed`: checks of decoded values.
   `tree_document`: the structure of a saved tree; `tree_parts`: parts of it.
3. `grid`: chunk grids and ranges of them; `samples`: regions spread over an array. `indices`: the items of an
   index; `views`: chains of indices; `points`: what index arrays select, by chunk. `dtypes`: data types and fill
   values; `variable`: those of variable length. `codecs`: the codec chain of a chunk, of `filters`, one of the
   `array_codecs` or `sharded` chunks, and `compressors` or other `bytes_codecs`; `numcodecs_classes`: codecs of a
   library. `array_metadata`: the `zarr.json` of an array; `chunk_names`: the names that it gives to chunks.
   `documents`: those shared by nodes. `checksums`: of objects and chunks. `gather`: copies of chunks, with their
   checksums. `chunk_rows` and `chunk_refs`: references to chunks, in `columns`; `segments`: those of long arrays,
   read when needed; `layers`: older and newer references of one array; `merges`: older ones, restated by a later
   commit.
4. `node`: a group or array with its chunks; `nodes` and `paths`: those of a version; `stored_nodes`: those of
   manifests; `levels`: stored nodes, and what changed after them. `tree`: what a commit changes in them, and when
   two commits conflict. `validation`: whether a record can be the next commit. `added_chunks`: the chunks that it
   adds.
5. `retention`: which versions to keep, the ledger of living versions, and what a garbage collection may delete.
   `patterns`: globs over paths.
"""
