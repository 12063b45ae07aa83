"""YAML and `key=value` text as plain values and back. What the schema calls text stays as it was written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from foveal.config.keys import known_keys, section_names
from foveal.errors import ConfigError
from foveal.masking import MASK, is_secret, masked, written

_TEXT = "tag:yaml.org,2002:str"
_NULL = "tag:yaml.org,2002:null"
_NULL_WORDS = ("null", "Null", "NULL", "~")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without dates, and with numbers such as 1e-6, which YAML 1.1 takes for text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back to the same values."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def read_yaml_file(path: str) -> tuple[dict[str, Any], list[str]]:
    """Reads a configuration file.

    Returns:
        its mapping, and a line for each key that stands there twice or with dots.

    Raises:
        ConfigError: the file is missing, unreadable, not YAML, or not a mapping.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"config={path}: no such file (looked in {Path.cwd()}); give the path of a YAML file"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"config={path}: cannot be read as UTF-8 text ({error}); give the path of a YAML file"
        ) from None
    try:
        tree, faults = _parse(text, "")
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}, {_place_and_reason(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: lists or mappings lie too deep in each other") from None
    if tree is None:
        return {}, []
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold the sections data, algorithm, worker, trainer; it holds {masked(tree)!r}")
    return tree, [f"{path}, {line}" for line in faults]


def read_value(name: str, text: str) -> Any:
    """The value of `name=text` on the command line.

    Raises:
        ConfigError: the text is not YAML, for a key that isn't text.
    """
    key = known_keys().get(name)
    if not text.strip():
        return "" if key is not None and key.is_text and not key.nullable else None
    if key is not None and key.is_text and not (key.takes_list and text.lstrip().startswith("[")):
        return _plain_text(text)
    try:
        value, faults = _parse(text, name)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}={_shown(name, text)}: {_place_and_reason(error)}") from None
    if faults:
        raise ConfigError(f"{name}={_shown(name, text)}: {'; '.join(faults)}")
    return value


def _shown(name: str, text: str) -> str:
    return MASK if is_secret(name) else written(text)


def write_yaml(tree: dict[str, Any]) -> str:
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def _plain_text(text: str) -> str | None:
    if text in _NULL_WORDS:
        return None
    if text[0] in "\"'":
        try:
            quoted = yaml.load(text, _Loader)
        except yaml.YAMLError:
            return text
        return quoted if isinstance(quoted, str) else text
    return text


def _parse(text: str, prefix: str) -> tuple[Any, list[str]]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, []
        faults: list[str] = []
        _mark(node, prefix, faults, set())
        return loader.construct_document(node), faults
    finally:
        loader.dispose()


def _mark(node: yaml.Node, name: str, faults: list[str], seen: set[int]) -> None:
    """Tags the scalars of text keys as text, and notes keys that stand twice in a mapping or are written with dots."""
    if id(node) in seen:
        return
    seen.add(id(node))
    key = known_keys().get(name)
    if isinstance(node, yaml.ScalarNode) and key is not None and key.is_text and node.tag != _NULL:
        node.tag = _TEXT
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _mark(item, name if key is not None and key.is_text else "", faults, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        part, line = str(key_node.value), key_node.start_mark.line + 1
        inner = f"{name}.{part}" if name else part
        if part in lines and part != "<<":
            faults.append(f"line {line}: {inner} stands there twice, first in line {lines[part]}; keep one of them")
        if "." in part and (inner in known_keys() or inner in section_names()):
            faults.append(f"line {line}: {inner}: write it as nested mappings, one for each part")
        lines.setdefault(part, line)
        _mark(value_node, inner, faults, seen)


def _place_and_reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        mark = error.problem_mark or error.context_mark
        if mark is not None:
            return f"line {mark.line + 1}, column {mark.column + 1}: not valid YAML ({reason})"
        return f"not valid YAML ({reason})"
    return f"not valid YAML ({str(error).splitlines()[0]})"
