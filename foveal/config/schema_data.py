"""Sections `data` and `algorithm`: what is learnt from, and how answers become advantages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from foveal.config.sections import Float, NameOrFile, NotNegative, Positive, PositiveOrOff, Section

ADVANTAGE_ESTIMATORS = (
    "grpo",
    "dr_grpo",
    "grpo_passk",
    "rloo",
    "opo",
    "maxrl",
    "gdpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "gae",
)
"""The names that `foveal.algorithm` registers."""

GROUP_ESTIMATORS = ("grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "maxrl", "gdpo", "reinforce_plus_plus_baseline")
"""Those that compare the answers to one prompt with each other."""

CORRECTION_BOUNDS = {
    "none": (0.0, 1.0),
    "tis": (0.0, 2.0),
    "tis_seq": (0.0, 2.0),
    "mis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
}
"""Lowest and highest importance ratio of each kind where the configuration names none, as in their papers."""


class DataConfig(Section):
    """Rows, prompts, and how many go into a step."""

    train_files: str | list[str] | None = Field(
        default=None,
        description="Training rows: a data file, a folder or glob of them, or a hub data set, as "
        "`PATH_OR_HUB_ID@split`. Without `@` the split is `train`; `hub_id:subset@split` picks a subset, "
        "`@split[:100]` the first rows, `dataset_info.json:NAME` an entry of LLaMA-Factory's. A list mixes several; "
        "`*2` after one takes its rows twice in an epoch, `*0.5` half of them.",
    )
    val_files: str | list[str] | None = Field(
        default=None, description="Validation rows, written like `data.train_files`. Without it nothing is validated."
    )
    prompt_key: str = Field(
        default="prompt",
        min_length=1,
        description="Column with the question: text, or a list of chat messages, of which the last of the user is "
        "answered. `<image>` and `<video>` mark where media go.",
    )
    answer_key: str = Field(
        default="answer", min_length=1, description="Column that the reward function gets as `ground_truth`."
    )
    image_key: str = Field(
        default="images", description="Column with a row's images: paths, bytes or decoded pictures."
    )
    video_key: str = Field(default="videos", description="Column with a row's videos.")
    image_dir: str | None = Field(
        default=None, description="Folder that relative paths of images and videos start from."
    )
    allow_urls: bool = Field(
        default=False,
        description="Download media and data files that are given as http(s) addresses, once, into the cache on disk. "
        "false: they are refused.",
    )
    video_fps: Float = Field(default=2.0, gt=0, description="Frames a second sampled from a video.")
    max_prompt_length: Positive = Field(
        default=512, description="Most tokens a prompt may have, image and video tokens included."
    )
    max_response_length: Positive = Field(
        default=512, description="Most tokens an answer may have, the end token included."
    )
    rollout_batch_size: Positive = Field(
        default=512, description="Prompts per step. Each gets `worker.rollout.n` answers."
    )
    mini_rollout_batch_size: Positive | None = Field(
        default=None,
        description="Prompts per generation call while a batch is being collected; null means all of the batch. "
        "With `algorithm.online_filtering` it may be larger than the batch.",
    )
    val_batch_size: PositiveOrOff = Field(default=-1, description="Prompts per validation batch; -1 means all in one.")
    format_prompt: str | None = Field(
        default=None,
        description="Jinja file that wraps the question (`content` in it; every column by its name). null: the "
        "question as it is.",
    )
    system_prompt: str | None = Field(
        default=None,
        description="Text of a system message for prompts that have none. null: what the model's chat "
        "template does without one.",
    )
    override_chat_template: str | None = Field(
        default=None, description="File with a chat template to use instead of the model's own."
    )
    shuffle: bool = Field(default=True, description="Draw training rows in a new random order each epoch.")
    seed: NotNegative = Field(default=1, description="Decides the order of the rows.")
    min_pixels: Positive | None = Field(
        default=262144, description="Smaller images are enlarged to this many pixels. null: the processor's own limit."
    )
    max_pixels: Positive | None = Field(
        default=4194304,
        description="Larger images, and frames of videos, are reduced to this many pixels. null: the processor's own "
        "limit.",
    )
    filter_overlong_prompts: bool = Field(
        default=True,
        description="Leave out rows whose prompt exceeds `data.max_prompt_length`, and count them. false: such a row "
        "is an error. Prompts are never cut.",
    )
    filter_overlong_prompts_workers: Positive = Field(
        default=16, description="Most processes that measure prompts, where there are enough of them for that."
    )
    on_bad_row: Literal["skip", "stop"] = Field(
        default="skip",
        description="A row whose image or video cannot be read: left out and counted, or the end of the run.",
    )

    @property
    def max_sequence_length(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self.max_prompt_length + self.max_response_length


class AlgorithmConfig(Section):
    """Advantages, KL to the reference, and which groups are kept."""

    adv_estimator: Annotated[str, AfterValidator(NameOrFile(ADVANTAGE_ESTIMATORS))] = Field(
        default="grpo", description="How rewards become advantages. `FILE:function` loads one of your own."
    )
    reward_parts: dict[str, Float] = Field(
        default_factory=dict,
        description="For `adv_estimator=gdpo`: numbers of the reward function that are normalised by themselves, and "
        "the weight of each in the sum, as `{accuracy: 0.9, format: 0.1}`.",
    )
    old_logprobs: Literal["auto", "recompute", "rollout"] = Field(
        default="auto",
        description="Log-probabilities that the update starts from: `recompute` takes a separate pass, `rollout` the "
        "engine's own. `auto` recomputes them only where more than one optimizer step per batch, or a KL in the "
        "reward, needs it.",
    )
    correction: Literal["none", "tis", "tis_seq", "mis", "icepop"] = Field(
        default="none",
        description="Weight of each token where engine and trainer differ: its importance ratio cut at an upper bound "
        "(`tis`), the same for the whole answer (`tis_seq`), or the ratio of the answer (`mis`) or of the token "
        "(`icepop`) where it lies within bounds and 0 elsewhere.",
    )
    correction_low: Annotated[Float, Field(ge=0)] | None = Field(
        default=None, description="Lower bound of `mis` and `icepop`; null means 0 for `mis`, 0.5 for `icepop`."
    )
    correction_high: Annotated[Float, Field(gt=0)] | None = Field(
        default=None, description="Upper bound of the importance ratio; null means 2, or 5 for `icepop`."
    )
    disable_kl: bool = Field(default=False, description="Use no KL term; then no reference model is held.")
    use_kl_loss: bool = Field(
        default=False, description="Add the KL term to the loss. false: it is taken from the reward of each token."
    )
    kl_penalty: Literal["kl", "abs", "mse", "low_var_kl", "full"] = Field(
        default="kl",
        description="Estimator of the KL, from log-probabilities of the sampled tokens: their difference (`kl`, k1), "
        "its absolute value, half its square (`mse`, k2), `low_var_kl` (k3), or the exact sum over the vocabulary "
        "(`full`, in the loss only).",
    )
    kl_coef: Float = Field(
        default=1e-3, ge=0, description="Weight of the KL term; the first one when `kl_type` is adaptive."
    )
    kl_type: Literal["fixed", "adaptive"] = Field(
        default="fixed",
        description="Whether the weight stays, or moves so that the KL comes near `algorithm.kl_target` "
        "(Ziegler et al. 2019, section 2.2).",
    )
    kl_horizon: Float = Field(default=10000.0, gt=0, description="Answers over which an adaptive weight moves.")
    kl_target: Float = Field(default=0.1, gt=0, description="KL that an adaptive weight aims at.")
    gamma: Float = Field(default=1.0, ge=0, le=1, description="Discount of later rewards, per token.")
    lam: Float = Field(default=1.0, ge=0, le=1, description="Lambda of generalised advantage estimation.")
    online_filtering: bool = Field(
        default=False,
        description="Keep only groups whose mean of `algorithm.filter_key` lies strictly between `filter_low` and "
        "`filter_high`, and go on generating until the batch is full (DAPO's dynamic sampling).",
    )
    filter_key: str = Field(
        default="overall", min_length=1, description="Number of the reward function that decides what is kept."
    )
    filter_low: Float = Field(default=0.01, description="A group's mean must be above this.")
    filter_high: Float = Field(default=0.99, description="A group's mean must be below this.")

    @property
    def uses_reference(self) -> bool:
        """Whether log-probabilities of a reference model are needed."""
        return not self.disable_kl

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL is added to the loss rather than taken from the reward."""
        return not self.disable_kl and self.use_kl_loss

    @property
    def exact_kl_in_loss(self) -> bool:
        """Whether the loss takes the KL over the whole vocabulary, for which the reference's logits are needed too."""
        return self.kl_in_loss and self.kl_penalty == "full"

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL is taken from the reward of each token rather than added to the loss."""
        return not self.disable_kl and not self.use_kl_loss

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """Lowest and highest importance ratio of `correction`, where null those of its paper."""
        low, high = CORRECTION_BOUNDS[self.correction]
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )

    @property
    def needs_ref_logprobs(self) -> bool:
        """Whether a pass of the reference model scores every answer; the exact KL looks at it during the update."""
        return self.uses_reference and self.kl_penalty != "full"

    @property
    def uses_critic(self) -> bool:
        """Whether there is a critic. (An estimator in a file of the user's may ask for one without this knowing.)"""
        return self.adv_estimator == "gae"
