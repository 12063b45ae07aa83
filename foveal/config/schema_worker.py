"""Section `worker`: actor, critic, reference, rollout and reward."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from foveal.config.schema_model import FsdpConfig, RefOffloadConfig, TrainedConfig
from foveal.config.schema_reward import RewardConfig
from foveal.config.sections import Dtype, Float, Mapping, NameOrFile, NotNegative, Positive, PositiveOrOff, Section

POLICY_LOSSES = ("default", "gspo", "gspo_token", "cispo", "sapo", "policy_gradient")
"""The names that `foveal.algorithm` registers."""


class ActorConfig(TrainedConfig):
    """The policy that is trained."""

    clip_ratio_low: Float = Field(default=0.2, ge=0, description="The importance ratio is clipped below 1 - this.")
    clip_ratio_high: Float = Field(default=0.3, ge=0, description="The importance ratio is clipped above 1 + this.")
    clip_ratio_dual: Float = Field(
        default=3.0,
        gt=1,
        description="Bound of the loss, as a multiple of a negative advantage (dual clip, Ye et al. 2020).",
    )
    loss_type: Annotated[str, AfterValidator(NameOrFile(POLICY_LOSSES))] = Field(
        default="default", description="Policy loss. `default` is clipped PPO; `FILE:function` loads one of your own."
    )
    tau_positive: Float = Field(
        default=1.0,
        gt=0,
        description="SAPO's temperature for tokens with a positive advantage.",
    )
    tau_negative: Float = Field(
        default=1.05,
        gt=0,
        description="SAPO's temperature for tokens with a negative advantage.",
    )
    loss_avg_mode: Literal["token", "seq", "seq_sum_norm"] = Field(
        default="token",
        description="Mean over all tokens of the optimizer step, over answers of each answer's own mean, or over "
        "answers of each answer's sum divided by `loss_sum_norm` (Dr. GRPO).",
    )
    loss_sum_norm: Annotated[Float, Field(gt=0)] | None = Field(
        default=None, description="Divisor of `loss_avg_mode: seq_sum_norm`; null means `data.max_response_length`."
    )
    entropy_coef: Float = Field(
        default=0.0, ge=0, description="Weight of the mean token entropy, which is taken from the loss as a bonus."
    )
    use_torch_compile: bool = Field(
        default=True,
        description="Compile the layers and the output head of all models on a GPU; blocks of the vision tower only "
        "where they are frozen or not checkpointed. The first step takes a minute longer for it.",
    )
    shared_prefix: bool = Field(
        default=True,
        description="Compute a prompt and its images once for all its answers. Results are the same without.",
    )
    token_budget: Literal["auto", "easyr1"] | Positive = Field(
        default="auto",
        description="Tokens per pass, of actor, reference and critic; results do not depend on it. `auto`: as many as "
        "the memory allows by arithmetic; where it runs out all the same, half as many from then on (on several "
        "devices with `trainer.max_restarts`). `easyr1`: "
        "micro batch size × (max_prompt_length + max_response_length).",
    )


class CriticConfig(TrainedConfig):
    """The value model of PPO (`algorithm.adv_estimator=gae`)."""

    padding_free: bool = Field(default=False, description="No effect: sequences are always packed without padding.")
    loss_avg_mode: Literal["token", "seq"] = Field(
        default="token",
        description="Mean over all tokens of the optimizer step, or over answers of each answer's own mean.",
    )
    cliprange_value: Float = Field(
        default=0.5,
        gt=0,
        description="A value may move this far from the old one in an update.",
    )


class RefConfig(Section):
    """The frozen reference policy of the KL term; the model is the actor's at the start."""

    strategy: Literal["fsdp"] = Field(default="fsdp", description="No effect: there is one way to shard.")
    fsdp: FsdpConfig = Field(default_factory=FsdpConfig, description="Precision and sharding.")
    offload: RefOffloadConfig = Field(default_factory=RefOffloadConfig, description="What waits in host memory.")


class RolloutConfig(Section):
    """How answers are sampled."""

    name: Literal["auto", "vllm", "transformers"] = Field(
        default="auto",
        description="Engine: vLLM, or the trainer's own module through transformers. `auto` takes vLLM where it runs.",
    )
    n: Positive = Field(default=1, description="Answers per prompt.")
    temperature: Float = Field(
        default=1.0, ge=0, description="Sampling temperature; above 0 in training. 0 means greedy, for validation."
    )
    top_p: Float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Sample from the smallest set of tokens with this probability.",
    )
    top_k: PositiveOrOff = Field(default=-1, description="Sample from this many most likely tokens; -1 means all.")
    seed: NotNegative = Field(default=1, description="Decides the random numbers of sampling.")
    limit_images: NotNegative = Field(
        default=0,
        description="Most images per prompt that vLLM is set up for; 0 means any.",
    )
    dtype: Dtype = Field(
        default="bf16",
        description="Type of vLLM's weights and activations; on a CPU fp32 where nothing sets it.",
    )
    gpu_memory_utilization: Float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="Part of a GPU's memory that vLLM may take. On a CPU the environment variable "
        "`VLLM_CPU_KVCACHE_SPACE` says how many GiB it takes for keys and values.",
    )
    ignore_eos: bool = Field(default=False, description="Go on to `data.max_response_length` whatever is sampled.")
    enforce_eager: bool = Field(
        default=False,
        description="Run vLLM without CUDA graphs: quicker start, slower sampling.",
    )
    enable_chunked_prefill: bool = Field(default=False, description="No effect: it meant vLLM's former engine.")
    tensor_parallel_size: Positive = Field(
        default=2, description="Devices that one vLLM engine is spread over; at most those there are."
    )
    max_model_len: Positive | None = Field(
        default=None, description="Longest sequence of the engine; null means prompt limit + response limit."
    )
    max_num_batched_tokens: Positive = Field(default=8192, description="Tokens that vLLM handles in one pass.")
    disable_log_stats: bool = Field(default=True, description="No effect: vLLM's own statistics are never printed.")
    disable_tqdm: bool = Field(default=False, description="Show no progress bar while answers are sampled.")
    val_override_config: Mapping = Field(
        default_factory=dict,
        description="Sampling in validation: any sampling parameter. Others are as in training, except n, which is 1.",
    )

    @property
    def val_sampling(self) -> dict[str, Any]:
        """Sampling parameters of validation by name, `val_override_config` applied."""
        names = ("temperature", "top_p", "top_k", "seed", "ignore_eos")
        return {"n": 1, **{name: getattr(self, name) for name in names}, **self.val_override_config}


class WorkerConfig(Section):
    """The parts that hold models or score answers."""

    hybrid_engine: Literal[True] = Field(
        default=True,
        description="No effect: `cluster.rollout_devices` says whether sampling and training share their devices.",
    )
    actor: ActorConfig = Field(default_factory=ActorConfig, description="The policy that is trained.")
    critic: CriticConfig = Field(default_factory=CriticConfig, description="The value model of PPO.")
    ref: RefConfig = Field(default_factory=RefConfig, description="The reference policy.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="How answers are sampled.")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="How answers are scored.")
