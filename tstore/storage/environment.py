"""Storage options from the environment, for the command line and for programs that open stores by their URL alone.

`TSTORE_STORAGE_OPTIONS` is a JSON object that maps the beginnings of URLs to options:

    {"gs://": {"retry_timeout": 600}, "s3://checkpoints": {"endpoint_url": "https://minio:9000"}}

So no server gets the secrets of another. Of several beginnings that give the same option the longest counts;
`storage_options` count before all of them.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

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
    for prefix in sorted(by_prefix, key=len):
        if f"{url}/".startswith(f"{prefix.removesuffix('/')}/" if not prefix.endswith("://") else prefix):
            options |= by_prefix[prefix]
    return options
