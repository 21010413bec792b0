"""What the programs have in common on their command lines."""

from __future__ import annotations

import click


def among(text: str, known: list[str], option: str) -> list[str]:
    """Return the comma-separated names; if the text has none, return all known names."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise click.BadParameter(f"unknown name {unknown[0]!r}; expected {', '.join(known)}", param_hint=option)
    return names or known
