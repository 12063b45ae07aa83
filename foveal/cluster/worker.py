"""The worker of one device: the policy, the reference policy, and the engine that samples beside them, unless engines
have devices of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from foveal.algorithm import get_advantage
from foveal.cluster.room import check_room
from foveal.cluster.weight_channel import WeightSender
from foveal.config import Config
from foveal.config.schema_model import FsdpConfig, ModelConfig
from foveal.data.processing import Processing
from foveal.errors import EngineError
from foveal.models.feature_store import FeatureStore
from foveal.models.loading import DTYPES, empty_model, load_model, prepare
from foveal.models.lora import adapter_config, adapter_tensors, add_lora, has_lora, restore_lora, surviving_share
from foveal.models.named_tensors import named_tensors
from foveal.models.parts import freeze_parts
from foveal.models.recompute import set_checkpointing
from foveal.models.ulysses import Ulysses
from foveal.models.vision import same_features, vision_tower
from foveal.rollout.engine import RolloutEngine, choose_engine
from foveal.rollout.gathering_engine import GatheringEngine
from foveal.rollout.transformers_engine import TransformersEngine
from foveal.track import console
from foveal.train.budget import initial_budget, learning, set_budgets
from foveal.train.checkpoint import empty_trained, fill_trained, load_actor, load_trained
from foveal.train.critic import Critic, load_critic
from foveal.train.description import Description, describe_actor
from foveal.train.forward import autocast_dtype
from foveal.train.layout import PromptLayouts
from foveal.train.meter import Meter
from foveal.train.offload import Parking, Part, phase_parkings
from foveal.train.peers import Peers, spread, spread_with
from foveal.train.place import Place
from foveal.train.policy import Policy
from foveal.train.profile import Profile
from foveal.train.rng import KEY, load_rng, take_rng
from foveal.train.scorer import Reference, StartScorer, TokenScorer
from foveal.train.scoring import Packer, write_logprobs
from foveal.train.snapshot import Snapshot
from foveal.train.staging import Staging
from foveal.train.state import take_state
from foveal.types import Group, Metrics, Prompt, Sampling


class Worker:
    """Everything that happens on one device.

    Args:
        config: the whole configuration.
        processing: the model's tokenizer and processor.
        train: with False only sampling works: no optimizer and no reference policy are built.
        checkpoint: the actor's folder of a checkpoint to take the model from; None for `model_path`.
        weights: a Hugging Face folder that the policy starts from instead of `model_path`, which the reference stays.
        images: most pictures in a prompt.
        token_ceiling: as of `set_budgets`.
        place: among several workers, each of which must be built; every one of them must then make the same calls, in
            the same order, if only without a prompt or a group of its own.
    """

    def __init__(
        self,
        config: Config,
        processing: Processing,
        *,
        train: bool,
        checkpoint: Path | None = None,
        weights: Path | None = None,
        images: int = 0,
        token_ceiling: int = sys.maxsize,
        place: Place | None = None,
    ) -> None:
        self.config = config
        self.processing = processing
        self.place = place or Place()
        self.device = _device(self.place)
        actor = config.worker.actor
        self._source = str(weights or actor.model.model_path)
        # vLLM measures what memory it can have, so it starts first; then it sleeps until answers are wanted.
        has_engine = not config.cluster.rollout_devices
        vllm = self._start_vllm(images, train=train) if has_engine and choose_engine(config) == "vllm" else None
        dtype = actor.weights_dtype(self.device.type)
        model: Any
        if checkpoint is None:
            model = self._load(dtype, self._source)
            freeze_parts(model, actor.model)
            if actor.model.lora.rank:
                add_lora(model, actor.model.lora, actor.model.lora.adapter_path)
        elif self.place.alone:
            model = load_trained(checkpoint, dtype=DTYPES[dtype]).to(self.device)
            prepare(model, self.device)
        else:
            model = empty_trained(checkpoint, dtype=DTYPES[dtype]).requires_grad_(False)
            prepare(model, self.device)
        if train:
            set_checkpointing(model, actor.model.enable_gradient_checkpointing)
        self.scorer = scorer = self._scorer(model)
        self.peers: Peers | None = None
        if not self.place.alone and checkpoint is None:
            self.peers = self._spread(scorer, actor.fsdp, self._source)
        elif not self.place.alone and checkpoint is not None:
            fill = partial(fill_trained, checkpoint, device=self.device)
            self.peers = spread_with(scorer, fill, actor.fsdp, self.device, group=self.place.apart)
        model.eval()
        self.model = model
        self.layouts = PromptLayouts(model, processing.features)
        self.experience_packer = self._packer()
        self.policy: Policy | None = None
        self.reference: Reference | None = None
        self.critic: Critic | None = None
        if train:
            if config.algorithm.uses_reference and has_lora(model):
                self.reference = StartScorer(scorer)
            elif config.algorithm.uses_reference:
                default = "bf16" if self.device.type == "cuda" else "fp32"
                source = str(actor.model.model_path)
                reference = self._load(config.worker.ref.fsdp.torch_dtype or default, source)
                self.reference = self._scorer(reference.requires_grad_(False).eval())
                if not self.place.alone:
                    theirs = self._spread(self.reference, config.worker.ref.fsdp, source, role="ref")
                    if self.peers is not None and config.algorithm.exact_kl_in_loss:  # both are gathered in an update
                        self.peers.held_bytes += theirs.held_bytes
                self._share_features()
            self.policy = Policy(config, scorer, self._packer(), self.experience_packer, self.reference)
            if get_advantage(config.algorithm.adv_estimator).needs_values:
                self.critic = load_critic(config, processing, self.device, self.place)
            trained = {"actor": self.policy} | ({"critic": self.critic} if self.critic else {})
            set_budgets(config, trained, self.device, token_ceiling)
            self._compile()
        self.meter = self._start_meter()
        self.weight_version = 0
        self.engine: RolloutEngine | None = (vllm or self._transformers_engine()) if has_engine else None
        self._engine_awake = False
        self._share_told = False  # of merged adapters
        self._staging = Staging()
        # on a CPU the device's memory is the host's; without training there is one set of weights, which fits
        self.parked = self._parkings() if train and self.engine and self.device.type != "cpu" else {}

    def _start_vllm(self, images: int, *, train: bool) -> RolloutEngine:
        from foveal.rollout.vllm_engine import start_engine

        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            check_room(self.config, total, train=train, devices=self.place.world)
        engine = start_engine(self.config, self.processing, device=self.device, images=images)
        engine.sleep()
        return engine

    def _transformers_engine(self) -> TransformersEngine:
        make: Any = TransformersEngine
        if not self.place.alone:
            make = partial(GatheringEngine, self.scorer, self.config.worker.actor.fsdp, self.device)
        engine: TransformersEngine = make(
            self.model,
            self.processing.features,
            forbidden_ids=self.processing.forbidden_ids,
            eos_ids=self.processing.eos_ids,
            pad_id=self.processing.pad_id,
            autocast_dtype=self.scorer.autocast,
        )
        return engine

    def _load(self, dtype: str, source: str) -> Any:
        model = self.config.worker.actor.model
        build = load_model if self.place.alone else empty_model
        return build(
            source,
            dtype=DTYPES[dtype],
            device=self.device,
            trust_remote_code=model.trust_remote_code,
            override_config=model.override_config,
        )

    def _scorer(self, model: Any) -> TokenScorer:
        alone, sharing = self.place.alone, self.place.sharing
        scorer = TokenScorer(
            model,
            forbidden_ids=self.processing.forbidden_ids,
            temperature=self.config.worker.rollout.temperature,
            autocast=autocast_dtype(model, self.config.worker.actor.fsdp, self.device) if alone else None,
            store=FeatureStore(processes=max(self.config.trainer.n_gpus_per_node, 1)),
            offload=self.config.worker.actor.model.activation_offload,
            ulysses=None if sharing is None else Ulysses(sharing, model),
        )
        return scorer.to(self.device) if alone else scorer

    def _spread(self, scorer: TokenScorer, fsdp: FsdpConfig, source: str, role: str = "actor") -> Peers:
        lora = self.config.worker.actor.model.lora
        adapter = lora.adapter_path if lora.rank and role == "actor" else None
        return spread(scorer, source, fsdp, self.device, adapter=adapter, role=role, group=self.place.apart)

    def _share_features(self) -> None:
        """Lets the reference use what the policy's vision tower made of a picture, and the other way round, where
        both make the same of it."""
        if not isinstance(self.reference, TokenScorer):
            return
        ours, theirs = self.scorer, self.reference
        same = ours.autocast == theirs.autocast and same_features(vision_tower(ours.model), vision_tower(theirs.model))
        theirs.store = ours.store if same else None  # alone it sees each picture once a step

    def forget_step(self) -> None:
        """Drops what was kept of prompts and pictures for the passes of one step."""
        self.layouts.clear()
        if self.critic:
            self.critic.forget_step()
        for scorer in (self.scorer, self.reference):
            if isinstance(scorer, TokenScorer) and scorer.store is not None:
                scorer.store.clear()

    def _packer(self) -> Packer:
        return Packer(
            budget=initial_budget(self.config),
            shared_prefix=self.config.worker.actor.shared_prefix,
            layouts=self.layouts,
            device=self.device,
            peers=self.peers,
        )

    def _compile(self) -> None:
        """Compiles the layers of all models where `worker.actor.use_torch_compile` asks for it, on a GPU."""
        actor, critic = self.config.worker.actor, self.config.worker.critic
        if not actor.use_torch_compile:
            return
        if self.device.type == "cpu":
            if "worker.actor.use_torch_compile" in self.config.given:
                console.note("nothing is compiled on a CPU (worker.actor.use_torch_compile)")
            return
        from foveal.models.compiling import compile_layers

        compile_layers(self.model, vision=_keeps_blocks(actor.model))
        self.scorer.compiled = True
        if isinstance(self.reference, TokenScorer):
            compile_layers(self.reference.model, vision=True)
            self.reference.compiled = True
        if self.critic is not None:
            compile_layers(self.critic.scorer.model, vision=_keeps_blocks(critic.model))

    def _start_meter(self) -> Meter:
        meter = Meter(
            self.device,
            lambda prompt: [picture.grid for picture in self.layouts(prompt).pictures],
            absent=lambda: self.engine.asleep_bytes if self.engine else 0,
        )
        scorers = [self.scorer, self.reference, self.critic.scorer if self.critic else None]
        for scorer in (scorer for scorer in scorers if scorer is not None):
            meter.watch(scorer)
        return meter

    def _parkings(self) -> dict[Part, Parking]:
        return phase_parkings(
            self.config,
            self.device,
            # an engine without a type samples with these very weights
            actor=None if self._own_engine.dtype is None else self.model,
            optimizer=self.policy.optimizer if self.policy else None,
            reference=self.reference if isinstance(self.reference, TokenScorer) else None,
            critic=self.critic.scorer if self.critic else None,
            critic_optimizer=self.critic.optimizer if self.critic else None,
        )

    def _fetch(self, *names: Part) -> None:
        """Brings back what waits in host memory, after the engine has made room."""
        self.rest_engine()
        for name in names:
            if name in self.parked:
                self.parked[name].back()

    def rollout(self, prompts: list[Prompt], sampling: Sampling) -> Iterator[Group]:
        """Yields groups as they finish, their responses decoded. The engine wakes up for it, with today's weights."""
        for group in self.sample(prompts, sampling):
            self.processing.decode(group, skip_special_tokens=self.config.worker.reward.skip_special_tokens)
            yield group

    def sample(self, prompts: list[Prompt], sampling: Sampling) -> Iterator[Group]:
        """As `rollout`, but responses have no text."""
        self.hand_over()
        engine = self._own_engine
        engine.submit(prompts, sampling, self.weight_version)
        with self.meter.generation() as count:
            for group in engine.collect():
                count(group)
                yield group

    def hand_over(self) -> None:
        """Wakes the engine with today's weights, where it sleeps."""
        if self._engine_awake:
            return
        self.forget_step()
        self._fetch("actor")
        for name in self.parked.keys() - {"actor"}:
            self.parked[name].away()
        self._engine_awake = True  # from here on it holds memory, also where a signal stops it halfway
        self._own_engine.wake()
        self.hand_over_weights(self._own_engine)
        if "actor" in self.parked:
            self.parked["actor"].away()  # the engine takes memory for its cache next

    def hand_over_weights(self, to: RolloutEngine | WeightSender, *, has_base: bool = False) -> None:
        """Gives today's weights to an engine: whole, or as the base weights and an adapter where it takes these.

        Args:
            has_base: whether it still has the base weights, which an adapter leaves as they are.
        """
        adapted = has_lora(self.model)
        apart = adapted and to.takes_adapters
        if not (apart and has_base):
            to.update_weights(named_tensors(self.model, dtype=to.dtype, merge=not apart), self.weight_version)
        if apart:
            to.update_adapter(adapter_tensors(self.model), adapter_config(self.model), self.weight_version)
        elif adapted and to.dtype is not None and self.weight_version and not self._share_told:
            self._share_told = True
            console.note(
                f"adapters are merged into the engine's weights: of their effect at step {self.weight_version} "
                f"{surviving_share(self.model, to.dtype):.0%} survives the rounding to "
                f"{str(to.dtype).removeprefix('torch.')}"
            )

    def old_logprobs(self, groups: Sequence[Group]) -> None:
        """Stores `old_logprobs`: those of the policy before the update."""
        self._fetch("actor")
        with self.meter.phase("old", self.scorer, groups):
            self._trained.logprobs(groups)

    def ref_logprobs(self, groups: Sequence[Group]) -> None:
        """Stores `ref_logprobs`: those of the policy that the run started from."""
        assert self.reference is not None
        self._fetch("actor" if isinstance(self.reference, StartScorer) else "reference")
        with self.meter.phase("ref", self.reference, groups):
            write_logprobs(self.reference, self.experience_packer, groups, "ref_logprobs")

    def values(self, groups: Sequence[Group]) -> None:
        """Stores `values`: the critic's value of the state before each token."""
        assert self.critic is not None
        self._fetch("critic")
        with self.meter.phase("values", self.critic.scorer, groups):
            self.critic.values(groups)

    def update_critic(
        self, groups: Sequence[Group], step: int, total_steps: int, sizes: Sequence[int] | None = None
    ) -> Metrics:
        """One trainer step of the critic; `sizes` as in `Policy.update`."""
        assert self.critic is not None
        self._fetch("critic", "critic optimizer")
        passes = self.config.worker.critic.ppo_epochs
        with self.meter.phase("update_critic", self.critic.scorer, groups, passes=passes):
            with self._learning(self.critic, "critic"):
                return self.critic.update(groups, step, total_steps, sizes)

    def update(
        self,
        groups: Sequence[Group],
        step: int,
        total_steps: int,
        kl_coef: float,
        sizes: Sequence[int] | None = None,
    ) -> Metrics:
        """One trainer step; the engine samples with the new weights from then on. `sizes` as in `Policy.update`."""
        needed: list[Part] = ["actor", "actor optimizer"]
        if self.config.algorithm.exact_kl_in_loss:
            needed.append("reference")
        self._fetch(*needed)
        passes = self.config.worker.actor.ppo_epochs
        with self.meter.phase("update_actor", self.scorer, groups, passes=passes):
            with self._learning(self._trained, "actor"):
                metrics = self._trained.update(groups, step, total_steps, kl_coef, sizes)
        self.forget_step()
        self.weight_version = step
        return metrics

    @contextmanager
    def _learning(self, model: Policy | Critic, role: str) -> Iterator[None]:
        """Around an update: what it takes of a GPU's memory says how large its passes may be."""
        if self.device.type != "cuda" or self.config.worker.actor.token_budget != "auto":
            yield
            return
        torch.cuda.empty_cache()  # what the passes without gradient left is of other sizes
        with learning(model, self.device, role):
            yield

    def performance(self, timings: dict[str, float]) -> Metrics:
        """Rates and memory of what was done since the last call (`Meter.metrics`), given the seconds of each phase."""
        return self.meter.metrics(timings)

    def start_profile(self, step: int, folder: Path) -> None:
        """Records what is done until `stop_profile`, for files in `folder`."""
        self.meter.profile = Profile(self.device, folder, step, self.meter.absent)
        if self.engine is not None:
            self.engine.on_step = self.meter.profile.tick

    def stop_profile(self, timings: dict[str, float]) -> str:
        """Writes the profile (`Profile.write`), given the seconds of each phase, and says where it is."""
        assert self.meter.profile is not None
        written = self.meter.profile.write(timings)
        self.meter.profile = None
        if self.engine is not None:
            self.engine.on_step = None
        return written

    def snapshot(self, *, model_only: bool, copied: bool) -> Snapshot:
        """Takes what a checkpoint is to hold now.

        Args:
            model_only: leaves the states of optimizers and random generators out (`trainer.save_model_only`).
            copied: copies it to host memory, if there is room; over the copy before, which must have been written.
        """
        # whole weights, which states are not made of
        gathered = self.engine is not None and self.engine.dtype is None and not self.place.alone
        if gathered or any(parking.is_away for parking in self.parked.values()):
            self._make_room()
            self._fetch(*self.parked)
        states = {"actor": take_state(self.model, None if model_only else self._trained.optimizer)}
        if self.critic:
            states["critic"] = take_state(self.critic.scorer, None if model_only else self.critic.optimizer)
        if not model_only:
            states["actor"][KEY] = take_rng()
        copied = copied and self._staging.fits(states)
        if copied:
            states = self._staging.copy(states)
        outline = self._outline if self.config.trainer.save_hf else None
        return Snapshot(states["actor"], states.get("critic"), self._description, copied, outline)

    @cached_property
    def _description(self) -> Description:
        return describe_actor(
            self.model,
            source_path=self._source,
            save_processing=self.processing.save,
            override_config=self.config.worker.actor.model.override_config,
        )

    @cached_property
    def _outline(self) -> torch.nn.Module:
        """The policy without weights. Not built when it is needed, beside training: that changes the default dtype."""
        actor = self.config.worker.actor.model
        outline = empty_model(
            self._source,
            dtype=torch.float32,
            device=torch.device("cpu"),
            trust_remote_code=actor.trust_remote_code,
            override_config=actor.override_config,
        )
        if has_lora(self.model):
            restore_lora(outline, adapter_config(self.model))
        return outline

    def load(self, folder: Path, step: int) -> None:
        """Reads weights, and the states of optimizers and random generators, from the checkpoint of step `step`."""
        self._fetch(*self.parked)
        load_actor(folder / "actor", self.model, self.policy.optimizer if self.policy else None)
        if self.critic:
            self.critic.load(folder / "critic")
        load_rng(folder / "actor")
        self.forget_step()
        self._share_features()
        self.weight_version = step

    def close(self) -> None:
        """Ends the engine."""
        if self.engine is not None:
            self.engine.close()

    def _make_room(self) -> None:
        """Takes the engine's memory from it; for good where it was stopped in the middle of its work, as by Ctrl-C."""
        try:
            self.rest_engine()
        except EngineError:
            self._own_engine.close()
            self._engine_awake = False

    def rest_engine(self) -> None:
        """Before anything else uses the device or changes the weights, which the engine takes anew when it wakes up."""
        if self._engine_awake:
            self._own_engine.sleep()
            self._engine_awake = False

    @property
    def _own_engine(self) -> RolloutEngine:
        assert self.engine is not None, "this worker was built without an engine"
        return self.engine

    @property
    def _trained(self) -> Policy:
        assert self.policy is not None, "this worker was built without an optimizer"
        return self.policy


def _device(place: Place) -> torch.device:
    """Among several workers each sees one GPU only."""
    if torch.cuda.is_available():
        return torch.device("cuda" if place.alone else "cuda:0")
    return torch.device("cpu")


def _keeps_blocks(model: ModelConfig) -> bool:
    """Whether no block of the vision tower is computed a second time for a backward pass."""
    return not model.enable_gradient_checkpointing or "vision" in model.frozen_parts
