"""Bytes by key: the storage under a store. It knows nothing of arrays or commits.

1. `objects`: the terms: keys, durability, capabilities. `base`: the interface, of which most is derived: `leading`
   and `listing` by single requests, `packs` and `upload` by objects filled in memory.
2. `memory` and `local/`: storage without a server. `watch`: waiting for new objects in a folder.
3. `http/`, `gcs/`, `s3/`, `fsspec`: storage behind a network. `pace`: the time of a request. `room`: the memory of
   objects that are read whole. `secret_file`: permissions of a file of tokens.
4. `wrapper`: the base of wrappers. `retry`, `concurrency`, `trace`; `remote`: all of them, on the I/O loop.
5. `cache/`: a local folder in front of any storage.
6. `connect`: from a URL to its storage. `probe`: whether that storage creates exclusively.
"""
