"""Whether so many devices can be divided as the configuration asks for, found out before any is taken."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal

from foveal.config import Config
from foveal.config.schema_model import FsdpConfig
from foveal.models.families import read_config
from foveal.rollout.engine import choose_engine


def topology_problems(config: Config, engine: Literal["vllm", "transformers"]) -> list[str]:
    """A line for each thing that keeps `trainer.nnodes` × `trainer.n_gpus_per_node` devices from working together."""
    lines = division_problems(config, engine)
    if config.trainer.devices > 1 and find_spec("ray") is None:
        lines.append(
            f"trainer.nnodes × trainer.n_gpus_per_node = {config.trainer.devices}: several devices need Ray "
            "(`pip install 'foveal[ray]'`); or set both to 1"
        )
    return lines


def division_problems(config: Config, engine: Literal["vllm", "transformers"]) -> list[str]:
    """Those of them that no installation cures."""
    if lines := [*_engines_apart(config, engine)]:
        return lines  # what the devices are divided into is not known
    devices = config.training_devices
    lines = [*_sharing(config)]
    if config.trainer.devices == 1:
        return lines
    for role, fsdp in _sharded(config).items():
        size = fsdp.fsdp_size
        if size != -1 and devices % min(size, devices):
            lines.append(f"{role}.fsdp.fsdp_size={size}: {_choices(size, devices)}, or -1 for one group of all")
    size = config.worker.rollout.tensor_parallel_size
    if engine == "vllm":
        lines += _engines(size, config.engine_devices, config.trainer.n_gpus_per_node)
    return lines


def team_size(config: Config) -> int:
    """Workers that share sequences; nobody does where nothing is trained."""
    return 1 if config.trainer.val_only else config.worker.actor.ulysses_size


def engine_size(config: Config) -> int:
    """Workers that share an engine."""
    if choose_engine(config) != "vllm":
        return 1
    return min(config.worker.rollout.tensor_parallel_size, config.engine_devices)


def _engines_apart(config: Config, engine: Literal["vllm", "transformers"]) -> Iterator[str]:
    key, own, devices = "cluster.rollout_devices", config.cluster.rollout_devices, config.trainer.devices
    if config.trainer.async_rollout and not own and not config.trainer.val_only:
        cure = f"set it to some of the {devices} devices" if devices > 1 else "have 2 or more, and set it to some"
        yield f"trainer.async_rollout=true: answers are sampled beside training, but {key} is 0; {cure}"
    if own >= devices:
        most = f"; set it to {devices - 1} at most" if devices > 1 else "; set it to 0, or have more devices"
        yield f"{key}={own}: of {devices} device{'s' if devices > 1 else ''} none is left to train{most}"
    if own and engine == "transformers":
        yield (
            f"{key}={own}: the transformers engine samples with the trainer's own module, on the trainer's own "
            "devices; set it to 0, or use vLLM (worker.rollout.name=vllm)"
        )


def _sharing(config: Config) -> Iterator[str]:
    devices, size, key = config.training_devices, team_size(config), "worker.actor.ulysses_size"
    if devices % size:
        yield f"{key}={size}: {_choices(size, devices)}"
    elif size > 1 and (path := config.worker.actor.model.model_path):
        content = read_config(path)
        heads = (content.get("text_config") or content).get("num_attention_heads", size)
        if heads % size:
            yield f"{key}={size}: the model's {heads} attention heads cannot be shared evenly; {_divisors(heads)}"
    critic = config.worker.critic.ulysses_size
    if not config.trainer.val_only and config.algorithm.uses_critic and critic != size:
        yield (
            f"worker.critic.ulysses_size={critic}: actor and critic train on the same share of the answers, so it must "
            f"be {key}; set it to {size}"
        )


def _engines(size: int, devices: int, per_node: int) -> Iterator[str]:
    key = "worker.rollout.tensor_parallel_size"
    if size >= devices:
        return
    rest = devices % per_node  # on a machine that trains too
    if devices % size:
        yield f"{key}={size}: {_choices(size, devices)}"
    elif (per_node % size and size % per_node) or rest % size:
        yield f"{key}={size}: an engine would lie across machines of {per_node} devices; {_divisors(per_node)}"


def _sharded(config: Config) -> dict[str, FsdpConfig]:
    worker, algorithm = config.worker, config.algorithm
    found = {"worker.actor": worker.actor.fsdp}
    if config.trainer.val_only:
        return found
    if algorithm.uses_reference and not worker.actor.model.lora.rank:
        found["worker.ref"] = worker.ref.fsdp
    if algorithm.uses_critic:
        found["worker.critic"] = worker.critic.fsdp
    return found


def _choices(size: int, devices: int) -> str:
    return f"{devices} devices do not fall into groups of {size}; {_divisors(devices)}"


def _divisors(number: int) -> str:
    return "set it to " + ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
