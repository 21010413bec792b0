"""Bytes by key: the backends under a store; nothing here knows of arrays.

1. `base`: what a store asks of a backend; `objects`: the little that is asked of a server, from which `remote`
   makes a backend, with `upload` for what is on its way there.
2. `memory`, `local` (on `newfile` and `local_pack`): backends without a server. `plain`: what a log asks for, done
   with single calls. `watch`: waiting until something appears.
3. `http`, `gcs`, `s3`, `fsspec`: servers of objects; `http_…`, `gcs_…` and `s3_…` are parts of them. `pace`: how
   long a request may take; `room`: the memory of what is read whole; `listing`: lists that end. `secret_file`: who
   may read a file of tokens.
4. `retry`, `limits`, `trace`, `prefix`, `readonly`, `faults`: what stands in front of such objects.
5. `cached`: a backend in front of which a `cache` lies.
6. `url`: from a URL to its backend; `probe`: whether that really creates exclusively.
"""
