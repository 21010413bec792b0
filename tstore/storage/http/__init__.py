"""Objects of an HTTP server: any that serves files for reading, `tstore serve` also for writing.

1. `store`: the storage.
2. `session`: connections, redirects and tokens. `tokens`: which server may see which token.
3. `responses`: the head of a response, checked before its body is read. `body`: the response and its body, bounded
   in size and time, received into the caller's memory (`sink`). `passes`: servers that ignore `Range`.
"""
