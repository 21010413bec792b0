"""The harness of an attack: a server process, honest client processes, and their resource usage."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import shutil
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import trustme

from tests.attacks.case import Broken, check
from tests.attacks.children import Children
from tests.attacks.honest import Site, audit
from tests.attacks.meter import Meter
from tests.attacks.sample_store import SampleStore
from tests.attacks.target import TOKENS, Target
from tests.support import http_server

__all__ = ["MEMORY", "Certificate", "Harness"]

MEMORY = 640 << 20
"""The bound on a server's resident memory: its budget for bodies, plus its own size."""

FILES = 1024 + 512
"""The bound on its open descriptors: its connections, and the files they read."""

AUDIT = 90.0


class Certificate:
    """A certificate for localhost, and the authority that clients trust."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        made = authority.issue_cert("127.0.0.1")
        self.cert, self.key, self.authority = (str(folder / n) for n in ("cert.pem", "key.pem", "ca.pem"))
        made.private_key_pem.write_to_path(self.key)
        for blob in made.cert_chain_pems:
            blob.write_to_path(self.cert, append=True)
        authority.cert_pem.write_to_path(self.authority)
        self.trusting = ssl.create_default_context(cafile=self.authority)
        self.options = ("--tls-cert", self.cert, "--tls-key", self.key)


class Harness:
    """A server of a copy of a store; `fresh` restarts it with a new copy."""

    def __init__(self, template: Path, sample: SampleStore | None, children: Children, seed: int) -> None:
        self.sample = sample
        self.children = children
        self.random = random.Random(seed)
        self.certificate: Certificate | None = None
        self.options: tuple[str, ...] = ()
        self.memory = self.files = self.requests = self.kept = 0
        self.usual = 0.0
        """The seconds of an honest save without an attack, or 0 if not measured yet."""
        self.worn = True
        """Whether the next case must begin with `fresh`."""
        self._template = template
        """The folder to copy: `store`, and files beside it."""
        self._stack = contextlib.ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tstore-attacks-")))
        self.meter: Meter
        self._numbers = itertools.count(1)
        self._serving = contextlib.ExitStack()

    def with_tls(self) -> None:
        """Serve over TLS after the next `fresh`."""
        self.certificate = Certificate(self._folder)

    def fresh(self) -> None:
        """Replace the server by one of a new copy."""
        self._serving.close()
        number = next(self._numbers)
        place = self._folder / str(number) / "store"
        shutil.copytree(self._template, place.parent, symlinks=True)
        self._serving = contextlib.ExitStack()
        self._serving.callback(shutil.rmtree, place.parent, ignore_errors=True)
        self.process, self.target = self._serving.enter_context(self._served(place, self.options))
        self.meter = Meter(self.process.process.pid)
        self._logged = 0
        self.worn = False

    @contextlib.contextmanager
    def _served(self, place: Path, options: tuple[str, ...]) -> Iterator[tuple[http_server.Process, Target]]:
        tls = () if self.certificate is None else self.certificate.options
        with http_server.serving(place, *tls, *options, tokens=TOKENS) as process:
            trusting = None if self.certificate is None else self.certificate.trusting
            yield process, Target(process, place, trusting)

    @contextlib.contextmanager
    def beside(self, *options: str) -> Iterator[Target]:
        """Run another server of the same folder with these options."""
        with self._served(self.target.place, options) as (_, target):
            yield target

    @property
    def newest(self) -> int:
        """The newest version of the served store."""
        return len(list((self.target.place / "commits").iterdir()))

    def next_step(self) -> int:
        """Return a step that has not been saved."""
        return 1000 + next(self._numbers)

    @property
    def site(self) -> Site:
        """The address of the store for honest clients."""
        return Site(self.process.url, None if self.certificate is None else self.certificate.authority)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Measure the server during the block, and check its bounds."""
        self.meter.reset()
        try:
            async with self.meter.watching():
                yield
        finally:
            self.memory, self.files = max(self.memory, self.meter.memory), max(self.files, self.meter.files)
        check(self.process.process.poll() is None, "the server has ended")
        said = f"the server had {self.meter.memory >> 20} MiB resident, expected at most {MEMORY >> 20}"
        check(self.meter.memory <= MEMORY, said)
        check(self.meter.files <= FILES, f"the server had {self.meter.files} files open, expected at most {FILES}")

    async def check_audit(self, step: int | None) -> None:
        """Check that honest clients find everything unchanged and can continue; see `audit`."""
        assert self.sample is not None
        ended = await self.children.run(
            audit, self.site, self.sample.values, self.sample.commits, step, seconds=AUDIT
        )
        check(not ended.error, f"the audit of honest clients failed: {ended.error}")
        check(not ended.result, "; ".join(ended.result or ()))

    def check_log(self) -> None:
        """Check that the server logged no internal error and no token."""
        text = self.process.logged_after(self._logged)
        self._logged += len(text)
        for token in (http_server.READ, http_server.WRITE, http_server.ADMIN):
            check(token.encode() not in text, "the log shows a token")
        for line in text.splitlines():
            if b'"level": "error"' in line or b"Traceback" in line or b'"status": 500' in line:
                with contextlib.suppress(json.JSONDecodeError):
                    raise Broken(f"the server logged {_short(json.loads(line))}")

    def close(self) -> None:
        """Stop the server, and remove its folder."""
        self._serving.close()
        self._stack.close()


def _short(logged: dict[str, object]) -> str:
    """Return the message of a log entry and the end of its traceback."""
    lines = str(logged.get("exception", "")).strip().splitlines()
    place = next((line.strip() for line in reversed(lines) if "tstore" in line), "")
    text = str(logged.get("message") or {k: logged[k] for k in ("method", "path", "status") if k in logged})
    return " | ".join([text[:200], place[:150], *lines[-1:]])[:500]
