"""Every figure in a document or in the help of a command is listed in `claims.toml`, beside what holds it.

An entry is a section: its figures in order, then the tests of it, or the command that measures them; "open" where
it has not been looked up what holds them.
"""

from __future__ import annotations

import re
import tomllib

import click
import pytest

from tests.support.documents import DOCUMENTS, ROOT
from tstore.cli.commands import cli

CLAIMS = tomllib.loads((ROOT / "tests" / "claims.toml").read_text())
_FIGURE = re.compile(r"(?<![\w.\-])\d[\d.,^]*(?<![.,])")


def sections() -> dict[str, dict[str, str]]:
    """Return the figures of each document and of the help of all commands, by section; without code and links."""
    texts = {
        document.name: re.split(r"^#+ (.+)\n", document.prose, flags=re.M)[1:]
        for document in DOCUMENTS
        if document.name not in ("CHANGELOG.md", "tests/README.md")
    }
    assert isinstance(cli, click.Group)
    texts["tstore --help"] = []
    for name, command in sorted(cli.commands.items()):
        helps = [command.help, *(p.help for p in command.params if isinstance(p, click.Option))]
        texts["tstore --help"] += [name, " ".join(text for text in helps if text)]
    found = {}
    for document, parts in texts.items():
        plain = [re.sub(r"`[^`]*`|\]\([^)]*\)", "", text) for text in parts[1::2]]
        figures = {title: " ".join(_FIGURE.findall(text)) for title, text in zip(parts[::2], plain, strict=True)}
        found[document] = {title: text for title, text in figures.items() if text}
    return found


@pytest.mark.parametrize("document", sections())
def test_every_figure_is_listed(document: str) -> None:
    listed = {title: entry[0] for title, entry in CLAIMS.get(document, {}).items()}
    for title, figures in sections()[document].items():
        advice = f'in [{document!r}] of tests/claims.toml, write "{title}" = ["{figures}", <test>]'
        assert listed.get(title) == figures, advice
    assert listed.keys() <= sections()[document].keys(), "remove the entries of sections without figures"


def test_what_holds_a_figure_exists() -> None:
    for document in CLAIMS.values():
        for title, (_, *proofs) in document.items():
            assert proofs, title
            for proof in proofs:
                module = re.fullmatch(r"python -m ([\w.]+).*", proof)
                path = module[1].replace(".", "/") if module else proof
                assert proof == "open" or (ROOT / path).exists() or (ROOT / f"{path}.py").exists(), proof
