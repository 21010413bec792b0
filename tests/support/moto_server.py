"""A server of S3 for tests: moto, in a process of its own, on a port that the system chose."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.support import processes

BUCKET = "checkpoints"
FULL = "full"
"""The prefix below which 1005 objects lie, `txn/1/pack-0000` and so on."""

_SERVE = """
    import sys, warnings
    warnings.simplefilter("ignore")
    import logging
    logging.disable()
    from moto.server import ThreadedMotoServer
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    bucket, folder = sys.argv[1:]
    sys.stdin.readline()
    from moto.s3.models import s3_backends
    from moto.core import DEFAULT_ACCOUNT_ID
    for number in range(1005):  # a request for each would take seconds
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(bucket, f"{folder}/txn/1/pack-{number:04d}", b"x")
    print("ready", flush=True)
    sys.stdin.read()
"""


class S3Server(NamedTuple):
    """Where it listens; it has one bucket, `BUCKET`."""

    host: str
    port: int

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def options(self) -> dict[str, Any]:
        """The storage_options of `s3://…` there; the server believes any credentials."""
        return options(self.endpoint)

    @property
    def environment(self) -> dict[str, str]:
        """The same as environment variables."""
        names = {"endpoint_url": "AWS_ENDPOINT_URL", "key": "AWS_ACCESS_KEY_ID", "secret": "AWS_SECRET_ACCESS_KEY"}
        return {names[option]: value for option, value in self.options.items()}


def options(endpoint: str) -> dict[str, Any]:
    return {"endpoint_url": endpoint, "key": "tester", "secret": "not-a-secret"}


@contextlib.contextmanager
def running() -> Iterator[S3Server]:
    process = processes.start(_SERVE, BUCKET, FULL)
    with processes.running(process):
        server = S3Server("127.0.0.1", int(processes.line(process)))
        make = urllib.request.Request(f"{server.endpoint}/{BUCKET}", method="PUT")
        urllib.request.urlopen(make, timeout=processes.DEADLINE).close()
        assert process.stdin is not None
        process.stdin.write("the bucket is made\n")
        process.stdin.flush()
        assert processes.line(process) == "ready"
        yield server
