"""An HTTP/1.1 server for a store: `tstore serve STORE`, or `async with Server("folder") as server: …`.

1. `app`: the protocol, request by request. `browsers`: the page for browsers, which `service.page` implements.
2. `access`: tokens and scopes; `kinds`: the keys and metadata that a server accepts.
3. `writes`: writes and deletions. `admission` validates them against the log (`log_state`), with the `manifests`
   of a record; `chunk_checks` validates chunks, `restoring` the replacements of damaged objects. `served`: the
   storage behind the server; `folder`: the same for a local folder.
4. `quotas`, `transfers`: the limits of clients, and the order in which they are served; `bodies`: the bodies of
   requests and responses; `responses`: JSON responses and refusals.
5. `server`: configuration, start and shutdown; `listener`, `connections`: incoming connections; `access_log`.
"""

from __future__ import annotations

from tstore.service.server.access import Access, Scope
from tstore.service.server.access_log import JsonLines, logging_to
from tstore.service.server.browsers import PAGE, Page, Visit
from tstore.service.server.quotas import Limits
from tstore.service.server.server import Certificate, Server

__all__ = [
    "PAGE",
    "Access",
    "Certificate",
    "JsonLines",
    "Limits",
    "Page",
    "Scope",
    "Server",
    "Visit",
    "logging_to",
]
