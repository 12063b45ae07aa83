"""Sections that the actor, the critic and the reference share: model, optimizer, precision and sharding, batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from foveal.config.sections import Dtype, Float, NotNegative, Positive, PositiveOrOff, Section


def _split_at_commas(value: Any) -> Any:
    if isinstance(value, str) and "," in value:
        return [name.strip() for name in value.split(",") if name.strip()]
    return value


Modules = Annotated[str | list[str], BeforeValidator(_split_at_commas)]


class LoraConfig(Section):
    """Low-rank adapters instead of full fine-tuning."""

    rank: NotNegative = Field(default=0, description="Rank of the adapters; 0 trains all weights.")
    alpha: Positive = Field(default=64, description="Adapters are scaled by alpha / rank.")
    target_modules: Modules = Field(
        default="all-linear",
        description="Modules that get adapters: `all-linear`, a regular expression, or a list of names.",
    )
    exclude_modules: Modules | None = Field(
        default=None, description="Modules that get none; `.*visual.*` leaves out the vision tower."
    )


class ModelConfig(Section):
    """Which model, and what of it is trained."""

    model_path: str | None = Field(default=None, description="Folder or hub id of the model.")
    tokenizer_path: str | None = Field(
        default=None, description="Folder or hub id of the tokenizer and processor; null means the model's."
    )
    override_config: dict[str, Any] = Field(
        default_factory=dict, description="Values to set in the model's own configuration."
    )
    enable_gradient_checkpointing: bool = Field(
        default=True,
        description="Compute activations again in the backward pass: less memory, about a third more time.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the model. EasyR1's schema has true."
    )
    freeze_vision_tower: bool = Field(default=False, description="Leave the weights of the vision tower as they are.")
    lora: LoraConfig = Field(default_factory=LoraConfig, description="Low-rank adapters.")


class OptimConfig(Section):
    """AdamW and its learning rate. Warm-up and schedule count trainer steps."""

    lr: Float = Field(default=1e-6, ge=0, description="Learning rate after warm-up.")
    betas: tuple[Annotated[Float, Field(ge=0, lt=1)], Annotated[Float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.999), description="Decay rates of AdamW's two moments."
    )
    weight_decay: Float = Field(default=1e-2, ge=0, description="Decoupled weight decay.")
    strategy: Literal["adamw", "adamw_bf16"] = Field(
        default="adamw", description="`adamw`, or `adamw_bf16`, which holds weights and moments in bfloat16."
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
        default=None, description="Where the cosine ends, as part of `lr`; null means 0."
    )
    lr_scheduler_type: Literal["constant", "cosine"] = Field(default="constant", description="The rate after warm-up.")


class FsdpConfig(Section):
    """Precision, and how weights are sharded over devices."""

    enable_full_shard: bool = Field(
        default=True,
        description="Shard the weights too, not only gradients and optimizer states.",
    )
    enable_cpu_offload: bool = Field(default=False, description="Keep sharded weights in host memory between uses.")
    enable_rank0_init: bool = Field(
        default=True,
        description="Read weights in the first process only and send them to others.",
    )
    use_orig_params: bool = Field(
        default=False,
        description="A switch of FSDP1; FSDP2 always keeps the original parameters.",
    )
    torch_dtype: Dtype | None = Field(
        default=None, description="Type in which weights are held and updated; null means fp32 for what is trained."
    )
    fsdp_size: PositiveOrOff = Field(
        default=-1,
        description="Devices that share one copy of the weights; -1 means all.",
    )
    mp_param_dtype: Dtype = Field(default="bf16", description="Type of weights and activations in computation.")
    mp_reduce_dtype: Dtype = Field(default="fp32", description="Type in which gradients are summed over devices.")
    mp_buffer_dtype: Dtype = Field(default="fp32", description="Type of buffers; FSDP2 leaves buffers as they are.")


class OffloadConfig(Section):
    """What may wait in host memory. true allows it; it is done when memory needs it."""

    offload_params: bool = Field(default=False, description="Weights may move to host memory while they are not used.")
    offload_optimizer: bool = Field(
        default=False,
        description="Optimizer states may move to host memory between updates.",
    )


class RefOffloadConfig(Section):
    """What of the reference may wait in host memory."""

    offload_params: bool = Field(default=False, description="Weights may move to host memory while they are not used.")


class TrainedConfig(Section):
    """What the actor and the critic have in common."""

    strategy: Literal["fsdp"] = Field(default="fsdp", description="No effect: there is one way to shard.")
    global_batch_size: Positive = Field(
        default=256, description="Prompts per optimizer step (`worker.rollout.n` times as many answers)."
    )
    micro_batch_size_per_device_for_update: Positive = Field(
        default=4,
        description="Answers per forward and backward pass. It sets a budget of this many times the longest sequence, "
        "in tokens; results do not depend on it.",
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
    offload: OffloadConfig = Field(default_factory=OffloadConfig, description="What may wait in host memory.")
