"""Every key of the configuration by its dotted name: type, range, default, description; and the nearest key."""

from __future__ import annotations

import difflib
import types
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from foveal.config.schema import Config
from foveal.config.sections import NameOrFile

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    dict: "a mapping whose keys are text",
    type(None): "null",
}
_SIGNS: tuple[tuple[type, str, str], ...] = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))


_FINITE = ConfigDict(allow_inf_nan=False)  # as `Section` has it


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        name: dotted, as `worker.rollout.n`.
        description: one or two sentences for the reference page.
        default: value when nothing sets it.
        allowed: its type and range in words.
        annotation: its type, ranges and validators included.
    """

    name: str
    description: str
    default: Any
    allowed: str
    annotation: Any

    @property
    def nullable(self) -> bool:
        return type(None) in _members(self.annotation)

    @property
    def is_text(self) -> bool:
        """Whether any text is meant as it stands, so that 0123 or 1e5 is not read as a number; in a list, too."""
        members = [member for member in _members(self.annotation) if member not in (list[str], type(None))]
        return bool(members) and all(member is str or _is_text_choice(member) for member in members)

    @property
    def takes_list(self) -> bool:
        return list[str] in _members(self.annotation)

    def accepts(self, value: Any) -> bool:
        try:
            TypeAdapter(self.annotation, config=_FINITE).validate_python(value)
        except ValidationError:
            return False
        return True


@cache
def known_keys() -> dict[str, Key]:
    """All keys by dotted name, in the order of the schema."""
    return {key.name: key for key in _keys_of(Config, "")}


@cache
def section_names() -> frozenset[str]:
    """Dotted names of all mappings that hold keys: `worker`, `worker.actor`, …"""
    return frozenset(name.rsplit(".", depth)[0] for name in known_keys() for depth in range(1, name.count(".") + 1))


def nearest_key(unknown: str) -> str | None:
    """The known key that was most likely meant: the same last part, else the most similar spelling."""
    leaf = _leaf(unknown)
    candidates = [name for name in known_keys() if _leaf(name) == leaf]
    if candidates:
        return max(candidates, key=lambda name: _likeness(name, unknown))
    near = max(known_keys(), key=lambda name: max(_likeness(name, unknown), _likeness(_leaf(name), leaf)))
    return near if max(_likeness(near, unknown), _likeness(_leaf(near), leaf)) >= 0.5 else None


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _keys_of(section: type[BaseModel], prefix: str) -> list[Key]:
    keys: list[Key] = []
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys += _keys_of(info.annotation, f"{prefix}{name}.")
        else:
            keys.append(_key_of(prefix + name, info))
    return keys


def _key_of(name: str, info: FieldInfo) -> Key:
    annotation = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
    default = info.get_default(call_default_factory=True)
    return Key(name, info.description or "", default, _in_words(annotation), annotation)


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a type, without `Annotated`."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for part in get_args(annotation) for member in _members(part))
    return (annotation,)


def _is_text_choice(member: Any) -> bool:
    return get_origin(member) is Literal and all(isinstance(choice, str) for choice in get_args(member))


def _in_words(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _bounded(args[0], args[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(_in_words(part) for part in args)
    if origin is Literal:
        return ", ".join(str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in args)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping of {', '.join(annotation.model_fields)}"
    if origin is dict and isinstance(args[1], type) and issubclass(args[1], BaseModel):
        return f"a mapping of names, each to {_in_words(args[1])}"
    if origin is list:
        return f"a list of {_in_words(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}, each {_in_words(args[0])}"
    return _WORDS.get(origin or annotation, str(annotation))


def _bounded(annotation: Any, metadata: tuple[Any, ...]) -> str:
    for item in metadata:
        if isinstance(item, AfterValidator) and isinstance(item.func, NameOrFile):
            return f"{', '.join(item.func.names)}, or FILE:function"
    words = [_in_words(annotation)]
    flat = [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
    for item in flat:
        words += [f"{sign} {getattr(item, field):g}" for kind, field, sign in _SIGNS if isinstance(item, kind)]
        words += ["that is not empty" for _ in range(isinstance(item, MinLen))]
    return " ".join(words[:2]) + "".join(f" and {word}" for word in words[2:])
