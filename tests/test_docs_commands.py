"""What README and pages say can be done: commands and options exist, settings load, snippets run, messages are real."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import yaml

from foveal.cli import main
from foveal.config import load_config
from foveal.config.keys import known_keys
from foveal.config.schema_data import ADVANTAGE_ESTIMATORS
from foveal.config.schema_worker import POLICY_LOSSES
from foveal.config.yaml_text import read_value
from foveal.errors import FovealError
from foveal.models.families import FAMILIES
from tests.docs_support import DOCUMENTS, ROOT, blocks, commands, inline_code, inline_commands, links, prose, text_of

FOREIGN_FILES = {"sft.yaml"}
"""Files on the pages that belong to another program."""
WALKED = {"docs/first_run.md", "docs/zh/first_run.md", "docs/view.md", "docs/zh/view.md"}
"""Pages whose Python needs a model or a run: `test_docs_first_run.py` runs it."""
SNIPPETS = ["docs/algorithms.md", "docs/zh/algorithms.md", "docs/rewards.md", "docs/zh/rewards.md"]
"""Pages whose Python runs as it is, a block after the other."""
ENGLISH = [name.replace("/zh/", "/") for name in DOCUMENTS if "/zh/" in name]

Check = Callable[[list[str], str], None]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_and_their_options_exist(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in blocks(document):
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    for name in ("examples", "scripts", "benchmarks", "foveal", "requirements.txt", "environment.yml", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for words in commands(document) + inline_commands(document):
        try:
            _check_command(words)
        except (AssertionError, FovealError) as error:
            pytest.fail(f"{document}: {' '.join(words)}\n{error}")


def _check_command(words: list[str]) -> None:
    match words:
        case ["make", *targets]:
            assert all(f"\n{target}: " in Path("Makefile").read_text() for target in targets)
        case ["foveal"] | ["foveal", "--help" | "--version"]:
            pass
        case ["foveal", command, *arguments]:
            _check_foveal(command, arguments)
        case ["python" | "python3", "-m", "verl.trainer.main", *arguments]:
            _check_settings(arguments)
        case ["python" | "python3", "-m", module, *arguments]:
            file = Path(f"{module.replace('.', '/')}.py")
            assert file.is_file()
            _check_options(arguments, file.read_text(encoding="utf-8"))
            _check_settings([argument for argument in arguments if re.match(r"[a-z_.]+=", argument)])
        case ["python" | "python3", "scripts/model_merger.py", *arguments]:
            _check_foveal("merge", arguments)
        case ["python" | "python3", script, *arguments]:
            assert Path(script).is_file(), f"there is no {script}"
            _check_options(arguments, Path(script).read_text(encoding="utf-8"))
        case ["bash", script, *arguments]:
            assert Path(script).is_file() or "…" in script
            _check_settings(["config=examples/config.yaml", *arguments])
        case ["pip", "install", *packages]:
            for package in packages:
                _check_package(package)
        case ["conda", "env", "create", "-f", file] | ["llamafactory-cli", "train", file]:
            assert Path(file).is_file()
        case ["sbatch", *options, config, arguments]:
            assert Path(options[-1]).is_file()
            _check_settings([config, arguments])
        case ["kubectl", "apply", "-f", file]:
            assert Path(file).is_file()
        case ["export", _] | ["ray", "start" | "stop", *_]:
            pass
        case ["mkdir" | "cd" | "cp" | "." | "curl" | "conda" | "docker" | "mkdocs", *_] | ["vllm", "serve", *_]:
            pass
        case _:
            raise AssertionError("a command that nobody has checked: add it here")


def _check_foveal(command: str, arguments: list[str]) -> None:
    _check_options(arguments, _help(command))
    settings = [argument for argument in arguments if re.match(r"[\w.]+=", argument)]
    if command == "eval":
        settings.append("trainer.val_only=true")
    if command in ("train", "eval", "check", "plan", "quickstart"):
        _check_settings(settings)
    else:
        assert not settings, f"foveal {command} takes no settings"


def _check_settings(arguments: list[str]) -> None:
    """Loads them; `config=…` and the reader's own file stand for `examples/my_vlm.yaml`."""
    known = [re.sub(r"config=(…|my\.yaml)$", "config=examples/my_vlm.yaml", one) for one in arguments]
    load_config(["worker.rollout.n=8", *(one for one in known if not one.endswith("…") and one != "key=value")])


def _check_options(arguments: list[str], told: str) -> None:
    missing = [word for word in arguments if word.startswith("--") and not re.search(rf"{word}\b", told)]
    assert not missing, f"no option {', '.join(missing)}"


@cache
def _help(command: str) -> str:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        assert main([command, "--help"]) == 0
    assert out.getvalue(), f"foveal {command} --help says nothing"
    return out.getvalue()


def _check_package(package: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*)\]", package))):
        assert extra in project["optional-dependencies"], f"no extra {extra}"
    if package.endswith(".txt"):
        assert (ROOT / package).is_file()
    else:
        assert package in ("-e", "-r") or package.startswith(("foveal", "."))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_yaml_loads(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "of no judge")
    for block in blocks(document):
        if block.language != "yaml":
            continue
        if block.title in FOREIGN_FILES:
            assert yaml.safe_load(block.text)
            continue
        file = tmp_path / "fragment.yaml"
        file.write_text(block.text, encoding="utf-8")
        load_config([f"config={file}", "worker.rollout.n=8"])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_settings_in_the_text_are_allowed(document: str) -> None:
    """`worker.rollout.n=8`, and also with the last parts of the name only, as `optim.strategy=adamw_bf16`."""
    wrong = []
    for code in inline_code(document):
        for name, value in re.findall(r"(?:^| )([a-z_][a-z_0-9.]*)=(\[[^\]]*\]|\{[^}]*\}|\S+)", code):
            if name in ("config", "key") or "…" in value or "(" in code:
                continue
            keys = [key for full, key in known_keys().items() if f".{full}".endswith(f".{name}")]
            if not any(key.accepts(read_value(key.name, value)) for key in keys):
                wrong.append(f"{name}={value}")
    assert not wrong


def test_every_page_with_python_is_run() -> None:
    assert {name for name in DOCUMENTS if any(block.language == "python" for block in blocks(name))} == {
        *WALKED,
        *SNIPPETS,
    }


@pytest.mark.parametrize("document", SNIPPETS)
def test_snippets_run(document: str) -> None:
    space: dict[str, object] = {}
    for block in blocks(document):
        if block.language == "python":
            exec(block.text, space)


@pytest.mark.parametrize("document", ["docs/troubleshooting.md", "docs/zh/troubleshooting.md", "docs/from_easyr1.md"])
def test_quoted_messages_are_in_the_code(document: str) -> None:
    corpus = _messages()
    quoted = [line for block in blocks(document) if block.language == "text" for line in block.text.splitlines()]
    assert quoted
    for line in quoted:
        for piece in re.split(r"…|[.,:;] ", line):
            piece = piece.strip(" .,:;()=")
            if len(piece) >= 8 and piece not in known_keys():
                assert piece in corpus, f"{document} quotes {piece!r}, which no code says"


@cache
def _messages() -> str:
    """All texts in the code, a line each, with … for what is filled in."""
    texts: list[str] = []
    for path in (ROOT / "foveal").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(_part(part, constants) for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(" ".join(text.split()) for text in texts)


def _part(part: ast.expr, constants: dict[str, object]) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    value = part.value
    if isinstance(value, ast.IfExp) and isinstance(value.body, ast.Constant):
        return str(value.body.value)
    if isinstance(value, ast.Name) and isinstance(constants.get(value.id), str):
        return str(constants[value.id])
    return "…"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_named_in_the_text_exist(document: str) -> None:
    start = r"(?:foveal|tests|benchmarks|scripts|examples)/[\w./-]+\.(?:py|yaml|md|jinja|sh)"
    named = [code for code in inline_code(document) if re.fullmatch(start, code)]
    assert [name for name in named if not (ROOT / name).exists() and "NAME" not in name] == []


def test_pages_name_every_algorithm_and_model_family() -> None:
    assert {*ADVANTAGE_ESTIMATORS, *POLICY_LOSSES} <= set(inline_code("docs/algorithms.md"))
    section = text_of("docs/contributing.md").partition("## A new model family\n\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", section)) - {"model_type"} == set(FAMILIES)


@pytest.mark.parametrize("document", ENGLISH)
@pytest.mark.parametrize("part", ["headings", "rows", "blocks", "code", "links"])
def test_chinese_pages_hold_what_the_english_ones_do(document: str, part: str) -> None:
    """Their words are free; a fact that only one language has mostly shows in one of these."""
    english, chinese = (_parts(name)[part] for name in (document, document.replace("docs/", "docs/zh/")))
    assert english == chinese


def _parts(document: str) -> dict[str, Sequence[object]]:
    remark = re.compile(r' *#.*|"""[^"]*"""')
    lines = prose(document).splitlines()
    figures = r"\d(?:[\d.,]*\d)?"
    return {
        "headings": [line.split()[0] for line in lines if line.startswith("#")],
        "rows": [(line.count("|"), sorted(re.findall(figures, line))) for line in lines if line.startswith("|")],
        "blocks": [(block.language, block.title, remark.sub("", block.text)) for block in blocks(document)],
        "code": sorted(set(inline_code(document))),
        "links": sorted(link.replace("../", "") for link in links(document)),
    }


def test_both_readmes_give_the_same_commands_and_figures() -> None:
    assert commands("README.md") == commands("README_zh.md")
    figures = [re.findall(r"^\| \d \|.*$", text_of(name), re.M) for name in ("README.md", "README_zh.md")]
    assert figures[0] == figures[1] and len(figures[0]) == 3
