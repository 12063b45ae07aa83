"""README and documentation pages as tests read them: blocks of code, commands, inline code."""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    "README.md",
    "README_zh.md",
    *sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md")),
]

_BLOCK = re.compile(r"^( *)```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^\1```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A block of code; one with a title is a file that later commands on the page use."""

    language: str
    title: str
    text: str


@cache
def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@cache
def blocks(document: str) -> list[Block]:
    found = _BLOCK.findall(text_of(document))
    return [Block(language, title, textwrap.dedent(text)) for _, language, title, text in found]


def prose(document: str) -> str:
    """The page without its blocks."""
    return _BLOCK.sub("", text_of(document))


def inline_code(document: str) -> list[str]:
    """Texts between backticks outside of blocks, line breaks as blanks."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(document))]


def links(document: str) -> list[str]:
    """What links and pictures outside of blocks point to, with anchors."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(document))


def commands(document: str) -> list[list[str]]:
    """Every command of the page's shell blocks; comments and line continuations resolved."""
    found: list[list[str]] = []
    for block in blocks(document):
        if block.language != "bash" and not (block.language == "" and block.text.startswith("foveal ")):
            continue
        for line in _logical_lines(block.text):
            if not re.match(r"[A-Z]+=", line):  # a variable is no command
                found += _split(shlex.split(line, comments=True))
    return found


def inline_commands(document: str) -> list[list[str]]:
    """Commands of the project in inline code, as `foveal check config=…`."""
    starts = ("foveal ", "python -m ", "python scripts/", "python benchmarks/", "python3 ", "bash examples/", "make ")
    return [shlex.split(code) for code in inline_code(document) if code.startswith(starts)]


def _logical_lines(text: str) -> list[str]:
    """Lines, of which those that end in a backslash or within quotes go on."""
    lines: list[str] = []
    rest = ""
    for line in text.replace("\\\n", " ").splitlines():
        rest = f"{rest}\n{line}" if rest else line
        try:
            shlex.split(rest, comments=True)
        except ValueError:  # a quote is open
            continue
        lines.append(rest)
        rest = ""
    assert not rest, f"a quote is never closed: {rest}"
    return lines


def _split(words: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == "&&":
            parts.append([])
        else:
            parts[-1].append(word)
    return [part for part in parts if part]
