"""Every figure in the README, the guides and the help of commands is in `claims.toml`, beside what holds it.

A figure is a number in digits, or a number word before a unit or after "at most" and the like. Not counted are
code, tables, headings, numbers of versions, steps and standards, sizes after "such as", and digits in words.
"""

import importlib.util
import re
import tomllib

import click
import pytest

from tests.support.documents import DOCUMENTS, ROOT
from tstore.cli.commands import cli

CLAIMS: dict[str, dict[str, list[str]]] = tomllib.loads((ROOT / "tests" / "claims.toml").read_text())

_WORD = r"\b(?:one|two|three|four|five|six|seven|eight|nine|ten|twelve|half|hundred|thousand)\b"
_UNIT = r"(?:seconds?|minutes?|hours?|round trips?|times|intervals|a million)\b"
_BOUND = r"\b(?:at most|only|up to|at least|less than|about|draws)"
_DIGITS = r"(?<![\w.,\-/^−±])\d[\d.,^]*(?<![.,])"
_FIGURE = re.compile(rf"{_DIGITS}|{_WORD} (?={_UNIT})|{_BOUND} {_WORD}|\bmillion\b|\btwice (?=that|the)")
_NAMES = r"(?:[Vv]ersion|step|ISO|arXiv|Python|HTTP/|such as) ?(?:\d[\d.]*|\x22.*?\x22)"
_OTHER = re.compile(rf"`[^`]*`|\]\([^)]*\)|\(\d\)|{_NAMES}|^\d+\. ", re.M)


def texts() -> dict[str, str]:
    """Return the prose of each document, with a line for each paragraph."""
    assert isinstance(cli, click.Group)
    parts = [part for command in (cli, *cli.commands.values()) for part in (command, *command.params)]
    helps = [part.help for part in parts if isinstance(part, click.Command | click.Option)]
    texts = {"help": "\n\n".join(filter(None, helps))}
    for document in DOCUMENTS:
        if document.name == "README.md" or document.name.startswith("examples/guides/"):
            texts[document.name] = re.sub(r"^ *(?:#|\|).*$", "", document.prose, flags=re.M)
    paragraphs = {name: re.split(r"\n\s*\n|\n(?= *(?:- |\d+\. ))", text) for name, text in texts.items()}
    return {name: "\n".join(" ".join(part.split()) for part in parts) for name, parts in paragraphs.items()}


@pytest.mark.parametrize("name", texts())
def test_every_figure_is_listed(name: str) -> None:
    rest = texts()[name]
    for quote in sorted(CLAIMS.get(name, {}), key=len, reverse=True):
        assert quote in rest, f"{name} has no {quote!r}: correct or remove it in tests/claims.toml"
        rest = rest.replace(quote, " … ")
    for line in _OTHER.sub(" … ", rest).splitlines():
        if figure := _FIGURE.search(line):
            near = line[max(0, figure.start() - 60) : figure.end() + 60]
            pytest.fail(f"{figure[0]!r} of {near!r}: in [{name!r}] of tests/claims.toml, add its quote = [tests]")


def test_what_holds_a_figure_exists() -> None:
    proofs = sorted({proof for quotes in CLAIMS.values() for proofs in quotes.values() for proof in proofs})
    assert [proof for proof in proofs if not holds(proof)] == []


def holds(proof: str) -> bool:
    (path, _, function), (module, _, condition) = proof.partition("::"), proof.partition(": ")
    if function:
        return re.search(rf"^(?:async )?def {function}\(", (ROOT / path).read_text(), re.M) is not None
    if condition:
        return bool(eval(condition, dict(vars(importlib.import_module(module)))))
    return importlib.util.find_spec(proof.removeprefix("python -m ").split()[0]) is not None
