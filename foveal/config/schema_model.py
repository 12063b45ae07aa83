"""Sections that the actor, the critic and the reference share: model, optimizer, precision and sharding, batches."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from foveal.config.sections import Dtype, Float, Mapping, NotNegative, Positive, PositiveOrOff, Section, UserPath


def _split_names(value: Any) -> Any:
    """One plain name, or several with commas between them, becomes a list; other texts are regular expressions."""
    if isinstance(value, str) and re.fullmatch(r"[\w.]+(\s*,\s*[\w.]*)*", value.strip()):
        return [name.strip() for name in value.split(",") if name.strip()]
    return value


Checkpointing = bool | Literal["selective"]
Modules = Annotated[str | list[str], BeforeValidator(_split_names)]


class LoraConfig(Section):
    """Low-rank adapters instead of full fine-tuning. They are trained in float32, without dropout; the other weights
    stay, and the reference policy is the model without them."""

    rank: NotNegative = Field(default=0, description="Rank of the adapters; 0 trains all weights.")
    alpha: Float = Field(default=64, gt=0, description="Adapters are scaled by alpha / rank.")
    target_modules: Modules = Field(
        default="all-linear",
        description="Linear layers that get adapters: `all-linear` for all but the output layer, a regular expression "
        "for whole module paths, or a list of names. Fused experts of a mixture are not linear layers.",
    )
    exclude_modules: Modules | None = Field(
        default=None, description="Modules that get none; `.*visual.*` leaves out the vision tower."
    )
    adapter_path: UserPath | None = Field(
        default=None,
        description="Folder or hub id of a peft adapter to go on from; rank, alpha and targets are the adapter's, and "
        "the reference policy is the model with this adapter. `model_path` may name the adapter's folder instead: the "
        "model is then the one that the adapter names.",
    )


class ModelConfig(Section):
    """Which model, and what of it is trained."""

    model_path: UserPath | None = Field(default=None, description="Folder or hub id of the model.")
    tokenizer_path: UserPath | None = Field(
        default=None, description="Folder or hub id of the tokenizer and processor; null means the model's."
    )
    override_config: Mapping = Field(
        default_factory=dict, description="Values to set in the model's own configuration."
    )
    enable_gradient_checkpointing: Checkpointing = Field(
        default=True,
        description="Compute activations again in the backward pass: less memory, about a third more time. `selective` "
        "does so in every other layer.",
    )
    activation_offload: bool = Field(
        default=False,
        description="Keep in host memory what the backward pass needs of the forward pass; with gradient checkpointing "
        "those are the inputs of the layers.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the model. EasyR1's schema has true."
    )
    freeze_vision_tower: bool = Field(default=False, description="Leave the weights of the vision tower as they are.")
    freeze_projector: bool | None = Field(
        default=None,
        description="Leave the weights between vision tower and language model as they are; null means as "
        "`freeze_vision_tower`.",
    )
    freeze_language_model: bool = Field(
        default=False, description="Leave the weights of the language model as they are, its output layer included."
    )
    lora: LoraConfig = Field(default_factory=LoraConfig, description="Low-rank adapters.")

    @property
    def frozen_parts(self) -> frozenset[str]:
        """Which of `vision`, `projector` and `language` are not trained."""
        projector = self.freeze_vision_tower if self.freeze_projector is None else self.freeze_projector
        frozen = {"vision": self.freeze_vision_tower, "projector": projector, "language": self.freeze_language_model}
        return frozenset(part for part, is_frozen in frozen.items() if is_frozen)


class OptimConfig(Section):
    """AdamW and its learning rate. Warm-up and schedule count trainer steps, the actor's after
    `trainer.critic_warmup`."""

    lr: Float = Field(default=1e-6, ge=0, description="Learning rate after warm-up.")
    lr_vision: Annotated[Float, Field(ge=0)] | None = Field(
        default=None, description="The same for the vision tower; null means `lr`. Warm-up and schedule are shared."
    )
    lr_projector: Annotated[Float, Field(ge=0)] | None = Field(
        default=None, description="The same for what lies between vision tower and language model; null means `lr`."
    )
    betas: tuple[Annotated[Float, Field(ge=0, lt=1)], Annotated[Float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.999), description="Decay rates of AdamW's two moments."
    )
    weight_decay: Float = Field(default=1e-2, ge=0, description="Decoupled weight decay.")
    strategy: Literal["adamw", "adamw_bf16", "adamw_8bit"] = Field(
        default="adamw",
        description="`adamw`; `adamw_bf16`, which holds weights and moments in bfloat16 and rounds stochastically; "
        "`adamw_8bit`, which holds moments in 8 bits. The last two need torchao (`pip install 'foveal[lowmem]'`).",
    )
    lr_warmup_ratio: Float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Part of all steps in which the rate rises from 0.",
    )
    lr_warmup_steps: NotNegative | None = Field(
        default=None, description="Steps in which the rate rises from 0; wins over `lr_warmup_ratio`."
    )
    min_lr_ratio: Annotated[Float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Where the cosine ends after the last step, as part of `lr`; null means 0."
    )
    lr_scheduler_type: Literal["constant", "cosine"] = Field(default="constant", description="The rate after warm-up.")


class FsdpConfig(Section):
    """Precision, and how weights are sharded over devices."""

    enable_full_shard: bool = Field(
        default=True,
        description="Shard the weights too, not only gradients and optimizer states; false: `gather_weights: step`.",
    )
    enable_cpu_offload: bool = Field(default=False, description="Keep sharded weights in host memory between uses.")
    enable_rank0_init: bool = Field(
        default=True,
        description="No effect: each process reads its own part of the weights.",
    )
    use_orig_params: bool = Field(
        default=False,
        description="A switch of FSDP1; FSDP2 always keeps the original parameters.",
    )
    torch_dtype: Dtype | None = Field(
        default=None,
        description="Type in which weights are held and updated; null means fp32 for what is trained, bf16 with "
        "`optim.strategy: adamw_bf16`, and on a GPU with LoRA, whose adapters are held in fp32 all the same.",
    )
    fsdp_size: PositiveOrOff = Field(
        default=-1,
        description="Devices that share one copy of the weights; -1 means all.",
    )
    mp_param_dtype: Dtype = Field(default="bf16", description="Type of weights and activations in computation.")
    mp_reduce_dtype: Dtype = Field(default="fp32", description="Type in which gradients are summed over devices.")
    mp_buffer_dtype: Dtype = Field(default="fp32", description="Type of buffers; FSDP2 leaves buffers as they are.")
    gradient_sync: Literal["auto", "every", "last"] = Field(
        default="auto",
        description="When gradients are summed over devices: after `every` micro-batch, or after the `last` of an "
        "optimizer step, which keeps them whole on each device until then. `auto`: the latter where they take at most "
        "15 % of a device's memory. Results do not depend on it.",
    )
    gather_weights: Literal["auto", "layer", "step"] = Field(
        default="auto",
        description="How long a device holds the weights that others keep: those of a `layer` until it is computed, "
        "or all for an optimizer `step`, and for a pass without gradient, which sends far less. `auto`: the latter "
        "where all take at most 15 % of a device's memory and none wait in host memory (`enable_cpu_offload`). Results "
        "do not depend on it.",
    )


class OffloadConfig(Section):
    """What waits in host memory while it is not used. On a CPU nothing moves."""

    offload_params: bool = Field(default=False, description="Move weights to host memory while answers are sampled.")
    offload_optimizer: bool = Field(
        default=False,
        description="Move optimizer states to host memory while answers are sampled, and back for the update.",
    )


class RefOffloadConfig(Section):
    """What of the reference waits in host memory. On a CPU nothing moves."""

    offload_params: bool = Field(default=False, description="Move weights to host memory while answers are sampled.")


class TrainedConfig(Section):
    """What the actor and the critic have in common."""

    strategy: Literal["fsdp"] = Field(default="fsdp", description="No effect: there is one way to shard.")
    global_batch_size: Positive = Field(
        default=256, description="Prompts per optimizer step (`worker.rollout.n` times as many answers)."
    )
    micro_batch_size_per_device_for_update: Positive = Field(
        default=4,
        description="Answers per forward and backward pass, where `worker.actor.token_budget` is `easyr1`: a budget of "
        "this many times the longest sequence, in tokens; results do not depend on it.",
    )
    micro_batch_size_per_device_for_experience: Positive = Field(
        default=16, description="The same for passes without gradient (log-probabilities, values)."
    )
    max_grad_norm: Float = Field(default=1.0, gt=0, description="Gradients with a larger norm are scaled down to it.")
    ppo_epochs: Positive = Field(default=1, description="Times that each batch is gone through.")
    padding_free: bool = Field(default=True, description="No effect: sequences are always packed without padding.")
    dynamic_batching: bool = Field(default=True, description="No effect: passes are always filled by number of tokens.")
    ulysses_size: Positive = Field(default=1, description="Devices that share one sequence (DeepSpeed-Ulysses).")
    model: ModelConfig = Field(default_factory=ModelConfig, description="The model.")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="The optimizer.")
    fsdp: FsdpConfig = Field(default_factory=FsdpConfig, description="Precision and sharding.")
    offload: OffloadConfig = Field(default_factory=OffloadConfig, description="What waits in host memory.")

    def weights_dtype(self, device_type: str) -> Literal["bf16", "fp16", "fp32"]:
        """The type in which the model's weights, other than adapters, are held."""
        small = self.optim.strategy == "adamw_bf16" or (self.model.lora.rank > 0 and device_type == "cuda")
        return self.fsdp.torch_dtype or ("bf16" if small else "fp32")
