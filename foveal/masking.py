"""Keys, tokens and passwords stay in the process: `***` stands for them in whatever leaves it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

MASK = "***"
_SECRET_NAME = re.compile(
    r"(^|[-_.])((api|access|secret|private|auth|judge|llm|openai|azure)[-_]?keys?|token|(api|access|auth)[-_]?tokens"
    r"|bearer|pwd|passwd|passphrase|auth|jwt|cookies?|(password|secret|credential|authorization)s?)$",
    re.IGNORECASE,
)
_SOME_KEY = re.compile(r"[^-_.][-_]key$", re.IGNORECASE)
"""Of whatever service, as `deepseek_key`."""
_DATA_KEY = re.compile(
    r"(^|[-_.])(answer|prompt|image|video|audio|media|picture|text|question|problem|solution|truth|label|target|response"
    r"|reward|score|metric|query|message|content|input|output|row|column|field|item|index|uid|id|name|type|task|source"
    r"|group|sort|order|filter|split|cache|data|dict|map|config|lookup|primary|foreign|public|value)s?[-_]keys?$",
    re.IGNORECASE,
)
"""Names of columns and the like."""
_TEXT_TOKEN = re.compile(
    r"(^|[-_.])(bos|eos|pad|unk|sep|cls|mask|begin|start|end|stop|open|close|text|turn|think|answer|tool|special|image"
    r"|video|vision|audio|box|placeholder|first|last|next|new|max|min|num|per)[-_]?token$",
    re.IGNORECASE,
)
"""Tokens of a text, and counts of them."""
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|PASSWORD|PASSWD|PASSPHRASE|SECRET|_PWD|_AUTH)$")
_USER = re.compile(r"://[^/\s'\"]+@")
_QUERY = re.compile(
    r"([?&#][\w-]*(?:key|token|password|passwd|pwd|auth|secret|signature|credential|sig)=)[^&#\s'\"]+", re.IGNORECASE
)
_KNOWN_KINDS = re.compile(
    r"\b(sk-[\w-]*?[^\W_]{20,}[\w-]*|hf_[^\W_]{30,}|gh[opsu]_[^\W_]{36,}|github_pat_\w{36,}|glpat-[\w-]{20,})"
)
"""Keys that give themselves away, of OpenAI, Hugging Face, GitHub and GitLab; names of folders may begin alike."""
_LEFT_OUT = re.compile(rf"(^|[\s=/]){re.escape(MASK)}($|[@&])")
_SHORTEST = 8
"""Characters of a value that is looked for in texts: shorter ones are parts of ordinary words."""
_PLAIN = re.compile(r"[a-z_ ]+", re.IGNORECASE)
"""Ordinary words, which may be a column that a `some_key` names: texts keep them."""

_remembered: set[str] = set()


def remember(values: Any) -> None:
    """Makes `without_secrets` leave out the secrets of this configuration, too."""
    _remembered.update(text for text in _secrets(values) if len(text) >= _SHORTEST)


def masked(values: Any, *, secret: bool = False) -> Any:
    """Plain values (mappings, lists, numbers, texts) with `MASK` in place of what their keys' names call a secret.

    Args:
        secret: whether these values are one as a whole.
    """
    if isinstance(values, dict):
        return {key: masked(value, secret=secret or is_secret(key)) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [masked(value, secret=secret) for value in values]
    if secret and values not in (None, "") and not isinstance(values, bool):
        return MASK
    return without_secrets(values) if isinstance(values, str) else values


def without_secrets(text: str) -> str:
    """The text without names and passwords in addresses, well-known kinds of keys, what `remember` was given, and the
    values of environment variables whose names end with KEY, TOKEN, PASSWORD, SECRET and the like."""
    text = _USER.sub(f"://{MASK}@", text)
    text = _QUERY.sub(rf"\1{MASK}", text)
    text = _KNOWN_KINDS.sub(MASK, text)
    variables = {value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name)}
    known = {value for value in variables if len(value) >= _SHORTEST} | _remembered
    for value in sorted(known, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text


def is_secret(name: Any) -> bool:
    """Whether a key of this name, as `api_key`, `hubToken` or `Authorization`, holds a secret."""
    return _is_known_secret(name) or _is_some_key(name)


def _is_known_secret(name: Any) -> bool:
    return bool(_SECRET_NAME.search(_parted(name))) and not _TEXT_TOKEN.search(_parted(name))


def _is_some_key(name: Any) -> bool:
    return bool(_SOME_KEY.search(_parted(name))) and not _DATA_KEY.search(_parted(name))


def _parted(name: Any) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(name))


def written(text: str) -> str:
    """A part of a command line, or YAML that cannot be read, as a user wrote it; `MASK` where it may hold a secret."""
    return MASK if any(map(is_secret, re.findall(r"[\w-]+", text))) else without_secrets(text)


def masks(values: Any, name: str = "") -> Iterator[str]:
    """Yields the dotted names of values that were masked when they were written."""
    if isinstance(values, dict | list):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from masks(value, f"{name}.{key}" if name else str(key))
    elif isinstance(values, str) and _LEFT_OUT.search(values):
        yield name


def _secrets(values: Any, secret: bool = False) -> Iterator[str]:
    if isinstance(values, dict):
        for key, value in values.items():
            column = isinstance(value, str) and _PLAIN.fullmatch(value)
            yield from _secrets(value, secret or _is_known_secret(key) or (_is_some_key(key) and not column))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _secrets(value, secret)
    elif secret and values is not None and not isinstance(values, bool):
        yield str(values)
