"""The format of a store: names of objects, bytes to objects and back, and the rules between objects; pure, no I/O.

1. This package has what the others build on. `layout`: the names of all objects. `bounds`: the maximum size of
   each object and of its parts. `arguments`: what callers may store. `paths`: those of nodes; `patterns`: globs
   over them. `checksums`: of objects and chunks. `frame`: the kind, format version and checksum around every
   metadata object. `tree_document`: the structure of a saved tree; `tree_parts`: parts of it. `plain_text`: sizes
   and tables as text, numbers in JSON.
2. `arrays/`: one array, without its values: data type, chunk grid, codecs and metadata, and what an index selects.
3. `objects/`: metadata objects, which are records, roots, fragments and manifests with their references to chunks.
4. `tree/`: the tree of a version, what a commit changes in it, conflicts, validation and retention.

Each of these imports only from those before it.
"""
