"""What the README and the documents say: commands that load, links that lead somewhere, snippets that run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from foveal.config import load_config

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", "README_zh.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.S)


def commands(document: str) -> list[list[str]]:
    """Every command of the document's shell blocks, comments and line continuations resolved."""
    found = []
    for block in blocks(document, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split("&&"):
                words = shlex.split(command, comments=True)
                if words:
                    found.append(words)
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    missing = [link for link in links if not ((ROOT / document).parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("document", ["README.md", "README_zh.md", "docs/lora.md", "docs/scaling.md"])
def test_commands_are_ones_that_there_are(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    makefile = (ROOT / "Makefile").read_text()
    found = commands(document)
    for words in found:
        match words:
            case ["make", target]:
                assert f"\n{target}: " in makefile
            case ["foveal", "train", *arguments]:
                load_config(arguments)
            case ["foveal", "eval", _, *arguments]:
                load_config([*(a for a in arguments if a != "…"), "trainer.val_only=true"])
            case ["foveal", "check", "--parity", *arguments]:
                load_config([a for a in arguments if a != "…"])
            case ["python", "-m", module, *_]:
                assert (ROOT / (module.replace(".", "/") + ".py")).exists()
            case ["sbatch", *options, "config=examples/my_vlm.yaml" as file, arguments]:
                assert (ROOT / options[-1]).exists()
                load_config([file, arguments])
            case ["kubectl", "apply", "-f", script] | ["python", script, *_]:
                assert (ROOT / script).exists()
    assert {words[0] for words in found} >= (
        {"foveal"} if document.startswith("docs/") else {"make", "foveal", "python"}
    )


def test_both_languages_give_the_same_commands_and_figures() -> None:
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README_zh.md"))
    assert commands("README.md") == commands("README_zh.md")
    figures = [re.findall(r"^\| \d \|.*$", text, re.M) for text in (english, chinese)]
    assert figures[0] == figures[1] and len(figures[0]) == 3


def test_snippets_of_the_algorithms_page_run() -> None:
    snippets = blocks("docs/algorithms.md", "python")
    assert snippets
    space: dict[str, object] = {}
    for snippet in snippets:
        exec(snippet, space)
