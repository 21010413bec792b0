"""Who may read a local file of secrets."""

from __future__ import annotations

import os
import stat

__all__ = ["exposed_mode"]


def exposed_mode(about: os.stat_result) -> str | None:
    """Return the mode of a file that others than its owner may read, in octal digits; None where nobody else may.

    As with the keys of other servers, the group may read what belongs to root: so a container that is not root's
    reads a secret that its orchestrator mounts for its group.
    """
    of_root = about.st_uid == 0 != os.geteuid()
    exposed = about.st_mode & (0o037 if of_root else 0o077)
    return f"{stat.S_IMODE(about.st_mode):04o}" if exposed else None
