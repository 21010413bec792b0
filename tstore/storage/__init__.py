"""Bytes by key: the storage under a store. Nothing here knows of arrays or commits.

1. `base`: what a store asks of its storage. `objects`: the little that is asked of an object server, from which
   `remote` makes a whole backend, with `upload` for what is on its way there.
2. `memory` and `local/`: storage without a server. `plain`: what a log asks for, made of single calls. `watch`:
   waiting until an object appears.
3. `http/`, `gcs/`, `s3/`, `fsspec`: object servers. `pace`: how long a request may take. `room`: the memory of
   objects that are read whole. `listing`: listings that end. `secret_file`: who may read a file of tokens.
4. `retry`, `concurrency`, `trace`, `prefix`, `readonly`: wrappers around such objects.
5. `cache/`: a local folder in front of any storage.
6. `connect`: from a URL to its storage. `probe`: whether that storage creates exclusively.
"""
