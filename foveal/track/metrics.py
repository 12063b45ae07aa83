"""The numbers of a step and of a validation, under EasyR1's names; plain numpy over groups.

Only finite numbers are counted and returned: a metric with nothing to count is left out. Answers that are not trained
on (`left_out`, `baseline`) count nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from foveal.types import Group, Metrics, Response, trained_responses

_GIB = 1024**3
# as in EasyR1: the parts of a step that work on answers alone, and those that work on whole sequences
_PER_RESPONSE_TOKEN = ("gen", "reward")
_PER_TOKEN = ("ref", "old", "values", "adv", "update_critic", "update_actor")


def rollout_metrics(groups: list[Group], max_prompt_length: int) -> Metrics:
    """What was sampled and how it was scored.

    Args:
        groups: scored, and credited as far as their columns go.
        max_prompt_length: tokens; prompts of this length count as clipped.

    Returns:
        `reward/KEY` (mean over the answers that have the key), `critic/{score,rewards,advantages,returns,values}/{mean,
        max,min}` (score: `overall` per answer; rewards: sum of `token_rewards` per answer; the others per token of
        `mask`, as far as the columns are there), `critic/vf_explained_var` with a critic, and
        `{response,prompt}_length/{mean,max,min,clip_ratio}` in tokens.
    """
    responses = _trained(groups)
    metrics = {f"reward/{name}": value for name, value in mean_rewards(r.rewards for r in responses).items()}
    metrics |= _statistics("critic/score", (r.rewards.get("overall", np.nan) for r in responses))
    token_rewards = [r.columns["token_rewards"].sum() for r in responses if "token_rewards" in r.columns]
    metrics |= _statistics("critic/rewards", token_rewards)
    for name in ("advantages", "returns", "values"):
        metrics |= _statistics(f"critic/{name}", _tokens(responses, name))
    metrics |= _explained_variance(_tokens(responses, "returns"), _tokens(responses, "values"))
    metrics |= _response_lengths("response_length", responses)
    lengths = np.array([len(group.prompt.expanded_ids) for group in groups for _ in group.trained])
    metrics |= _statistics("prompt_length", lengths)
    if lengths.size:
        metrics["prompt_length/clip_ratio"] = float(np.mean(lengths >= max_prompt_length))
    return metrics


def staleness(groups: list[Group], version: int, first: int = 0) -> Metrics:
    """`rollout/staleness`: how many updates older than `version` the weights are that wrote the answers, in the mean.

    Args:
        version: of the weights that the update begins with.
        first: version up to which no update was made, as while the critic warms up.
    """
    ages = [max(version, first) - max(written, first) for r in _trained(groups) for _, written in r.weight_spans]
    return {"rollout/staleness": float(np.mean(ages))} if ages else {}


def validation_metrics(groups: list[Group]) -> Metrics:
    """How the model does on the validation set.

    Returns:
        `val/reward_score` (mean of `overall`), `val/KEY_reward` (mean over the answers that have the key), and
        `val_response_length/{mean,max,min,clip_ratio}` in tokens.
    """
    responses = _trained(groups)
    means = mean_rewards(r.rewards for r in responses)
    metrics = {"val/reward_score": means["overall"]} if "overall" in means else {}
    metrics |= {f"val/{name}_reward": value for name, value in means.items()}
    return metrics | _response_lengths("val_response_length", responses)


def mean_rewards(rewards: Iterable[dict[str, float]]) -> Metrics:
    """Mean of every reward over the answers that have it as a finite number.

    Args:
        rewards: of each answer, by name.
    """
    values: dict[str, list[float]] = {}
    for one in rewards:
        for name, value in one.items():
            if np.isfinite(value):
                values.setdefault(name, []).append(value)
    return {name: float(np.mean(found)) for name, found in values.items()}


def timing_metrics(timings: dict[str, float], response_tokens: int = 0, total_tokens: int = 0) -> Metrics:
    """Where the time went.

    Args:
        timings: seconds by part of the step, as `timer` adds them up.
        response_tokens: tokens of all answers of the step; 0 leaves the figures per token out.
        total_tokens: tokens of all prompts and answers, a prompt counted once per answer.

    Returns:
        `timing_s/NAME` in seconds, and `timing_per_token_ms/NAME` in milliseconds: per answer token for `gen` and
        `reward`, per token of whole sequences for the passes of the models.
    """
    tokens = dict.fromkeys(_PER_RESPONSE_TOKEN, response_tokens) | dict.fromkeys(_PER_TOKEN, total_tokens)
    metrics = {f"timing_s/{name}": seconds for name, seconds in timings.items()}
    for name, seconds in timings.items():
        if tokens.get(name):
            metrics[f"timing_per_token_ms/{name}"] = seconds * 1000 / tokens[name]
    return metrics


def perf_metrics(total_tokens: int, step_seconds: float, n_devices: int) -> Metrics:
    """How fast the step was.

    Args:
        total_tokens: tokens of all prompts and answers of the step, a prompt counted once per answer.

    Returns:
        `perf/{total_num_tokens,time_per_step,throughput}` (throughput in tokens per second and device), and
        `host_memory`. What the devices did is `foveal.train.meter`'s.
    """
    metrics: Metrics = {"perf/total_num_tokens": total_tokens, "perf/time_per_step": step_seconds}
    if step_seconds > 0 and n_devices > 0:
        metrics["perf/throughput"] = total_tokens / (step_seconds * n_devices)
    return metrics | host_memory()


def host_memory() -> Metrics:
    """`perf/cpu_memory_used_gb`: memory of the machine in GiB that is in use, where /proc tells."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return {}
    kib = {name: int(rest.split()[0]) for name, _, rest in map(_split_at_colon, meminfo.read_text().splitlines())}
    return {"perf/cpu_memory_used_gb": (kib["MemTotal"] - kib["MemAvailable"]) * 1024 / _GIB}


def _split_at_colon(line: str) -> tuple[str, str, str]:
    return line.partition(":")


def _trained(groups: list[Group]) -> list[Response]:
    return [response for _, response in trained_responses(groups)]


def _statistics(name: str, values: Iterable[float] | np.ndarray) -> Metrics:
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.float64)
    array = array[np.isfinite(array)]
    if not array.size:
        return {}
    return {f"{name}/mean": float(array.mean()), f"{name}/max": float(array.max()), f"{name}/min": float(array.min())}


def _tokens(responses: list[Response], column: str) -> np.ndarray:
    """(N,) values of a column at the tokens that the model wrote, of all answers that have the column."""
    found = [_written(response, response.columns[column]) for response in responses if column in response.columns]
    return np.concatenate(found) if found else np.zeros(0)


def _written(response: Response, values: np.ndarray) -> np.ndarray:
    mask = response.columns.get("mask")
    return values if mask is None else values[mask.astype(bool)]


def _explained_variance(returns: np.ndarray, values: np.ndarray) -> Metrics:
    if returns.size < 2 or returns.size != values.size:
        return {}
    return {"critic/vf_explained_var": float(1 - np.var(returns - values) / (np.var(returns) + 1e-5))}


def _response_lengths(name: str, responses: list[Response]) -> Metrics:
    if not responses:
        return {}
    metrics = _statistics(name, np.array([len(response.token_ids) for response in responses]))
    return metrics | {f"{name}/clip_ratio": float(np.mean([r.finish_reason == "length" for r in responses]))}
