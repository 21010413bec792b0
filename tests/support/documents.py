"""The Markdown documents of the repository, their code blocks, links and headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["DOCUMENTS", "README", "ROOT", "Block", "Document"]

ROOT = Path(__file__).resolve().parent.parent.parent


class Block(NamedTuple):
    """A fenced code block: its language and its text."""

    language: str
    text: str


@dataclass(frozen=True)
class Document:
    """A Markdown file, named by its path in the repository."""

    name: str

    @property
    def path(self) -> Path:
        return ROOT / self.name

    @property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def blocks(self) -> list[Block]:
        return [Block(*groups) for groups in re.findall(r"^```(\w*)\n(.*?)^```$", self.text, re.M | re.S)]

    @property
    def prose(self) -> str:
        """The text without code blocks."""
        return re.sub(r"^```.*?^```$", "", self.text, flags=re.M | re.S)

    @property
    def code(self) -> list[str]:
        """The inline code in the prose."""
        return re.findall(r"`([^`]+)`", self.prose)

    @property
    def links(self) -> list[str]:
        return re.findall(r"\]\(([^)\s]+)\)", self.prose)

    @property
    def anchors(self) -> set[str]:
        """The URL fragments of the headings."""
        headings = re.findall(r"^#+ (.+)$", self.prose, re.M)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    def of_language(self, language: str) -> list[str]:
        """Return the texts of the code blocks in a language."""
        return [block.text for block in self.blocks if block.language == language]


README = Document("README.md")
DOCUMENTS = [
    README,
    Document("CHANGELOG.md"),
    Document(".github/CONTRIBUTING.md"),
    Document(".github/SECURITY.md"),
    Document("tests/README.md"),
    Document("codecs/exmy/README.md"),
    Document("codecs/exmy/FORMAT.md"),
    Document("tstore/core/format/FORMAT.md"),
    *(Document(str(path.relative_to(ROOT))) for path in sorted((ROOT / "examples" / "guides").glob("*.md"))),
]
