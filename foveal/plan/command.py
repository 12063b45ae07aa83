"""`foveal plan`: memory and time of a run, before any GPU is taken."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any, Literal

import torch

from foveal.cluster.topology import division_problems
from foveal.config import Config, load_config
from foveal.errors import ConfigError
from foveal.models.lora_setup import adopt_adapters
from foveal.plan.cures import Cure, find_cures
from foveal.plan.engine import uses_vllm
from foveal.plan.gpus import BY_SIZE, Gpu, find_gpu, gpu_here
from foveal.plan.memory import Memory, actor_sizes, plan_memory
from foveal.plan.rows import Lengths
from foveal.plan.seconds import Seconds, plan_seconds
from foveal.plan.sizes import with_folder
from foveal.plan.splits import Split, better_split
from foveal.track import console

USAGE = (
    "foveal plan [--gpu NAME] [--json] [--rows N] [--prompt N] [--visual N] [--answer N] [config=FILE] [KEY=VALUE …]"
)
_LEAST = {"rows": 1, "prompt": 1, "visual": 0, "answer": 1}


@dataclass(frozen=True)
class Plan:
    """A configuration on one kind of GPU.

    Attributes:
        cures: with which it fits, where it does not; the least costly first.
        split: of the GPUs between engines and trainers, with which it is faster, where it fits and each has its own.
        model: as it was named.
    """

    model: str
    gpu: Gpu
    config: Config
    lengths: Lengths
    memory: Memory
    seconds: Seconds
    cures: list[Cure]
    split: Split | None = None

    @property
    def one_wave(self) -> int | None:
        """Prompts a step whose answers are all sampled side by side; None where the trainer's module samples."""
        engine, n = self.memory.engine, self.config.worker.rollout.n
        if engine is None:
            return None
        engines = max(self.config.engine_devices // engine.tensor_parallel, 1)
        return engines * int(engine.cache_tokens / (self.lengths.prompt + n * self.lengths.mean_answer))


def plan_command(args: list[str]) -> int:
    """Prints the plan.

    Returns:
        the exit status: 1 where the run does not fit; without a GPU named or here, where it fits none.

    Raises:
        ConfigError: a mistake in the configuration, or an unknown GPU.
        ModelError: no config.json, or an unsupported family.
    """
    parser = argparse.ArgumentParser(prog="foveal plan", usage=USAGE, add_help=False)
    parser.add_argument("--gpu")
    parser.add_argument("--json", action="store_true")
    for name in _LEAST:
        parser.add_argument(f"--{name}", type=int)
    options, rest = parser.parse_known_args(args)
    for arg in rest:
        if arg.startswith("-"):
            parser.error(f"no option {arg}")
    for name, least in _LEAST.items():
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name}: {value} given; allowed: an integer ≥ {least}")
    here = None if options.gpu else gpu_here()
    named = find_gpu(options.gpu) if options.gpu else here
    config = load_config([*rest, "trainer.val_only=false"])
    if config.trainer.n_gpus_per_node == -1:
        config.trainer.n_gpus_per_node = torch.cuda.device_count() if here else 1
    engine: Literal["vllm", "transformers"] = "vllm" if uses_vllm(config) else "transformers"
    if not config.worker.actor.model.model_path:
        raise ConfigError(
            "worker.actor.model.model_path is not set: give the folder of a Hugging Face model, its config.json, or a "
            "hub id; weights are not needed."
        )
    if options.json:  # all that is printed is JSON
        console.divert(lambda kind, text: None)
    try:
        adopt_adapters(config)
    finally:
        console.divert(None)
    model, config = config.worker.actor.model.model_path, with_folder(config)
    if problems := division_problems(config, engine):
        raise ConfigError("the devices cannot work together like this:\n" + "\n".join(f"  {line}" for line in problems))
    lengths = Lengths.of(
        config,
        actor_sizes(config).sees,
        prompt=options.prompt,
        visual=options.visual,
        answer=options.answer,
        rows=options.rows,
    )
    gpus = [named] if named else [find_gpu(name) for name in BY_SIZE]
    plans = [make_plan(config, gpu, lengths, model=model) for gpu in gpus]
    if options.json:
        console.note(json.dumps([as_json(plan) for plan in plans] if len(plans) > 1 else as_json(plans[0]), indent=1))
    else:
        from foveal.plan.show import compare, show

        console.note(show(plans[0]) if named else compare(plans))
    return 0 if any(plan.memory.fits for plan in plans) else 1


def make_plan(config: Config, gpu: Gpu, lengths: Lengths, *, model: str = "", cures: bool = True) -> Plan:
    """Plans a run whose `model_path` is a folder or hub id.

    Args:
        model: a name for it.
        cures: whether to look for changes where it doesn't fit, and for a better split of the GPUs.
    """
    memory = plan_memory(config, gpu, lengths)
    seconds = plan_seconds(config, gpu, lengths, memory)
    found = find_cures(config, gpu, lengths, memory) if cures and not memory.fits else []
    split = better_split(config, gpu, lengths, seconds.step) if cures and memory.fits else None
    return Plan(model, gpu, config, lengths, memory, seconds, found, split)


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values; memory in GiB, times in seconds."""
    gib, memory, seconds = 2**30, plan.memory, plan.seconds
    sizes = actor_sizes(plan.config)
    return {
        "model": plan.model,
        "gpu": {
            "name": plan.gpu.name,
            "gib": plan.gpu.gib,
            "count": plan.config.trainer.devices,
            "of_trainers": plan.config.training_devices,
            "of_engines": plan.config.engine_devices,
        },
        "parameters": {"all": sizes.parameters, "trained": sizes.trained, "adapters": sizes.adapters},
        "fits": memory.fits,
        "why_not": memory.short,
        "phases": {
            phase.name: {
                "gpus_of": phase.side,
                "total_gib": round(phase.total / gib, 3),
                "torch_gib": round(phase.of_torch / gib, 3),
                "limit_gib": round(phase.limit / gib, 3),
                "fits": phase.fits,
                "largest_pass_tokens": phase.tokens,
                "parts_gib": {name: round(size / gib, 3) for name, size in phase.parts.items()},
            }
            for phase in memory.phases
        },
        "host_gib": {name: round(size / gib, 3) for name, size in memory.host.items()},
        "budgets": {role: {"update": tokens[0], "experience": tokens[1]} for role, tokens in memory.budgets.items()},
        "largest_token_budget": memory.largest_budget,
        "cache_tokens": memory.engine.cache_tokens if memory.engine else None,
        "rollout_batch_size_in_one_wave": plan.one_wave,
        "seconds": {name: round(value, 2) for name, value in seconds.phases.items()}
        | {"step": round(seconds.step, 2), "save_checkpoint": round(seconds.save, 2)},
        "idle_seconds": {side: round(value, 2) for side, value in seconds.idle.items()},
        "better_split": plan.split
        and {"cluster.rollout_devices": plan.split.rollout_devices, "step_seconds": round(plan.split.step, 2)},
        "steps": seconds.steps,
        "run_seconds": None if seconds.run is None else round(seconds.run),
        "assumptions": {
            "prompt_tokens": plan.lengths.prompt,
            "visual_tokens": plan.lengths.visual,
            "answer_tokens_for_memory": plan.lengths.answer,
            "answer_tokens_for_time": plan.lengths.mean_answer,
            "rates": seconds.assumptions,
        },
        "cures": [
            {"set": cure.arguments, "costs": cure.cost, "kind": cure.kind, "step_seconds": round(cure.step, 2)}
            for cure in plan.cures
        ],
    }
