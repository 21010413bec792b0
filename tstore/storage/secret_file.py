"""Permissions of a local file of secrets."""

from __future__ import annotations

import os
import stat

__all__ = ["exposed_mode"]


def exposed_mode(about: os.stat_result) -> str | None:
    """Return the mode, in octal digits, of a file that users besides its owner may read; None if none may.

    As with the keys of other servers, the group may read a file of root: so a container that does not run as root
    reads a secret that its orchestrator mounts for its group.
    """
    of_root = about.st_uid == 0 != os.geteuid()
    exposed = about.st_mode & (0o037 if of_root else 0o077)
    return f"{stat.S_IMODE(about.st_mode):04o}" if exposed else None
