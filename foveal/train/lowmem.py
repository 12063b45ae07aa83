"""AdamW with small states, by torchao: bfloat16 weights and moments with stochastic rounding, or 8-bit moments.

Rounding to nearest loses every step that is smaller than half the distance to the next bfloat16 number, about 1/512 of
the weight: at the rates of reinforcement learning nearly all of them. Rounding up with the probability of the part that
is cut off keeps the mean of the steps (Zamirai et al. 2020, "Revisiting BFloat16 Training").
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from foveal.config import Config
from foveal.config.rules import trained_roles
from foveal.errors import ConfigError
from foveal.models.transfer import local


def check_torchao(config: Config) -> None:
    """Checks, before a device is taken, that the library is there where the configuration needs it.

    Raises:
        ConfigError: torchao is missing.
    """
    for role in trained_roles(config):
        strategy = config.value(f"{role}.optim.strategy")
        if strategy != "adamw" and importlib.util.find_spec("torchao") is None:
            raise ConfigError(
                f"{role}.optim.strategy: {strategy} given, which needs torchao, and that is not installed. "
                f"Install it with `pip install 'foveal[lowmem]'`, or set {role}.optim.strategy=adamw"
            )


def small_adamw(strategy: str, groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """torchao's AdamW. bfloat16 weights are rounded stochastically.

    Args:
        strategy: `adamw_bf16`: moments in the weights' own type. `adamw_8bit`: in blocks of 256 numbers with 8 bits
            each and a scale (Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization"); tensors of fewer
            than 4,096 numbers, or not a multiple of 256, keep the weights' type.
        groups: parameter groups.
        options: lr, betas, weight_decay.
    """
    if strategy == "adamw_bf16":
        return _bf16_adamw()(groups, bf16_stochastic_round=True, **options)
    from torchao.optim import AdamW8bit
    from torchao.optim.subclass_8bit import OptimState8bit

    class Adam8bit(AdamW8bit):
        @staticmethod
        def _subclass_zeros(p: torch.Tensor, signed: bool, block_size: int) -> torch.Tensor:
            # In the weights' bfloat16, as torchao has it, a sharded moment is taken for float32 halfway and refused.
            return OptimState8bit.zeros(p.shape, signed, block_size, p.device, dtype=torch.float32)

    return Adam8bit(groups, bf16_stochastic_round=True, **options)


@cache
def _bf16_adamw() -> Any:
    """torchao's AdamW with a step of its own, of the same arithmetic.

    torchao compiles a weight's update for each shape, and looks through all shapes at each weight: a millisecond of the
    host, during which the device waits. Seen as rows, weights share what was compiled.
    """
    from torchao.optim import _AdamW
    from torchao.optim.adam import single_param_adam

    compiled = torch.compile(single_param_adam, fullgraph=True, dynamic=True)

    class Bf16AdamW(_AdamW):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                for p in (p for p in group["params"] if p.grad is not None):
                    state = self.state[p]
                    if not state:
                        state["step"] = torch.tensor(0.0)
                        state["exp_avg"], state["exp_avg_sq"] = self._new_buffer(p, True), self._new_buffer(p, False)
                    state["step"] += 1
                    compiled(
                        _row(p.detach()),
                        _row(p.grad),
                        state["step"],
                        _row(state["exp_avg"]),
                        _row(state["exp_avg_sq"]),
                        None,
                        group["lr"],
                        *group["betas"],
                        group["weight_decay"],
                        group["eps"],
                        True,
                        p.dtype is torch.bfloat16,
                    )

    return Bf16AdamW


def _row(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor).view(-1)


def quantized_moment(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str) -> torch.Tensor | None:
    """An empty moment as the optimizer itself would make it, where it holds that one in 8 bits; else None.

    Args:
        key: its name in the optimizer's state, as `exp_avg`.
    """
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if not hasattr(optimizer, "_new_buffer"):
        return None
    moment = optimizer._new_buffer(parameter, key == "exp_avg")
    return moment if is_traceable_wrapper_subclass(local(moment)) else None


@contextmanager
def repeatable_rounding(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Random numbers of stochastic rounding that depend only on how many steps were taken, so that a resumed run rounds
    as an uninterrupted one; and on a CPU no compiler is needed.

    All processes draw the same numbers: copies of a weight on several devices stay equal.
    """
    if not hasattr(optimizer, "bf16_stochastic_round"):
        yield
        return
    steps = max((int(state["step"]) for state in optimizer.state.values()), default=0)
    device = optimizer.param_groups[0]["params"][0].device
    on_cuda = device.type == "cuda"
    with ExitStack() as held:
        held.enter_context(torch.random.fork_rng([device] if on_cuda else []))
        if not on_cuda:
            held.enter_context(torch.compiler.set_stance("force_eager"))
        torch.manual_seed(steps)
        yield
