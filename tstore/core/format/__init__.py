"""The format of a store: object names, serialization, and the rules that objects must follow; pure, no I/O.

1. The modules here are the base of the others. `layout`: the names of all objects. `bounds`: the maximum size of
   each object and of its parts. `arguments`: what callers may store. `paths`: paths of nodes; `patterns`: globs
   over them. `checksums`: checksums of objects and chunks. `frame`: the kind, format version and checksum of every
   metadata object. `tree_document`: the structure of a saved tree; `tree_parts`: parts of it. `plain_text`: sizes
   and tables as text, numbers in JSON.
2. `arrays/`: one array, without its values: data type, chunk grid, codecs and metadata, and what an index selects.
3. `objects/`: metadata objects, which are records, roots, fragments and manifests with their references to chunks.
4. `tree/`: the tree of a version, the changes of a commit, conflicts, validation and retention.

Each of these imports only from those before it.
"""
