"""Two optimizer steps of a tiny policy, in one process or sharded over several, on the same groups."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from foveal.algorithm import KLController
from foveal.config import load_config
from foveal.config.schema_model import FsdpConfig, LoraConfig, ModelConfig
from foveal.data.processing import load_processing
from foveal.models.filling import fill_weights
from foveal.models.loading import empty_model, load_model
from foveal.models.lora import add_lora
from foveal.models.parts import freeze_parts
from foveal.train.credit import assign_credit
from foveal.train.critic import load_critic
from foveal.train.layout import PromptLayouts
from foveal.train.peers import Peers
from foveal.train.policy import Policy
from foveal.train.scorer import Reference, StartScorer, TokenScorer
from foveal.train.scoring import Packer
from foveal.train.sharding import device_mesh, gathers_once, mixed_precision, shard, sums_at_end
from foveal.types import Group
from tests.lora_support import shake
from tests.random_groups import random_groups

CPU = torch.device("cpu")
WORLD = 2
SECONDS = 300
PICTURES = [1, 0, 2, 0, 0]
OWNERS = [0, 1, 0, 1, 1]  # all pictures in process 0, which has nothing of the second optimizer step
SIZES = [[2, 0], [1, 2]]  # groups of each process in each optimizer step; in one process 3 and 2
BUDGET = 30  # tokens of a micro-batch, so that the processes have different numbers of them


@dataclass
class Case:
    """What to train, and how."""

    folder: Path
    dtype: torch.dtype = torch.float64
    overrides: tuple[str, ...] = ()
    frozen_tower: bool = False
    tower_alone: bool = False  # is trained
    half: bool = False  # compute in bfloat16
    adam: bool = False
    lora: bool = False  # adapters of rank 4 whose B are not zero
    pictures: list[int] = field(default_factory=lambda: PICTURES)
    budget: int = BUDGET


@dataclass
class Outcome:
    """Metrics of the update, the weights before and after it, and the log-probabilities after it by group."""

    metrics: dict[str, float]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    logprobs: dict[int, np.ndarray]


def policy_of(case: Case, *, sharded: bool) -> Policy:
    config = load_config(
        [
            "worker.rollout.n=3",
            "data.rollout_batch_size=6",
            "worker.actor.global_batch_size=3",
            "algorithm.use_kl_loss=true",
            "algorithm.kl_coef=0.5",
            "worker.actor.max_grad_norm=0.5",
            "worker.actor.optim.lr=0.01",
            *case.overrides,
        ]
    )
    actor = config.worker.actor
    scorer = _scorer(case, actor.fsdp, sharded=sharded, checkpointing=bool(actor.model.enable_gradient_checkpointing))
    reference: Reference | None = None
    if config.algorithm.kl_penalty == "full" and case.lora:
        reference = StartScorer(scorer)
    elif config.algorithm.kl_penalty == "full":
        reference = _scorer(case, config.worker.ref.fsdp, sharded=sharded, checkpointing=False, trained=False)
    at_end = sums_at_end(scorer, actor.fsdp, mixed_precision(actor.fsdp, CPU), CPU)
    once = gathers_once(scorer, actor.fsdp, CPU)
    peers = Peers(scorer, CPU, sums_at_end=at_end, gathers_once=once) if sharded else None
    packer = Packer(case.budget, True, PromptLayouts(scorer.model, lambda p: p.features or {}), CPU, peers=peers)
    policy = Policy(config, scorer, packer, packer, reference)
    if not case.adam:  # whose steps hide the size of a gradient
        weights = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
        policy.optimizer = torch.optim.SGD(weights, lr=0.01, weight_decay=0.1)
    return policy


def _scorer(case: Case, fsdp: FsdpConfig, *, sharded: bool, checkpointing: bool, trained: bool = True) -> TokenScorer:
    build = empty_model if sharded else load_model
    model: Any = build(str(case.folder), dtype=case.dtype, device=CPU)
    if case.frozen_tower:
        freeze_parts(model, ModelConfig(freeze_vision_tower=True))
    if case.tower_alone:
        freeze_parts(model, ModelConfig(freeze_language_model=True))
    if case.lora:
        add_lora(model, LoraConfig(rank=4, alpha=8))
    if not trained:
        model.requires_grad_(False)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    scorer = TokenScorer(model, forbidden_ids=[201, 202], temperature=0.8, autocast=None)
    if sharded:
        precision = mixed_precision(fsdp, CPU)
        if case.half:
            precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        shard(scorer, fsdp, device_mesh(fsdp, "cpu"), precision)
        fill_weights(model, str(case.folder), device=CPU, offloaded=fsdp.enable_cpu_offload)
    if case.lora:
        shake(model)
    return scorer.eval()


def trained(case: Case, policy: Policy, rank: int | None = None) -> Outcome:
    """Runs the update on the groups of this process, or on all."""
    groups = groups_of(case, policy)
    sizes = None
    if rank is not None:
        groups = [group for group, owner in zip(groups, OWNERS, strict=True) if owner == rank]
        sizes = SIZES[rank]
    before = weights(policy.model)
    metrics = policy.update(groups, step=1, total_steps=1, kl_coef=0.5, sizes=sizes)
    for group in groups:
        for response in group.responses:
            del response.columns["old_logprobs"]
    policy.logprobs(groups)
    found = {g.prompt.row_index: np.concatenate([r.columns["old_logprobs"] for r in g.responses]) for g in groups}
    return Outcome(metrics, before, weights(policy.model), found)


def critic_trained(folder: Path, rank: int | None = None) -> Outcome:
    """The same for a critic of float32; with a process group it is sharded."""
    config = load_config(
        [
            f"worker.actor.model.model_path={folder}",
            "algorithm.adv_estimator=gae",
            "data.rollout_batch_size=6",
            "worker.critic.global_batch_size=3",
            "worker.actor.global_batch_size=3",
            f"worker.actor.token_budget={BUDGET}",
        ]
    )
    processing = load_processing(
        str(folder), tokenizer_path=None, trust_remote_code=False, min_pixels=None, max_pixels=None, chat_template=None
    )
    critic = load_critic(config, processing, CPU)
    critic.optimizer = torch.optim.SGD(critic.scorer.parameters(), lr=0.01, weight_decay=0.1)
    groups = random_groups(critic.scorer.model, PICTURES)
    rng = np.random.default_rng(1)
    for response in (response for group in groups for response in group.responses):
        for name in ("values", "returns"):
            response.columns[name] = rng.normal(0, 1, len(response.token_ids)).astype(np.float32)
    if rank is not None:
        groups = [group for group, owner in zip(groups, OWNERS, strict=True) if owner == rank]
    before = weights(critic.scorer)
    metrics = critic.update(groups, 1, 1, None if rank is None else SIZES[rank])
    return Outcome(metrics, before, weights(critic.scorer), {})


def groups_of(case: Case, policy: Policy) -> list[Group]:
    """Groups with advantages, and old and reference log-probabilities that could be the policy's."""
    groups = random_groups(policy.model, case.pictures)
    rng = np.random.default_rng(1)
    for group in groups:
        for response in group.responses:
            for name in ("old_logprobs", "ref_logprobs"):
                response.columns[name] = rng.normal(-5.3, 0.2, len(response.token_ids)).astype(np.float32)
    assign_credit(groups, policy.config, KLController(0.5))
    return groups


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in state.items()}


def in_processes(work: Callable[..., Any], folder: Path, *arguments: Any, world: int = WORLD) -> list[Any]:
    """What `work(rank, *arguments)` returns in each of `world` processes with a gloo group."""
    context = mp.start_processes(
        _process, (world, folder, work, arguments), nprocs=world, join=False, start_method="spawn"
    )
    end = time.monotonic() + SECONDS
    try:
        while not context.join(timeout=1):  # True once all have ended
            assert time.monotonic() < end, f"the processes did not end within {SECONDS} s"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"result_{rank}.pt", weights_only=False) for rank in range(world)]


def _process(rank: int, world: int, folder: Path, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        torch.save(work(rank, *arguments), folder / f"result_{rank}.pt")
        dist.barrier()  # one that leaves while the other still talks to it may abort
    finally:
        dist.destroy_process_group()
