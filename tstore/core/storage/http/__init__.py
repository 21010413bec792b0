"""Objects on an HTTP server: reading from any that serves files, writing to `tstore serve`.

1. `store`: the storage.
2. `session`: connections, redirects and tokens. `tokens`: which server may receive which token.
3. `responses`: the head of a response, checked before its body is read. `body`: the body, received into the
   caller's memory, bounded in size and time. `passes`: reads from servers that ignore `Range`.
"""
