"""Objects of an HTTP server: any that serves files for reading, `tstore serve` also for writing.

1. `store`: the objects.
2. `session`: connections, redirects and tokens. `tokens`: which server may see which token.
3. `responses`: status, length and range of a response, checked before its body is read. `reply`, `body`: the body,
   bounded in size and time, received into the caller's memory. `passes`: servers that ignore `Range`.
"""
