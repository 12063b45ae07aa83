"""`foveal check --generate N`: a few real answers, sampled and scored as the run would."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from foveal.check.findings import REWARD, Finding
from foveal.cluster.group import start_workers
from foveal.config import Config
from foveal.data.loader import open_loader
from foveal.preflight import check_runnable, open_processing
from foveal.reward.explain import clipped
from foveal.reward.runner import RewardRunner
from foveal.rollout.collect import generate_and_score, training_sampling
from foveal.types import Group

SHOWN = 3
LONGEST = 600
SUBJECT = "sampled answers"


def check_generated(config: Config, prompts: int, say: Callable[[str], None]) -> list[Finding]:
    """Samples `worker.rollout.n` answers to each of the first training prompts, in the order of the first epoch.

    Args:
        prompts: how many, at most.
        say: takes the scores, and a few answers in full.

    Raises:
        FovealError: anything the user can cure, a reward function that fails among it.
    """
    check_runnable(config)
    processing = open_processing(config)
    loader = open_loader(config, processing, "train")
    with ExitStack() as held:
        rewards = held.enter_context(RewardRunner(config.worker.reward, "train", processing.tokenizer))
        workers = start_workers(config, processing, train=False, images=loader.most_images)
        held.callback(workers.close)
        taken = loader.take(min(prompts, len(loader)))
        groups, _ = generate_and_score(taken, training_sampling(config), workers, rewards, {}, lambda n: None)
    _show(groups, say)
    return judge_answers(groups, config.data.max_response_length)


def _show(groups: list[Group], say: Callable[[str], None]) -> None:
    for group in groups[:SHOWN]:
        scores = ", ".join(f"{r.rewards['overall']:g}" for r in group.responses if "overall" in r.rewards)
        shown = clipped(group.responses[0].text, LONGEST)
        # other characters may steer the terminal
        shown = "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in shown)
        say(
            f"row {group.prompt.row_index}: scores {scores or 'none'}; ground truth {group.prompt.answer!r}; "
            f"the first answer:\n{shown}"
        )


def judge_answers(groups: list[Group], limit: int) -> list[Finding]:
    """What the scores of sampled answers say of the first steps of a run.

    Args:
        limit: `data.max_response_length`.
    """
    answers = [response for group in groups for response in group.trained]
    scores = [one.rewards["overall"] for one in answers if "overall" in one.rewards]
    if not scores:
        text = "no score is a finite number"
        return [Finding("error", REWARD, text, "See what it returns for the answers above")]
    findings = []
    cut = sum(one.finish_reason == "length" for one in answers)
    if cut > 0.5 * len(answers):
        text = f"{cut} of {len(answers)} answers were cut off at {limit} tokens"
        findings.append(Finding("warning", "data.max_response_length", text, "Raise it, or ask for shorter answers"))
    flat = sum(len({r.rewards.get("overall") for r in group.trained}) == 1 for group in groups)
    if max(scores) - min(scores) < 1e-6:
        text = f"all {len(scores)} answers score {scores[0]:g}: nothing would be learned from them"
        cure = (
            "See whether the answers above have the asked form; if so, the task is too easy or too hard for the model"
        )
        findings.append(Finding("warning", SUBJECT, text, cure))
    elif flat > 0.8 * len(groups) and len(answers) > len(groups):
        text = f"in {flat} of {len(groups)} groups all answers have the same score: such groups teach nothing"
        cure = "Raise worker.rollout.n or worker.rollout.temperature, or take harder or easier rows"
        findings.append(Finding("note", SUBJECT, text, cure))
    mean = sum(scores) / len(scores)
    text = f"{len(scores)} answers to {len(groups)} prompts: mean score {mean:.3f}, {min(scores):g} to {max(scores):g}"
    return [*findings, Finding("note", SUBJECT, text, "Nothing to do")]
