"""Numbers of bytes as text, for the command line and the page."""

from __future__ import annotations

__all__ = ["format_size"]


def format_size(size: float) -> str:
    """Format a number of bytes with units of powers of 1000."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:  # above, rounding would show 1000.0
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"
