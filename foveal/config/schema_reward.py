"""Section `worker.reward`: the functions that score answers, and the processes they run in."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from foveal.config.sections import Float, Mapping, NotNegative, Positive, Section


def _former_type(value: Any) -> Any:
    return "sequential" if value == "function" else value  # as EasyR1 called it at first


class RewardFunctionConfig(Section):
    """One of several reward functions: an entry of `worker.reward.functions`."""

    function: str = Field(min_length=1, description="`FILE:function` or `package.module:function`, or a class.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Its keyword arguments.")
    weight: Float = Field(default=1.0, description="Factor of its `overall` in the sum.")
    only_for: list[str] = Field(
        default_factory=list,
        description="Values of the column `worker.reward.route_by` whose rows it scores; empty: all rows.",
    )


class RewardConfig(Section):
    """The reward functions and the processes they run in."""

    reward_function: str | None = Field(
        default=None,
        description="`FILE:function` or `package.module:function`, or a class there; `main` when no name is given.",
    )
    reward_function_kwargs: Mapping = Field(
        default_factory=dict, description="Further keyword arguments of the reward function."
    )
    reward_type: Annotated[Literal["batch", "sequential"] | None, BeforeValidator(_former_type)] = Field(
        default=None,
        description="How a function is called that has no REWARD_TYPE: `sequential` once for each answer, `batch` with "
        "the list of all; null: `batch`.",
    )
    functions: dict[str, RewardFunctionConfig] = Field(
        default_factory=dict,
        description="Several reward functions by name, in place of `reward_function`: `overall` is the sum of theirs "
        "times `weight`.",
    )
    route_by: str | None = Field(
        default=None, description="Column that decides which of `functions` score a row, by their `only_for`."
    )
    overlong_buffer: NotNegative = Field(
        default=0,
        description="Tokens before `data.max_response_length` over which `overall` falls, whatever the reward function "
        "(DAPO's soft overlong punishment); 0 means none.",
    )
    overlong_penalty: Float = Field(
        default=1.0, ge=0, description="How far `overall` has fallen at `data.max_response_length`."
    )
    skip_special_tokens: bool = Field(
        default=True, description="Leave special tokens out of the response that is scored, and out of its prompt."
    )
    num_cpus: Positive = Field(default=1, description="Processes that a sequential reward function may be spread over.")
    concurrency: Positive = Field(
        default=32, description="Answers that a sequential `async def` function works on at a time, in each process."
    )
    time_limit: Annotated[Float, Field(gt=0)] | None = Field(
        default=None,
        description="Seconds that scoring may take per sample; null: the function's REWARD_TIME_LIMIT (the judge's is "
        "that of all its tries), else 30.",
    )
    batch_time_limit: Float = Field(
        default=600.0,
        gt=0,
        description="Seconds that one call of a batch function may take at most, however many its samples.",
    )
    memory_limit_gb: Annotated[Float, Field(gt=0)] | None = Field(
        default=32.0, description="Memory of a reward process, in GB, beyond which it is ended; null: no limit."
    )
    timeout_score: Float = Field(
        default=0.0, description="`overall` of a sample that ran out of time, or failed with `on_error: score`."
    )
    on_error: Literal["raise", "score"] = Field(
        default="raise",
        description="The reward function raised, broke its contract or lost its process: end the run, or give "
        "`timeout_score` and count it. A sample that ran out of time, or has no score as the function says (NoScore), "
        "does not end the run by itself.",
    )
    max_error_rate: Float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of the last 500 answers that may fail or run out of time before the run ends; 1: any.",
    )
