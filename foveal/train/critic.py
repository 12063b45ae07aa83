"""The critic of PPO: a model of its own that says what each state is worth, and one step of training it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foveal.algorithm import aggregate
from foveal.algorithm.value import value_loss
from foveal.config import Config
from foveal.config.schema_model import ModelConfig
from foveal.data.processing import Processing
from foveal.errors import ModelError
from foveal.models.families import read_config
from foveal.models.feature_store import FeatureStore
from foveal.models.loading import DTYPES, empty_model, load_model
from foveal.models.lora import add_lora
from foveal.models.parts import freeze_parts
from foveal.models.recompute import set_checkpointing
from foveal.models.ulysses import Ulysses
from foveal.train.budget import initial_budget
from foveal.train.checkpoint import check_critic
from foveal.train.forward import autocast, autocast_dtype, source_states
from foveal.train.layout import PromptLayouts
from foveal.train.optim import build_optimizer, set_learning_rate
from foveal.train.packing import Pack, store
from foveal.train.peers import spread
from foveal.train.place import Place
from foveal.train.processes import several_processes
from foveal.train.retry import within_memory
from foveal.train.scoring import Packer
from foveal.train.sharding import reshard
from foveal.train.state import load_state
from foveal.train.step import optimizer_batches, optimizer_step
from foveal.types import Group, Metrics


class ValueScorer(nn.Module):
    """Backbone and value head in one module, so that a sharded version gathers both from the same root.

    The head is held and computed in float32, and starts at zero: before the first update every value is exactly 0.

    Args:
        model: a Hugging Face model with the packed attention installed. It loses its language-model head.
        autocast: the type that matrix products run in where it isn't the weights' own, else None.
        store: for what an untrained vision tower makes of pictures; whoever holds it clears it.
        offload: what the backward pass needs waits in host memory.
        ulysses: the processes that share each pack's tokens; all of them value the same packs, and get all values.
    """

    def __init__(
        self,
        model: Any,
        *,
        autocast: torch.dtype | None,
        store: FeatureStore | None = None,
        offload: bool = False,
        ulysses: Ulysses | None = None,
    ) -> None:
        super().__init__()
        self.offload = offload
        self.store = store
        self.ulysses = ulysses
        device = torch.device("cpu") if model.device.type == "meta" else model.device  # sharding moves it
        model.set_output_embeddings(None)
        self.model = model
        self.autocast = autocast
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=torch.float32, device=device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, pack: Pack) -> torch.Tensor:
        """(N,) float32: the value of the state before each response token of the pack."""
        device = pack.token_ids.device
        with autocast(device, self.autocast):
            states = source_states(self.model, pack, self.store, offload=self.offload, ulysses=self.ulysses)
        with torch.autocast(device.type, enabled=False):
            values: torch.Tensor = self.head(states.float()).squeeze(-1)
        if self.ulysses is None:
            return values
        owned = self.ulysses.owned(pack.source, pack.token_ids.shape[1])
        return self.ulysses.gather(values, owned, len(pack.source))


class Critic:
    """Holds the value model and its optimizer.

    Args:
        config: the whole configuration.
        scorer: the model, ready to value packed responses.
        packer: how to lay groups out for the update pass.
        experience_packer: the same for passes without gradients, which can take more tokens at once.
    """

    def __init__(self, config: Config, scorer: ValueScorer, packer: Packer, experience_packer: Packer) -> None:
        self.config = config.worker.critic
        self.scorer = scorer
        self.packer = packer
        self.experience_packer = experience_packer
        self.optimizer = build_optimizer(scorer, self.config.optim)

    @torch.no_grad()
    def values(self, groups: Sequence[Group]) -> None:
        """Stores (L,) the value of the state before each token as the column `values` of every trained response."""
        self.scorer.eval()

        def value() -> None:
            for pack in self.experience_packer.packs(groups):
                store(pack.responses, "values", self.scorer(pack))

        within_memory(self.experience_packer, "the critic's values", value)
        reshard(self.scorer)

    def update(
        self, groups: Sequence[Group], step: int, total_steps: int, sizes: Sequence[int] | None = None
    ) -> Metrics:
        """Trains on one step's groups: `ppo_epochs` passes, one optimizer step per `global_batch_size` prompts.

        Every trained response needs the columns `values`, from before the update, and `returns`.

        Args:
            sizes: as in `Policy.update`.

        Returns:
            means over the step under EasyR1's names: `critic/vf_loss`, `vf_clipfrac`, `vpred_mean`, `grad_norm` and
            `lr`; and, where there were any, the numbers of optimizer steps with a gradient that was not finite
            (`critic/not_finite_steps`) and without an answer (`critic/empty_steps`), which changed nothing.
        """
        rate = set_learning_rate(self.optimizer, step, total_steps, self.config.optim)
        self.scorer.train()
        sums: dict[str, float] = {}
        for _ in range(self.config.ppo_epochs):
            for _, batch in optimizer_batches(groups, self.config.global_batch_size, sizes):
                stats = optimizer_step(
                    self.optimizer, self.packer, batch, self._loss, self.config.max_grad_norm, "the critic's update"
                )
                for name, value in stats.items():
                    sums[name] = sums.get(name, 0.0) + value
        self.scorer.eval()
        return _means(sums, rate)

    def forget_step(self) -> None:
        """Drops what was kept of prompts and pictures for the passes of one step."""
        self.packer.layouts.clear()
        self.experience_packer.layouts.clear()
        if self.scorer.store is not None:
            self.scorer.store.clear()

    def load(self, folder: Path) -> None:
        """Reads weights and the optimizer's state, in place; the optimizer starts afresh where there is no state.

        Raises:
            CheckpointError: there is no critic, a file is missing or cut, or the critic is another model's.
        """
        load_state(folder, check_critic(folder), self.scorer, self.optimizer)

    def _loss(
        self, pack: Pack, total_tokens: int, total_sequences: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The pack's contribution to the loss of the optimizer step, and sums over its tokens for the metrics."""
        values = self.scorer(pack)
        mask = torch.ones_like(values, dtype=torch.bool)
        token_losses, stats = value_loss(
            values, pack.column("values"), pack.column("returns"), mask, self.config.cliprange_value
        )
        mode = self.config.loss_avg_mode
        loss = aggregate(token_losses, pack.lengths, mask, mode, total_tokens, total_sequences)
        return loss, {**stats, "vf_loss": loss}


def check_critic_model(config: Config, processing: Processing) -> None:
    """Checks, before a device is taken, that the critic's model can read what the actor's is given.

    Raises:
        ModelError: there is no such model, or it is of another family.
    """
    section, source = _source(config)
    assert source.model_path is not None
    family = read_config(source.model_path, section)["model_type"]
    if family != processing.model_type:
        raise ModelError(
            f"{section}.model_path: {source.model_path} is a {family}, but the critic reads what the actor's "
            f"{processing.model_type} is given; choose a model of that type, or leave the key out to start from the "
            "actor's."
        )


def load_critic(config: Config, processing: Processing, device: torch.device, place: Place | None = None) -> Critic:
    """Builds the critic: `worker.critic.model.model_path`, by default the actor's model, with a new value head.
    Among several processes it is sharded over all of them, and each must call this.

    Args:
        place: among them; None where none share sequences.

    Raises:
        ModelError: as `check_critic_model` and `load_model`.
    """
    check_critic_model(config, processing)
    critic = config.worker.critic
    section, source = _source(config)
    assert source.model_path is not None
    several = several_processes()
    sharing = place.sharing if place else None
    build = empty_model if several else load_model
    model: Any = build(
        source.model_path,
        dtype=DTYPES[critic.weights_dtype(device.type)],
        device=device,
        trust_remote_code=source.trust_remote_code,
        override_config=source.override_config,
        section=section,
    )
    freeze_parts(model, critic.model)
    lora = critic.model.lora
    if lora.rank:
        add_lora(model, lora, lora.adapter_path, section="worker.critic.model")
    set_checkpointing(model, critic.model.enable_gradient_checkpointing)
    layouts = PromptLayouts(model, processing.features)
    scorer = ValueScorer(
        model,
        autocast=None if several else autocast_dtype(model, critic.fsdp, device),
        store=FeatureStore(processes=max(config.trainer.n_gpus_per_node, 1)),
        offload=critic.model.activation_offload,
        ulysses=None if sharing is None else Ulysses(sharing, model, "worker.critic.ulysses_size"),
    ).eval()
    peers = None
    if several:
        adapter = lora.adapter_path if lora.rank else None
        peers = spread(
            scorer,
            source.model_path,
            critic.fsdp,
            device,
            adapter=adapter,
            role="critic",
            section=section,
            group=place.apart if place else None,
        )

    def packer() -> Packer:
        return Packer(
            budget=initial_budget(config),
            shared_prefix=config.worker.actor.shared_prefix,
            layouts=layouts,
            device=device,
            peers=peers,
        )

    return Critic(config, scorer, packer(), packer())


def _source(config: Config) -> tuple[str, ModelConfig]:
    """Which section of the configuration names the model that the critic starts from, and the section itself."""
    critic = config.worker.critic.model
    return ("worker.critic.model", critic) if critic.model_path else ("worker.actor.model", config.worker.actor.model)


def _means(sums: dict[str, float], rate: float) -> Metrics:
    steps, tokens = sums.pop("steps", 0.0), sums.pop("tokens", 0.0)
    metrics: Metrics = {"critic/lr": rate}
    for name, value in sums.items():
        if name in ("empty_steps", "not_finite_steps"):
            metrics[f"critic/{name}"] = value
        else:  # one number an optimizer step, or a sum over its tokens
            metrics[f"critic/{name}"] = value / (steps if name in ("vf_loss", "grad_norm") else tokens)
    return metrics
