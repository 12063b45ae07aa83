"""`foveal check --generate N`: what the model answers to a few prompts now, and what the reward function gives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from foveal.check.findings import Finding
from foveal.config import Config
from foveal.data.loader import open_loader
from foveal.preflight import check_runnable, open_processing
from foveal.reward.runner import RewardRunner
from foveal.rollout.collect import generate_and_score, training_sampling
from foveal.track import console
from foveal.types import Group, Response

CHARACTERS = 400
SUBJECT = "answers of the model"


def check_generated(config: Config, count: int, say: Callable[[str], None] = console.note) -> list[Finding]:
    """Lets the model answer the first `count` training prompts, `worker.rollout.n` times each, and scores the answers.

    Args:
        say: takes an answer of each prompt with its scores, and their mean.

    Raises:
        FovealError: anything a run would raise before its first step.
    """
    from foveal.cluster.group import start_workers

    check_runnable(config)
    processing = open_processing(config)
    loader = open_loader(config, processing, "train")
    prompts = loader.take(min(count, len(loader)))
    with RewardRunner(config.worker.reward, "train", processing.tokenizer) as rewards, ExitStack() as held:
        workers = start_workers(config, processing, train=False, images=loader.most_images)
        held.callback(workers.close)
        with console.phase("answers", len(prompts)) as advance:
            groups, _ = generate_and_score(prompts, training_sampling(config), workers, rewards, {}, advance)
    for group in groups:
        say(_told(group))
    answers = [response for group in groups for response in group.responses if response.rewards]
    if answers:
        mean = sum(response.rewards["overall"] for response in answers) / len(answers)
        say(f"{len(answers)} answers of the model: mean reward {mean:.3f}")
    return _judge(config, groups, answers)


def _judge(config: Config, groups: Sequence[Group], answers: Sequence[Response]) -> list[Finding]:
    findings = []
    scores = {response.rewards["overall"] for response in answers}
    if len(answers) > 1 and len(scores) == 1:
        findings.append(
            Finding(
                "warning",
                SUBJECT,
                f"all {len(answers)} answers get {scores.pop():g}: while that is so, nothing is learned",
                "Read the answers above: an easier task, a format prompt that shows the form, or part of the reward "
                "for a part of the way would make them differ",
            )
        )
    cut = [response for group in groups for response in group.responses if response.finish_reason == "length"]
    total = sum(len(group.responses) for group in groups)
    if len(cut) > total / 2:
        findings.append(
            Finding(
                "warning",
                SUBJECT,
                f"{len(cut)} of {total} answers are cut at data.max_response_length={config.data.max_response_length}",
                "Raise data.max_response_length, or ask for shorter answers in the format prompt",
            )
        )
    return findings


def _told(group: Group) -> str:
    """The first answer, the truth, and the scores of all answers."""
    text = group.responses[0].text
    text = text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]}…"
    lines = "\n".join(f"  | {line}" for line in text.splitlines() or [""])
    scores = ", ".join(f"{response.rewards.get('overall', float('nan')):g}" for response in group.responses)
    return f"\nrow {group.prompt.row_index}, answered:\n{lines}\n  truth: {group.prompt.answer}\n  rewards: {scores}"
