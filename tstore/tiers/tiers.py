"""`tstore.Tiers`: a local store on each host, copies on others, and a durable store."""

from __future__ import annotations

import os
import socket

from tstore.checkpoint.job_store import Job, JobStore, Tiered
from tstore.core.format.arguments import quote
from tstore.errors import InvalidArgument
from tstore.service.server.server import Certificate
from tstore.tiers.peers import route_to
from tstore.tiers.store import Options, TieredStore

__all__ = ["Tiers"]


class Tiers(Tiered):
    """A local store on each host, copies on other hosts, and a durable store, in place of the URL of one store.

    A `Checkpointer` saves each step to the local store of its host, and only now and then to the durable one.
    After a restart, the job goes on from the newest step of which all parts are whole somewhere. Its hosts agree
    on that step through the durable store, wherever they run by then and however many they are.

    Parameters
    ----------
    local
        A folder on local storage, such as one below /dev/shm. All processes of a machine may share it.
    durable
        The URL or path of the store for steps that must survive the loss of the machines. A `Checkpointer` needs
        it to begin, and while it is away saves only to the local store.
    peers
        On how many other hosts to keep a copy of what each host has saved. Without copies, a step is lost with the
        local storage of any host.
    every
        When `should_save` returns True, unless the `Checkpointer` is told: a number of steps.
    durable_every
        Push the first step that is saved at or after each multiple of this number to the durable store. The last
        step is pushed when the `Checkpointer` is closed without an error. By default only that is.
    keep
        How many of the newest steps the local store keeps, at least 2. If hosts save in lockstep, each may lack
        the two newest steps of the others, so with 3 there is always one that all of them have. The memory or
        disk for them is `keep * (1 + peers)` times the part of this host, less what does not change.
    domain
        The failure domain of this host, by default `TSTORE_DOMAIN` from the environment, or the name of the
        machine. Copies are kept in another domain if there are enough.
    address
        The address on which this host serves its local store to the others, by default that of the interface with
        the route to the durable store, or `TSTORE_ADDRESS` from the environment.
    certificate
        The files of a TLS certificate and its key for that server. Without them, what the hosts send each other
        is not encrypted.

    Raises
    ------
    `InvalidArgument`.

    Examples
    --------
    >>> import tempfile
    >>> import tstore.sync as tstore
    >>> folder = tempfile.mkdtemp()
    >>> tiers = tstore.Tiers(local=f"{folder}/local", durable=f"{folder}/durable", every=10, durable_every=100)
    >>> with tstore.Checkpointer(tiers) as checkpoints:
    ...     for step in range(1, 31):
    ...         if checkpoints.should_save(step):
    ...             _ = checkpoints.save(step, {"w": np.full(4, step)})
    >>> tstore.steps(f"{folder}/durable")  # the last one; all others were saved locally
    [30]
    """

    def __init__(
        self,
        local: str | os.PathLike[str],
        durable: str | os.PathLike[str],
        *,
        peers: int = 0,
        every: int | None = None,
        durable_every: int | None = None,
        keep: int = 3,
        domain: str | None = None,
        address: str | None = None,
        certificate: tuple[str, str] | None = None,
    ) -> None:
        for name, value, least in (("peers", peers, 0), ("keep", keep, 2)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidArgument(f"Tiers({name}={quote(value)}): expected an integer of at least {least}")
        for name, steps in (("every", every), ("durable_every", durable_every)):
            if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
                raise InvalidArgument(f"Tiers({name}={quote(steps)}): expected a number of steps, or None")
        path = os.fspath(local).removeprefix("file://")
        if not path or "://" in path:
            raise InvalidArgument(f"Tiers(local={quote(local)}): expected a folder on this machine")
        self.local = os.path.abspath(path)
        self.durable = os.fspath(durable)
        if "://" not in self.durable:
            folder = os.path.abspath(self.durable)
            if folder == self.local or folder.startswith(f"{self.local}/") or self.local.startswith(f"{folder}/"):
                raise InvalidArgument(
                    f"Tiers(local={quote(local)}, durable={quote(durable)}): one is inside the other; choose two "
                    "folders, on different disks"
                )
        self.peers, self.every = peers, every
        self._options = Options(
            self.local,
            self.durable,
            peers,
            durable_every,
            keep,
            domain or os.environ.get("TSTORE_DOMAIN") or socket.gethostname(),
            address or os.environ.get("TSTORE_ADDRESS") or route_to(self.durable),
            None if certificate is None else Certificate(*certificate),
        )

    def __repr__(self) -> str:
        return f"tstore.Tiers({self.local!r}, {self.durable!r}, peers={self.peers})"

    def job_store(self, job: Job) -> JobStore:
        """Return what a `Checkpointer` of this job saves to and restores from."""
        if self.peers >= job.hosts > 1:
            raise InvalidArgument(
                f"Tiers(peers={self.peers}): each of {job.hosts} hosts has only {job.hosts - 1} others"
            )
        return TieredStore(self._options, job)
