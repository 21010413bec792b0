"""An S3 server for tests: moto in a separate process.

moto looks for an object and stores the new one in separate steps, so two simultaneous PUTs with `If-None-Match: *`
could both succeed. S3 admits one, and so does this server: it handles one PUT of an object at a time.
"""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.support import processes

BUCKET = "checkpoints"
FULL = "full"
"""The prefix of 1005 objects, `txn/1/pack-0000` and so on."""

_SERVE = """
    import sys, warnings
    warnings.simplefilter("ignore")
    import logging
    logging.disable()
    import threading
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer
    put_object, lock = S3Response.put_object, threading.Lock()
    def put_one_at_a_time(response):
        with lock:
            return put_object(response)
    S3Response.put_object = put_one_at_a_time
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    bucket, folder = sys.argv[1:]
    sys.stdin.readline()
    from moto.s3.models import s3_backends
    from moto.core import DEFAULT_ACCOUNT_ID
    for number in range(1005):  # one request per object would take seconds
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(bucket, f"{folder}/txn/1/pack-{number:04d}", b"x")
    print("ready", flush=True)
    sys.stdin.read()
"""


class S3Server(NamedTuple):
    """The address of the server, which has one bucket, `BUCKET`."""

    host: str
    port: int

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def options(self) -> dict[str, Any]:
        """The storage_options for `s3://…` URLs; the server accepts any credentials."""
        return options(self.endpoint)

    @property
    def environment(self) -> dict[str, str]:
        """The same options as environment variables."""
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
