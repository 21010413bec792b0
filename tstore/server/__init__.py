"""A store over HTTP/1.1: `tstore serve STORE`, or `async with Server("folder") as server: …`, at `server.url`.

1. `app`: the dialect: which request gets which answer.
2. `access`: who may do what; `names`, `metadata`: which names and which metadata are taken at all.
3. `storing`: what is taken and removed; `admission`: whether the log allows it, as far as that goes (`standing`);
   `served`, `folder`: open objects, pages and uploads, for any storage and for local files.
4. `transfers`, `shares`, `limits`: what clients may take, and who goes first where they want more; `bodies`,
   `spool`: how bodies come and go; `listings`: names cached between pages.
5. `running`: how it starts and ends; `listening`, `connections`: where clients come in; `responses`, `access_log`.
"""

from __future__ import annotations

from tstore.server.access import Access, Scope
from tstore.server.access_log import JsonLines, written
from tstore.server.limits import Limits
from tstore.server.running import Certificate, Server

__all__ = ["Access", "Certificate", "JsonLines", "Limits", "Scope", "Server", "written"]
