"""Storage options from the environment, for the command line and for programs that open stores by their URL alone.

`TSTORE_STORAGE_OPTIONS` is a JSON object that maps the beginnings of URLs to options:

    {"gs://": {"retry_timeout": 600}, "s3://checkpoints": {"endpoint_url": "https://minio:9000"}}

So no server gets the secrets of another. Of several beginnings that give the same option the longest counts;
`storage_options` count before all of them. A warning names a remote URL to which none applies.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
from exmy.user_warnings import warn

from tstore.errors import InvalidArgument

__all__ = ["VARIABLE", "options_for"]

VARIABLE = "TSTORE_STORAGE_OPTIONS"


def options_for(url: str) -> dict[str, Any]:
    """Return the options that the environment has for a URL; raise `InvalidArgument` if they can't be parsed."""
    if not (text := os.environ.get(VARIABLE)):
        return {}
    try:
        by_prefix = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
    except msgspec.DecodeError as error:  # the text itself may have a secret
        raise InvalidArgument(
            f'{VARIABLE}: {error}; expected JSON such as {{"gs://bucket": {{"retry_timeout": 600}}}}'
        ) from None
    for prefix in by_prefix:
        if "://" not in prefix:
            raise InvalidArgument(
                f"{VARIABLE}: {prefix!r:.60} is not the beginning of a URL, such as gs:// or s3://bucket"
            )
    options: dict[str, Any] = {}
    applies = False
    for prefix in sorted(by_prefix, key=len):
        if f"{url}/".startswith(f"{prefix.removesuffix('/')}/" if not prefix.endswith("://") else prefix):
            options |= by_prefix[prefix]
            applies = True
    scheme, is_url, _ = url.partition("://")
    if by_prefix and not applies and is_url and scheme not in ("file", "memory"):
        shown = f"{scheme}://…" if "@" in url else url  # what is before the @ may be a password
        warn(f"{VARIABLE} has no options for {shown}: it has only those for {', '.join(by_prefix)}")
    return options
