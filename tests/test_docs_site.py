"""The documentation as a site: it builds without a warning, its links lead somewhere, its reference is fresh."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from foveal.config.keys import known_keys
from scripts.docs_screenshots import MOST_BYTES, PICTURES
from tests.docs_support import DOCUMENTS, ROOT, links, text_of


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("material", "mkdocs_static_i18n"):
        pytest.importorskip(package, reason="pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_site_builds_without_a_warning_in_both_languages(site: Path) -> None:
    assert '<html lang="en"' in (site / "index.html").read_text(encoding="utf-8")
    assert "<title>快速开始 - Foveal</title>" in (site / "zh" / "index.html").read_text(encoding="utf-8")


def test_a_page_without_a_translation_is_shown_in_english(site: Path) -> None:
    assert not (ROOT / "docs" / "zh" / "configuration.md").exists()
    assert (site / "zh" / "configuration" / "index.html").is_file()


def test_links_out_of_the_pages_become_paths(site: Path) -> None:
    page = (site / "rollouts" / "index.html").read_text(encoding="utf-8")
    assert "script (<code>benchmarks/vllm_rollout.py</code>)" in page


def test_pages_ask_no_other_server(site: Path) -> None:
    loaded = re.compile(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?://[^\"\s>]+)")
    for page in ("index.html", "zh/first_run/index.html", "configuration/index.html"):
        assert loaded.findall((site / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    files = [link.partition("#")[0] for link in links(document) if "://" not in link]
    assert [file for file in files if not ((ROOT / document).parent / file).exists()] == []


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if "zh" in name])
def test_chinese_pages_lead_to_chinese_ones(document: str) -> None:
    pages = [((ROOT / document).parent / link.partition("#")[0]).resolve() for link in links(document)]
    assert [page.name for page in pages if (page.parent / "zh" / page.name).is_file()] == []


def test_pictures_of_the_script_are_those_on_the_pages() -> None:
    assert set(PICTURES) == {path.name for path in (ROOT / "docs" / "images").iterdir()}
    shown = [re.findall(r"!\[[^\]]+\]\(\S*\bimages/([^)]+)\)", text_of(document)) for document in DOCUMENTS]
    assert set(PICTURES) == {name for names in shown for name in names}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_small(name: str) -> None:
    assert (ROOT / "docs" / "images" / name).stat().st_size < MOST_BYTES


def test_both_languages_show_the_same_pictures() -> None:
    english, chinese = (re.findall(r"images/([\w.]+)\)", text_of(f"docs/{name}")) for name in ("view.md", "zh/view.md"))
    assert english == chinese


def test_reference_of_the_configuration_is_fresh() -> None:
    done = subprocess.run([sys.executable, "scripts/config_reference.py", "--check"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


def test_reference_names_every_key() -> None:
    page = text_of("docs/configuration.md")
    sections = {part.partition("`")[0]: part for part in re.split(r"^##+ `", page, flags=re.M)[1:]}
    for name, key in known_keys().items():
        section, _, leaf = name.rpartition(".")
        assert f"`{leaf}`" in sections[section]
        assert key.description, f"{name} has no description"
