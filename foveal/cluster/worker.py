"""The worker of one device: the policy, the reference policy, and the engine that samples beside them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from foveal.algorithm import get_advantage
from foveal.cluster.room import check_room
from foveal.config import Config
from foveal.data.processing import Processing
from foveal.models.attention import install
from foveal.models.flops import peak_flops, training_flops
from foveal.models.loading import DTYPES, freeze_vision_tower, load_model
from foveal.models.named_tensors import named_tensors
from foveal.rollout.engine import RolloutEngine, choose_engine
from foveal.rollout.transformers_engine import TransformersEngine
from foveal.track.console import note
from foveal.train.checkpoint import load_actor, load_trained, save_actor
from foveal.train.critic import Critic, load_critic
from foveal.train.forward import autocast_dtype
from foveal.train.policy import Policy
from foveal.train.scorer import TokenScorer
from foveal.train.scoring import Packer, token_budget, write_logprobs
from foveal.types import Group, Metrics, Prompt, Sampling


class Worker:
    """Everything that happens on one device.

    Args:
        config: the whole configuration.
        processing: the model's tokenizer and processor.
        train: with False only sampling works: no optimizer and no reference policy are built.
        checkpoint: the actor's folder of a checkpoint to take the model from; None for `model_path`.
        images: most pictures in a prompt.
    """

    def __init__(
        self, config: Config, processing: Processing, *, train: bool, checkpoint: Path | None = None, images: int = 0
    ) -> None:
        self.config = config
        self.processing = processing
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        actor = config.worker.actor
        # vLLM measures what memory it can have, so it starts first; then it sleeps until answers are wanted.
        vllm = self._start_vllm(images, train=train) if choose_engine(config) == "vllm" else None
        dtype = actor.fsdp.torch_dtype or "fp32"
        model: Any
        if checkpoint is None:
            model = self._load(dtype)
        else:
            model = load_trained(checkpoint, dtype=DTYPES[dtype]).to(self.device)
            install(model)
        if actor.model.freeze_vision_tower:
            freeze_vision_tower(model)
        self.scorer = scorer = self._scorer(model)
        model.eval()
        self.model = model
        self.experience_packer = self._packer(actor.micro_batch_size_per_device_for_experience)
        self.policy: Policy | None = None
        self.reference: TokenScorer | None = None
        self.critic: Critic | None = None
        if train:
            if actor.model.enable_gradient_checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if config.algorithm.uses_reference:
                default = "bf16" if self.device.type == "cuda" else "fp32"
                reference = self._load(config.worker.ref.fsdp.torch_dtype or default)
                self.reference = self._scorer(reference.requires_grad_(False).eval())
            self.policy = Policy(
                config,
                scorer,
                self._packer(actor.micro_batch_size_per_device_for_update),
                self.experience_packer,
                self.reference,
            )
            if get_advantage(config.algorithm.adv_estimator).needs_values:
                self.critic = load_critic(config, processing, self.device)
        self.weight_version = 0
        self.engine: RolloutEngine = vllm or TransformersEngine(
            model,
            processing.features,
            forbidden_ids=processing.forbidden_ids,
            eos_ids=processing.eos_ids,
            pad_id=processing.pad_id,
            autocast_dtype=scorer.autocast,
        )
        self._engine_awake = False

    def _start_vllm(self, images: int, *, train: bool) -> RolloutEngine:
        from foveal.rollout.vllm_engine import VllmEngine

        model_path = self.config.worker.actor.model.model_path
        assert model_path is not None
        if self.device.type == "cuda":
            check_room(self.config, torch.cuda.get_device_properties(self.device).total_memory, train=train)
        note(f"starting vLLM: {'one to two minutes' if self.device.type == 'cuda' else 'about ten seconds'}")
        started = time.perf_counter()
        engine = VllmEngine(self.config, self.processing, model_path=model_path, device=self.device, images=images)
        engine.sleep()
        seconds = time.perf_counter() - started
        note(f"vLLM is there after {seconds:.0f} s, with room for {engine.cache_tokens:,} tokens in work")
        return engine

    def _load(self, dtype: str) -> Any:
        model = self.config.worker.actor.model
        assert model.model_path is not None
        return load_model(
            model.model_path,
            dtype=DTYPES[dtype],
            device=self.device,
            trust_remote_code=model.trust_remote_code,
            override_config=model.override_config,
        )

    def _scorer(self, model: Any) -> TokenScorer:
        return TokenScorer(
            model,
            forbidden_ids=self.processing.forbidden_ids,
            temperature=self.config.worker.rollout.temperature,
            autocast=autocast_dtype(model, self.config.worker.actor.fsdp, self.device),
        ).to(self.device)

    def _packer(self, responses: int) -> Packer:
        actor = self.config.worker.actor
        return Packer(
            budget=token_budget(self.config, responses),
            shared_prefix=actor.shared_prefix,
            features=self.processing.features,
            model=self.model,
            device=self.device,
        )

    def rollout(self, prompts: list[Prompt], sampling: Sampling) -> Iterator[Group]:
        """Yields groups as they finish, their responses decoded. The engine wakes up for it, with today's weights."""
        if not self._engine_awake:
            self.engine.wake()
            self.engine.update_weights(named_tensors(self.model, dtype=self.engine.dtype), self.weight_version)
            self._engine_awake = True
        skip = self.config.worker.reward.skip_special_tokens
        tokenizer = self.processing.tokenizer
        self.engine.submit(prompts, sampling, self.weight_version)
        for group in self.engine.collect():
            for response in group.responses:
                response.text = str(tokenizer.decode(response.token_ids.tolist(), skip_special_tokens=skip))
            yield group

    def old_logprobs(self, groups: Sequence[Group]) -> None:
        """Stores `old_logprobs`: those of the policy before the update."""
        self.rest_engine()
        self._trained.logprobs(groups)

    def ref_logprobs(self, groups: Sequence[Group]) -> None:
        """Stores `ref_logprobs`: those of the policy that the run started from."""
        assert self.reference is not None
        self.rest_engine()
        write_logprobs(self.reference, self.experience_packer, groups, "ref_logprobs")

    def values(self, groups: Sequence[Group]) -> None:
        """Stores `values`: the critic's value of the state before each token."""
        assert self.critic is not None
        self.rest_engine()
        self.critic.values(groups)

    def update_critic(self, groups: Sequence[Group], step: int, total_steps: int) -> Metrics:
        """One trainer step of the critic."""
        assert self.critic is not None
        return self.critic.update(groups, step, total_steps)

    def update(self, groups: Sequence[Group], step: int, total_steps: int, kl_coef: float) -> Metrics:
        """One trainer step; the engine samples with the new weights from then on."""
        self.rest_engine()
        metrics = self._trained.update(groups, step, total_steps, kl_coef)
        self.weight_version = step
        return metrics

    def utilisation(self, tokens: int, seconds: float) -> Metrics:
        """`perf/mfu_actor`: the share of the device's peak rate that an update over `tokens` tokens reached, where the
        peak is known."""
        peak = peak_flops(self.device)
        return {"perf/mfu_actor": training_flops(self.model, tokens) / seconds / peak} if peak and seconds else {}

    def save(self, folder: Path, *, model_only: bool) -> None:
        """Writes the folders `actor` and, where there is one, `critic` of a checkpoint."""
        save_actor(
            folder / "actor",
            self.model,
            None if model_only else self._trained.optimizer,
            source_path=str(self.config.worker.actor.model.model_path),
            save_processing=self.processing.save,
            override_config=self.config.worker.actor.model.override_config,
        )
        if self.critic:
            self.critic.save(folder / "critic", model_only=model_only)

    def load(self, folder: Path, step: int) -> None:
        """Reads weights, and the optimizer's state where one is trained, from the actor's folder of step `step`."""
        load_actor(folder / "actor", self.model, self.policy.optimizer if self.policy else None)
        if self.critic:
            self.critic.load(folder / "critic")
        self.weight_version = step
        self.rest_engine()

    def close(self) -> None:
        """Ends the engine."""
        self.engine.close()

    def rest_engine(self) -> None:
        """Before anything else uses the device or changes the weights, which the engine takes anew when it wakes up."""
        if self._engine_awake:
            self.engine.sleep()
            self._engine_awake = False

    @property
    def _trained(self) -> Policy:
        assert self.policy is not None, "this worker was built without an optimizer"
        return self.policy
