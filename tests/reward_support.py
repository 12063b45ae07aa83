"""Groups and runners for the tests of rewards."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any, Literal

import numpy as np

from foveal.config.schema_reward import RewardConfig
from foveal.reward.runner import RewardRunner
from foveal.types import Group, Metrics, Prompt, Response


def write(path: Path, source: str) -> Path:
    path.write_text(textwrap.dedent(source))
    return path


def make_group(answer: Any, *texts: str) -> Group:
    """A group whose responses have the given texts, one token a character and an end token."""
    prompt = Prompt(uid="train-0-0", token_ids=[], expanded_ids=[], media=[], row={}, row_index=0, answer=answer)
    responses = []
    for text in texts:
        length = len(text) + 1
        responses.append(Response(np.zeros(length, np.int64), np.zeros(length, np.float32), "stop", text=text))
    return Group(prompt, responses)


def make_runner(
    folder: Path, source: str, *, name: str = "compute_score", role: Literal["train", "val"] = "train", **keys: Any
) -> RewardRunner:
    """A runner of the function in `source`, not yet started."""
    path = write(folder / "user_reward.py", source)
    return RewardRunner(RewardConfig(reward_function=f"{path}:{name}", **keys), role)


def overall(group: Group) -> list[float]:
    return [response.rewards["overall"] for response in group.responses]


def score(runner: RewardRunner, *groups: Group) -> Metrics:
    """Starts the runner, scores one round, and closes it."""
    with runner:
        for group in groups:
            runner.submit(group)
        return runner.finish(groups)
