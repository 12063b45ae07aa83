"""Load `FILE:function` or `package.module:function` inside the reward process; say precisely what is wrong with it."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from foveal.errors import RewardError
from foveal.masking import masked
from foveal.reward.contract import FunctionInfo, FunctionSpec
from foveal.reward.explain import MODULE_NAME, cure_for, user_traceback

DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


@dataclass(frozen=True)
class Loaded:
    """A function ready to be called with one dict, or with a list of them.

    Attributes:
        file: that it was read from, as tracebacks name it.
    """

    function: Callable[[Any], Any]
    info: FunctionInfo
    file: str


def parse_spec(reward_function: str | None, kwargs: dict[str, Any], key: str = "reward_function") -> FunctionSpec:
    """Splits FILE:function or package.module:function (the name `main` when absent) and finds the file.

    Args:
        key: below `worker.reward`, for messages.

    Raises:
        RewardError: nothing is named, or there is no such file. Whether a module exists is found out by `load`.
    """
    key = f"worker.reward.{key}"
    if not reward_function:
        raise RewardError(f"{key} is not set; give FILE:function, as my_reward.py:compute_score")
    path, separator, name = reward_function.rpartition(":")
    if not separator or not name.isidentifier():
        path, name = reward_function, "main"
    absolute = os.path.abspath(os.path.expanduser(path))
    if os.path.isfile(absolute):
        return FunctionSpec(absolute, name, dict(kwargs))
    if DOTTED.fullmatch(path) and not path.endswith(".py"):
        return FunctionSpec(path, name, dict(kwargs))
    raise RewardError(
        f"{key}: there is no file {absolute} (given: {reward_function}); relative paths start at the working directory"
    )


def load(spec: FunctionSpec) -> Loaded:
    """Imports the file or module and returns its function with the keyword arguments bound.

    A class is built once, with the keyword arguments, and its `__call__` or `compute_score` is the function. The
    file's folder (for a module, the working directory) goes to the end of `sys.path`: siblings can be imported, and no
    library is shadowed.

    Raises:
        RewardError: the import or the constructor raises, the function is absent or doesn't take the arguments, or a
            declaration is wrong.
    """
    module = _import_file(spec.path) if os.path.isabs(spec.path) else _import_module(spec.path)
    found = getattr(module, spec.name, None)
    if not callable(found):
        raise RewardError(
            f"{spec.path} has no function {spec.name!r}; it has {', '.join(_function_names(module)) or 'none'}. "
            "Name one with worker.reward.reward_function=FILE:function"
        )
    file = str(getattr(module, "__file__", spec.path))
    if inspect.isclass(found):
        instance = _build(found, spec, file)
        function = _method(instance, spec)
        return Loaded(function, _read_info([instance, module], spec, _is_async(function)), file)
    takes_truth = _takes_truth(found)
    _check_arguments(found, spec, 2 if takes_truth else 1)
    function = partial(found, **spec.kwargs)
    info = _read_info([module], spec, _is_async(function))
    return Loaded(_with_two_arguments(function, info, spec) if takes_truth else function, info, file)


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
        raise _failed(f"importing {path} failed", error, path) from None
    return module


def _import_module(name: str) -> ModuleType:
    sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise RewardError(
                f"there is neither a file {name} nor a module {name} (no {error.name!r}); modules are looked for in "
                "the working directory and among the installed packages. A file is named with its ending, as "
                "my_reward.py:compute_score"
            ) from None
        raise _failed(f"importing {name} failed", error, _file_of(name)) from None
    except BaseException as error:
        raise _failed(f"importing {name} failed", error, _file_of(name)) from None


def _file_of(name: str) -> str:
    try:
        found = importlib.util.find_spec(name)
    except Exception:  # whatever a package on the way raises; then the whole traceback is shown
        return ""
    return found.origin or "" if found else ""


def _failed(what: str, error: BaseException, file: str) -> RewardError:
    return RewardError("\n".join(filter(None, [what, user_traceback(error, file), cure_for(error)])))


def _build(found: type[Any], spec: FunctionSpec, file: str) -> Any:
    """An instance of the user's class; a RewardError of its own passes as it is."""
    _check_arguments(found, spec, 0)
    try:
        return found(**spec.kwargs)
    except RewardError:
        raise
    except BaseException as error:
        raise _failed(f"building {spec.label} failed", error, file) from None


def _method(instance: Any, spec: FunctionSpec) -> Callable[[Any], Any]:
    """What to call on an instance of the user's class."""
    function: Any = instance if callable(instance) else getattr(instance, "compute_score", None)
    if not callable(function):
        raise RewardError(f"{spec.label} is a class without __call__ and without compute_score; give it one of them")
    return function


def _check_arguments(found: Callable[..., Any], spec: FunctionSpec, positional: int) -> None:
    try:
        signature = inspect.signature(found)
    except ValueError:  # written in C, without a signature
        return
    try:
        signature.bind(*[None] * positional, **spec.kwargs)
    except TypeError as error:
        also = ("", "one argument and ", "two arguments and ")[positional]
        raise RewardError(
            f"{spec.label}{signature} does not take {also}the keyword arguments {masked(spec.kwargs)}: {error}. They "
            "are worker.reward.reward_function_kwargs, or kwargs of its entry in worker.reward.functions. What "
            "it needs of a row is in its one argument: a dict, or a list of dicts, as docs/rewards.md shows"
        ) from None


def _takes_truth(found: Callable[..., Any]) -> bool:
    """Whether it is a function of responses and truths, as EasyR1 had them until 0.3.0."""
    try:
        second = list(inspect.signature(found).parameters.values())[1:2]
    except ValueError:  # written in C, without a signature
        return False
    return any(one.name.startswith("ground_truth") and one.default is one.empty for one in second)


def _with_two_arguments(function: Callable[..., Any], info: FunctionInfo, spec: FunctionSpec) -> Callable[[Any], Any]:
    """The same as a function of dicts."""
    if not info.declares_kind:
        raise RewardError(
            f"{spec.label} takes two arguments, as functions of EasyR1 0.3.0 and before: a response and its truth "
            "(worker.reward.reward_type=sequential), or lists of them (worker.reward.reward_type=batch). Set one"
        )
    if info.kind == "sequential":
        return lambda one: function(one["response"], one["ground_truth"])
    return lambda inputs: function([one["response"] for one in inputs], [one["ground_truth"] for one in inputs])


def _is_async(function: Callable[[Any], Any]) -> bool:
    plain = function.func if isinstance(function, partial) else function
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(getattr(plain, "__call__", None))  # noqa: B004


def _read_info(declaring: list[Any], spec: FunctionSpec, is_async: bool) -> FunctionInfo:
    """The declarations of the instance of a class, else those of its module, else what the configuration says."""
    label = spec.label

    def declared(name: str) -> Any:
        return next((value for one in declaring if (value := getattr(one, name, None)) is not None), None)

    kind = declared("REWARD_TYPE")
    if kind not in (None, "batch", "sequential"):
        raise RewardError(f'{label}: REWARD_TYPE is {kind!r}; allowed are "batch" and "sequential"')
    kind = kind or spec.kind
    split = declared("REWARD_SPLIT")
    if split not in (None, "group"):
        raise RewardError(f'{label}: REWARD_SPLIT is {split!r}; the only value is "group"')
    if split and kind == "sequential":
        raise RewardError(f'{label}: REWARD_SPLIT = "group" is for REWARD_TYPE = "batch"; this one is sequential')
    limit = declared("REWARD_TIME_LIMIT")
    if limit is not None and (not isinstance(limit, int | float) or not 0 < limit < math.inf):
        raise RewardError(f"{label}: REWARD_TIME_LIMIT is {limit!r}; allowed is a number of seconds above 0")
    return FunctionInfo(kind or "batch", split == "group", kind is not None, is_async, limit)


def _function_names(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or (inspect.isclass(value) and value.__module__ == module.__name__))
    ]
