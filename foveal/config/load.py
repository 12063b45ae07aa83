"""From a YAML file and `key=value` overrides to a checked `Config`; all problems are reported together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from pydantic import ValidationError

from foveal.config.former import is_former, take_over
from foveal.config.keys import Key, known_keys, nearest_key, section_names
from foveal.config.rules import broken_rules
from foveal.config.schema import Config
from foveal.config.yaml_text import read_value, read_yaml_file, write_yaml
from foveal.errors import ConfigError
from foveal.masking import masked, remember, written

Tree = dict[str, Any]

_UNSET = re.compile(r"\$\{oc\.env:\s*(\w+)\s*\}")
"""What is left of an interpolation whose variable does not exist."""


def load_config(argv: list[str]) -> Config:
    """Reads and checks a configuration. No data, model or reward file is opened.

    Args:
        argv: `config=FILE` (optional) and dotted overrides such as `trainer.max_steps=2`, in YAML syntax; for a key
            given twice the last one counts. `${data.seed}` and `${oc.env:HOME}` are replaced where OmegaConf can
            resolve them, and stay plain text otherwise; a variable that is not set is an error. Keys of EasyR1's
            earlier releases get their present names.

    Raises:
        ConfigError: one line for each unknown key, value that isn't allowed, and rule that is broken.
    """
    tree, typed, problems = _read(argv)
    remember(tree)
    values, notes = take_over(dict(_leaves(tree)), typed)
    unknown = [name for name in values if name not in known_keys() and name not in section_names()]
    problems += [_unknown_key(name) for name in unknown]
    unset = [name for name in values if name not in unknown and _UNSET.search(str(values[name]))]
    problems += [_unset_variable(name, str(values[name])) for name in unset]
    wrong = [name for name in values if name not in {*unknown, *unset} and not _accepted(name, values[name])]
    problems += [_wrong_value(name, values[name]) for name in wrong]

    good = {name: value for name, value in values.items() if name not in {*unknown, *unset, *wrong}}
    config = _build(good, notes)
    # A rule about a key that is wrong already would speak about a value that nobody gave.
    doubtful = {*wrong, *unset, *(nearest_key(name) for name in unknown)}
    problems += [rule.text for rule in broken_rules(config) if doubtful.isdisjoint(rule.keys)]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  ".join([f"{count} in the configuration:", *problems]))
    return config


def render(config: Config) -> str:
    """The whole configuration as YAML that `load_config` reads back to the same values; secrets are masked."""
    return write_yaml(masked(config.model_dump(mode="json")))


def _read(argv: list[str]) -> tuple[Tree, set[str], list[str]]:
    """The file with the overrides laid over it, the overrides' keys, and what is wrong with the arguments."""
    problems: list[str] = []
    overrides: list[tuple[str, str]] = []
    files: list[str] = []
    for argument in argv:
        name, sign, text = argument.partition("=")
        name = name.strip()
        if not sign or not name or name.startswith("-"):
            problems.append(f"argument {written(argument)!r} is not KEY=VALUE; write for instance trainer.max_steps=10")
        elif name == "config":
            files.append(text)
        else:
            overrides.append((name, text))
    if len(files) > 1:
        problems.append(f"config={files[0]} and config={files[1]}: only one file is read; keep one of them")
    tree: Tree = {}
    if files:
        tree, faults = read_yaml_file(files[0])
        problems += faults
    for name, text in overrides:
        try:
            _override(tree, name.split("."), read_value(name, text))
        except ConfigError as error:
            problems.append(str(error))
    try:
        node = OmegaConf.create(_escape(tree))
        values = _resolved(node, OmegaConf.to_container(node, resolve=False))
    except RecursionError:
        raise ConfigError(f"config={', '.join(files)}: an anchor (&) holds itself, or mappings lie too deep") from None
    return values, {name for name, _ in overrides}, problems


def _unset_variable(key: str, text: str) -> str:
    name = _UNSET.findall(text)[0]
    return (
        f"{key}: the environment variable {name} is not set; export it, or say what stands in for it: "
        f"${{oc.env:{name},null}}"
    )


def _override(tree: Tree, path: list[str], value: Any) -> None:
    """Sets the value at `path` in place. A mapping is laid over the one that is there; anything else replaces it."""
    first, *rest = path
    if not rest and not isinstance(value, dict):
        tree[first] = value
        return
    old = tree.get(first)
    tree[first] = dict(old) if isinstance(old, dict) else {}  # a copy: an anchor puts one mapping in several places
    for inner, item in [(rest, value)] if rest else [([key], item) for key, item in value.items()]:
        _override(tree[first], inner, item)


def _escape(value: Any) -> Any:
    """Guards text that OmegaConf would take for a broken `${…}`, and the key null, which it does not take."""
    if isinstance(value, dict):
        return {"null" if key is None else key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    if isinstance(value, str) and "${" in value:
        try:
            OmegaConf.create([value])
        except GrammarParseError:
            return value.replace("${", "\\${")
    return value


def _resolved(node: DictConfig | ListConfig, raw: Any) -> Any:
    """The plain values of `node`; an interpolation that leads nowhere stays the text it is (`raw`)."""
    keys: Any = raw.keys() if isinstance(raw, dict) else range(len(raw))
    values = {}
    for key in keys:
        try:
            value = node[key]
        except (OmegaConfBaseException, RecursionError):
            value = raw[key]
        if isinstance(value, (DictConfig, ListConfig)):
            inner = raw[key] if isinstance(raw[key], (dict, list)) else OmegaConf.to_container(value, resolve=False)
            value = _resolved(value, inner)
        values[key] = value
    return values if isinstance(raw, dict) else list(values.values())


def _leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of everything below the sections; an empty section yields nothing."""
    for part, value in tree.items():
        name = f"{prefix}{part}"
        key = known_keys().get(name)
        if key is None and not is_former(name) and isinstance(value, dict) and (value or name in section_names()):
            yield from _leaves(value, f"{name}.")
        elif value is None and name in section_names():
            continue
        elif key is not None and key.is_text and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, str(value)  # what an interpolation of a number leaves
        else:
            yield name, value


def _accepted(name: str, value: Any) -> bool:
    return name in known_keys() and known_keys()[name].accepts(value)


def _unknown_key(name: str) -> str:
    meant = nearest_key(name)
    if meant is None:
        return f"{name}: unknown key; `foveal train --print-config` shows all keys"
    return f"{name}: unknown key; did you mean {meant}?"


def _wrong_value(name: str, value: Any) -> str:
    if name in section_names():
        return f"{name}: {_shown(value)} given, but it is a section; set keys in it, as {_first_key(name)}=…"
    key: Key = known_keys()[name]
    return f"{name}: {_shown(value)} given; allowed: {key.allowed} (default {_shown(key.default)})"


def _first_key(section: str) -> str:
    return next(name for name in known_keys() if name.startswith(f"{section}."))


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    value = masked(value)
    text = repr(value) if not isinstance(value, str) or not value or value != value.strip() else value
    return text if len(text) <= 100 else f"{text[:97]}…"


def _build(values: dict[str, Any], notes: list[str]) -> Config:
    tree: Tree = {}
    for name, value in values.items():
        section = tree
        *path, leaf = name.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[leaf] = value
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:  # each value was checked on its own before
        raise ConfigError(str(error)) from error
    config._given = frozenset(values)
    config._notes = tuple(notes)
    return config
