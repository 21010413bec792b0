"""`python -m tstore`: the command line."""

from __future__ import annotations

import sys

from tstore.cli import main

if __name__ == "__main__":
    sys.exit(main())
