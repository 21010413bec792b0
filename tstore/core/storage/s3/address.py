"""URLs of stores on S3: a bucket, or the ARN of an access point, and a path."""

from __future__ import annotations

import re

from tstore.core.storage.objects import checked_key
from tstore.errors import InvalidArgument

__all__ = ["split_url"]

_NAME = r"[a-zA-Z0-9-]{1,63}"
_ARN = re.compile(  # of an access point, which takes the place of a bucket
    rf"arn:[a-z-]+:s3[a-z-]*:[a-z0-9-]*:[0-9]*:(?:outpost[/:]{_NAME}[/:])?accesspoint[/:][a-zA-Z0-9.-]{{1,63}}"
)
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")


def split_url(url: str) -> tuple[str, str]:
    """Return the bucket, or the ARN of an access point, and the path below it without slashes at its ends."""
    rest = url.partition("://")[2]
    arn = _ARN.match(rest)
    bucket = arn[0] if arn is not None else rest.partition("/")[0]
    prefix = rest[len(bucket) :]
    if (arn is None and not _BUCKET.fullmatch(bucket)) or prefix[:1] not in ("", "/"):
        shown = "" if "@" in url else f"{url!r:.200} has no valid bucket: "  # before the @ may be a password
        raise InvalidArgument(
            f"{shown}the URL of a store on S3 is s3://bucket/path, or s3://arn:…:accesspoint/name/path; "
            "credentials go into storage_options, as key and secret, or into the environment"
        )
    prefix = prefix.strip("/")
    return bucket, checked_key(prefix, f"s3://{bucket}") if prefix else ""
