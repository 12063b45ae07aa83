#!/usr/bin/env python3
"""Writes docs/configuration.md, the reference of every configuration key, from the schema.

python scripts/config_reference.py            # write the page
python scripts/config_reference.py --check    # exit status 1 if it is not what would be written
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout works without installing

from foveal.config.keys import Key, known_keys
from foveal.config.schema import Config
from foveal.config.schema_reward import RewardFunctionConfig
from foveal.config.yaml_text import write_yaml

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

_HEAD = """\
# Configuration

<!-- Written by scripts/config_reference.py from foveal/config/schema*.py: change the descriptions there, not here. -->

A run is told everything by one YAML file and by `KEY=VALUE` after it, with dotted keys and YAML values:

```bash
foveal train config=examples/my_vlm.yaml worker.rollout.n=8 data.train_files='[a.jsonl,b.jsonl]'
```

A mapping after the file, as `worker.rollout.val_override_config={n: 4}`, changes the file's key by key; `{}` changes
nothing, and `KEY=null` empties it.

Names and defaults are EasyR1's ([what differs](from_easyr1.md)). Every key has a default but the model, the data and
the reward function. A key that is not in this list is an error, which names the nearest one that is.
`foveal train --print-config config=examples/my_vlm.yaml` prints all keys with the values of a run. Keys that change
nothing in a given run are listed in its first lines ("no effect here").
"""


def page() -> str:
    """The whole page as Markdown."""
    parts = [_HEAD]
    first: dict[type[BaseModel], str] = {}
    for name, section in _sections(Config, ""):
        told = first.setdefault(section, name)
        parts.append(_section(name, section) if told == name else _repeated(name, section, told))
    return "\n".join(parts)


def _sections(section: type[BaseModel], name: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yields (dotted name, model) of the sections below, in the order of the schema."""
    for field, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            inner = f"{name}.{field}" if name else field
            yield inner, info.annotation
            yield from _sections(info.annotation, inner)


def _section(name: str, section: type[BaseModel]) -> str:
    own = [key for full, key in known_keys().items() if full.rpartition(".")[0] == name]
    text = f"{'##' if '.' not in name else '###'} `{name}`\n\n{' '.join((section.__doc__ or '').split())}\n"
    if own:
        text += "\n| key | default | allowed | what it does |\n|---|---|---|---|\n"
        text += "".join(f"{_row(key)}\n" for key in own)
    if name == "worker.reward":
        text += f"\n{_reward_functions()}"
    return text


def _repeated(name: str, section: type[BaseModel], told: str) -> str:
    """A section whose keys stand on the page already, under another name."""
    keys = ", ".join(f"`{full.rpartition('.')[2]}`" for full in known_keys() if full.rpartition(".")[0] == name)
    anchor = told.replace(".", "")
    return f"### `{name}`\n\n{keys}: as in [`{told}`](#{anchor}), with the same defaults.\n"


def _row(key: Key) -> str:
    return _cells(f"`{key.name.rpartition('.')[2]}`", f"`{_yaml(key.default)}`", key.allowed, key.description)


def _reward_functions() -> str:
    rows = [
        _cells(f"`{name}`", "" if info.is_required() else f"`{_yaml(info.get_default(call_default_factory=True))}`",
               info.description or "")
        for name, info in RewardFunctionConfig.model_fields.items()
    ]  # fmt: skip
    head = "Each entry of `worker.reward.functions` has:\n\n| key | default | what it does |\n|---|---|---|\n"
    return head + "".join(f"{row}\n" for row in rows)


def _cells(*texts: str) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def _yaml(value: Any) -> str:
    """A value as it is written in a YAML file."""
    if isinstance(value, tuple):
        value = list(value)
    if value in ([], {}):
        return "[]" if value == [] else "{}"
    if isinstance(value, list):
        return f"[{', '.join(_yaml(item) for item in value)}]"
    return write_yaml({"value": value}).removeprefix("value: ").strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the reference of the configuration from the schema.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the page is stale")
    if parser.parse_args().check:
        fresh = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page()
        print(f"{PAGE}: {'fresh' if fresh else 'stale; run python scripts/config_reference.py'}")
        return 0 if fresh else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
