"""Load `FILE:function` inside the reward process, and say precisely what is wrong with it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from foveal.errors import RewardError
from foveal.reward.contract import FunctionInfo, FunctionSpec

LONGEST_ERROR = 500
LONGEST_TRACEBACK = 20_000
MODULE_NAME = "_foveal_user_reward"  # private, so that a file called math.py replaces no library


def parse_spec(reward_function: str | None, kwargs: dict[str, Any]) -> FunctionSpec:
    """Splits `worker.reward.reward_function` (FILE:function, the name `main` when absent) and finds the file.

    Raises:
        RewardError: nothing is named, or there is no such file.
    """
    if not reward_function:
        raise RewardError("worker.reward.reward_function is not set; give FILE:function, as my_reward.py:compute_score")
    path, separator, name = reward_function.rpartition(":")
    if not separator or not name.isidentifier():
        path, name = reward_function, "main"
    absolute = os.path.abspath(os.path.expanduser(path))
    if not os.path.isfile(absolute):
        raise RewardError(
            f"worker.reward.reward_function: there is no file {absolute} (given: {reward_function}); "
            "relative paths start at the working directory"
        )
    return FunctionSpec(absolute, name, dict(kwargs))


def load_function(spec: FunctionSpec) -> tuple[Callable[[Any], Any], FunctionInfo]:
    """Imports the file and returns its function with the keyword arguments bound, and what the module declares.

    The file's folder goes to the end of `sys.path`: siblings can be imported, and no library is shadowed.

    Raises:
        RewardError: the import raises, the function is absent or doesn't take the arguments, or a declaration is wrong.
    """
    module = _import_file(spec.path)
    function = getattr(module, spec.name, None)
    if not callable(function):
        raise RewardError(
            f"{spec.path} has no function {spec.name!r}; it has {', '.join(_function_names(module)) or 'none'}. "
            "Name one with worker.reward.reward_function=FILE:function"
        )
    try:
        inspect.signature(function).bind(None, **spec.kwargs)
    except TypeError as error:
        raise RewardError(
            f"{spec.label}{inspect.signature(function)} does not take one argument and "
            f"worker.reward.reward_function_kwargs {spec.kwargs}: {error}"
        ) from None
    except ValueError:  # written in C, without a signature
        pass
    return partial(function, **spec.kwargs), _read_info(module, spec.path)


def user_traceback(error: BaseException, path: str) -> str:
    """The traceback of `error` from the user's file on, without our own frames."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != path:
        frame = frame.tb_next
    text = "".join(traceback.format_exception(type(error), error, frame)).rstrip()
    return text if len(text) <= LONGEST_TRACEBACK else f"{text[:LONGEST_TRACEBACK]}…"


def short_text(error: BaseException) -> str:
    """Type and message of `error`, also where its own `__str__` fails, cut to what a person reads."""
    text = traceback.format_exception_only(error)[-1].strip().removeprefix(f"{MODULE_NAME}.")
    return text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]}…"


def _import_file(path: str) -> ModuleType:
    sys.path.append(os.path.dirname(path))
    loader = importlib.machinery.SourceFileLoader(MODULE_NAME, path)
    module_spec = importlib.util.spec_from_file_location(MODULE_NAME, path, loader=loader)
    assert module_spec is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[MODULE_NAME] = module  # dataclasses and pickle look a class's module up
    try:
        loader.exec_module(module)
    except BaseException as error:  # a sys.exit() at import is the user's mistake too
        raise RewardError(f"importing {path} failed\n{user_traceback(error, path)}") from None
    return module


def _read_info(module: ModuleType, path: str) -> FunctionInfo:
    kind: Any = getattr(module, "REWARD_TYPE", "batch")
    if kind not in ("batch", "sequential"):
        raise RewardError(f'{path}: REWARD_TYPE is {kind!r}; allowed are "batch" and "sequential"')
    split = getattr(module, "REWARD_SPLIT", None)
    if split not in (None, "group"):
        raise RewardError(f'{path}: REWARD_SPLIT is {split!r}; the only value is "group"')
    if split and kind == "sequential":
        raise RewardError(f'{path}: REWARD_SPLIT = "group" is for REWARD_TYPE = "batch"; this one is sequential')
    return FunctionInfo(kind, split == "group", hasattr(module, "REWARD_TYPE"))


def _function_names(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
