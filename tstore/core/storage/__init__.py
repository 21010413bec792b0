"""Bytes by key: the storage under a store. It knows nothing of arrays or commits.

1. `base`: the interface; a few methods make requests, and the others are derived from them. `objects`: its terms,
   such as keys, durability and capabilities. `packs`: objects filled in memory and then uploaded.
2. `memory` and `local/`: storage without a server. `watch`: waiting for new objects in a local folder.
3. `http/`, `gcs/`, `s3/`, `fsspec`: storage behind a network. `limits`: what a server may cost in time and memory.
4. `wrapper`: the base of wrappers, and a read-only storage. `remote`: the wrappers around a storage behind
   a network. `retry`: the wrapper that repeats requests. `cache`: local files in front of any storage.
5. `connect`: from a URL to its storage, with options of the `environment`. `probe`: a test whether that storage
   creates exclusively.
"""
