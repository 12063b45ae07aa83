"""What all sections of the configuration share: the base model, types of numbers, and names or files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

FILE_AND_FUNCTION = re.compile(r".+(:[A-Za-z_]\w*|\.py)")


class Section(BaseModel):
    """One mapping of the YAML file. Unknown keys, NaN and infinity are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    return value


def _null_is_empty(value: Any) -> Any:
    return {} if value is None else value


Mapping = Annotated[dict[str, Any], BeforeValidator(_null_is_empty)]
"""Values by name. One on the command line is laid over the file's, as OmegaConf does, and null empties it."""

Int = Annotated[int, BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]
Positive = Annotated[Int, Field(ge=1)]
NotNegative = Annotated[Int, Field(ge=0)]


def _zero_is_off(value: Any) -> Any:
    return -1 if value == 0 and not isinstance(value, bool) else value


PositiveOrOff = Annotated[Literal[-1] | Positive, BeforeValidator(_zero_is_off)]
"""A count, or -1 for "no limit", "all" or "never", as the field says. 0 is taken for -1, as in EasyR1."""

UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path, in which a leading `~` is the home folder: in YAML no shell says so. Or, where a key takes one, a hub id."""

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "16": "fp16", "float32": "fp32", "32": "fp32"}


def _short_dtype(value: Any) -> Any:
    return _DTYPES.get(str(value), value)


Dtype = Annotated[Literal["bf16", "fp16", "fp32"], BeforeValidator(_short_dtype)]


@dataclass(frozen=True)
class NameOrFile:
    """Validator: one of `names`, or `FILE:function` of the user's own (function `main` when absent)."""

    names: tuple[str, ...]

    def __call__(self, value: str) -> str:
        if value not in self.names and not FILE_AND_FUNCTION.fullmatch(value):
            raise ValueError("neither a known name nor FILE:function")
        return value
