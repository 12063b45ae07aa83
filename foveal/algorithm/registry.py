"""Advantage estimators and policy losses by name, the user's own among them.

One of one's own is a function in a file, named as a reward function is: `algorithm.adv_estimator=./mine.py:estimator`.
An estimator that needs more than scores says so with `@register_advantage("mine", needs_values=True)`.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from foveal.algorithm.batch import AdvantageConfig, Advantages, LossBatch, LossConfig, StepBatch
from foveal.errors import ConfigError

EstimatorFunction: TypeAlias = Callable[[StepBatch, AdvantageConfig], Advantages]
LossFunction: TypeAlias = Callable[[LossBatch, LossConfig], tuple[Tensor, dict[str, Tensor]]]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class AdvantageEstimator:
    """An estimator and what it asks of the step. Calling it checks what goes in and what comes out.

    Attributes:
        name: as in `algorithm.adv_estimator`.
        compute: the function itself.
        needs_group: compares the answers to one prompt, so `worker.rollout.n` must be at least 2.
        needs_baseline: reads `StepBatch.baselines`, so each prompt also gets a greedy answer.
        needs_values: reads `StepBatch.values`, so there must be a critic.
        needs_parts: reads `StepBatch.parts`, the numbers that `algorithm.reward_parts` names.
    """

    name: str
    compute: EstimatorFunction
    needs_group: bool = False
    needs_baseline: bool = False
    needs_values: bool = False
    needs_parts: bool = False

    def __call__(self, batch: StepBatch, config: AdvantageConfig) -> Advantages:
        """Computes the advantages of a step, without gradient.

        Raises:
            ValueError: the batch lacks what the estimator needs.
            ConfigError: the result is not an `Advantages` of shape (N,), or is not finite on a written token.
        """
        needs = (("baselines", self.needs_baseline), ("values", self.needs_values), ("parts", self.needs_parts))
        for field, needed in needs:
            if needed and getattr(batch, field) is None:
                raise ValueError(f"the advantage estimator {self.name} needs StepBatch.{field}, which is None")
        with torch.no_grad():
            result = self.compute(batch, config)
        self._check(result, batch)
        return result

    def _check(self, result: object, batch: StepBatch) -> None:
        who = f"the advantage estimator {self.name}"
        if not isinstance(result, Advantages):
            raise ConfigError(f"{who} returned {type(result).__name__}; it must return foveal.algorithm.Advantages")
        for field, values in (("advantages", result.advantages), ("returns", result.returns)):
            if values.shape != batch.mask.shape:
                raise ConfigError(
                    f"{who} returned {field} of shape {tuple(values.shape)}; "
                    f"it must be {tuple(batch.mask.shape)}, one number per response token"
                )
            bad = int((~values.isfinite() & batch.mask).sum())
            if bad:
                raise ConfigError(
                    f"{who} returned {field} that are NaN or infinite on {bad} of {int(batch.mask.sum())} tokens; "
                    "every number must be finite: look for a division by zero in it, or a score that is not finite"
                )


ADVANTAGES: dict[str, AdvantageEstimator] = {}
LOSSES: dict[str, LossFunction] = {}


def register_advantage(
    name: str,
    *,
    needs_group: bool = False,
    needs_baseline: bool = False,
    needs_values: bool = False,
    needs_parts: bool = False,
) -> Callable[[Function], Function]:
    """Registers the decorated function as an advantage estimator; the flags are those of `AdvantageEstimator`.

    Raises:
        ConfigError: the name is taken.
    """

    def register(function: Function) -> Function:
        _refuse_taken(name, ADVANTAGES, "advantage estimator")
        ADVANTAGES[name] = AdvantageEstimator(name, function, needs_group, needs_baseline, needs_values, needs_parts)
        return function

    return register


def register_loss(name: str) -> Callable[[Function], Function]:
    """Registers the decorated function as a policy loss.

    Raises:
        ConfigError: the name is taken.
    """

    def register(function: Function) -> Function:
        _refuse_taken(name, LOSSES, "policy loss")
        LOSSES[name] = function
        return function

    return register


def get_advantage(name: str) -> AdvantageEstimator:
    """The estimator of that name, or the one in the user's file when the name is `FILE:function`.

    Raises:
        ConfigError: no such name, file or function, or the file raises on import.
    """
    if _is_file(name):
        function = _load_function(name, "algorithm.adv_estimator")
        registered = (entry for entry in ADVANTAGES.values() if entry.compute is function)
        return next(registered, AdvantageEstimator(name, function))
    if name not in ADVANTAGES:
        raise ConfigError(_unknown("algorithm.adv_estimator", name, ADVANTAGES))
    return ADVANTAGES[name]


def get_loss(name: str) -> LossFunction:
    """The policy loss of that name, or the one in the user's file when the name is `FILE:function`.

    Raises:
        ConfigError: no such name, file or function, or the file raises on import.
    """
    if _is_file(name):
        return _load_function(name, "worker.actor.loss_type")
    if name not in LOSSES:
        raise ConfigError(_unknown("worker.actor.loss_type", name, LOSSES))
    return LOSSES[name]


def _refuse_taken(name: str, table: Iterable[str], kind: str) -> None:
    if name in table:
        raise ConfigError(f"a {kind} named {name!r} is already registered; choose another name")


def _unknown(key: str, name: str, table: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(table), n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{key}={name} is not known.{hint} Allowed: {', '.join(sorted(table))}, or your own as FILE.py:function"


def _is_file(name: str) -> bool:
    return ":" in name or name.endswith(".py")


def _load_function(spec: str, key: str) -> Callable[..., Any]:
    file, separator, function_name = spec.rpartition(":")
    if not separator or not function_name.isidentifier():
        file, function_name = spec, "main"
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{key}={spec}: there is no file {path}; give FILE.py:function")
    try:
        module = _load_module(path)
    except Exception as error:
        raise ConfigError(f"{key}={spec}: importing {path} raised {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_"]
        raise ConfigError(
            f"{key}={spec}: {path} has no function {function_name!r}; it has {', '.join(names) or 'none'}"
        )
    return function


@cache
def _load_module(path: Path) -> ModuleType:
    # Cached, because executing a file again would register its functions a second time. Siblings can be imported; the
    # private module name and the end of the search path keep the user's files from shadowing a library.
    name = f"_foveal_user_algorithm_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look the module of a class up
    spec.loader.exec_module(module)
    return module
