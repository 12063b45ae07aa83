"""`foveal check`, the reward half: does it tell right answers from wrong ones in the form that the prompt asks for?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from foveal.check.asked import CHAT_MARK
from foveal.check.findings import REWARD, Finding, Level, in_order, in_two
from foveal.check.judging import Scored, judge
from foveal.check.rows import spread, text_of
from foveal.check.scoring import Scorer
from foveal.check.tries import Case, Try, add_wrong_answers, all_tries, few_tries, make_case, plain_tries
from foveal.check.truths import given_away, odd_truths, outside_pictures
from foveal.config import Config
from foveal.data.images import picture_size
from foveal.data.processing import Processing
from foveal.data.prompts import Draft, PromptBuilder
from foveal.data.source import open_rows
from foveal.data.video import Stills
from foveal.errors import DataError, FovealError, RewardError
from foveal.preflight import open_processing
from foveal.reward.contract import Failure
from foveal.reward.failures import UNDECLARED, may_take_one
from foveal.track import console
from foveal.types import Media, Prompt

FULLY = 32
"""Rows on which everything is tried; the others get a right answer and a wrong one."""
BUDGET = 20.0
"""Seconds that each of the two rounds may take, as far as the first answers tell how long one takes."""
SLOW = 0.05
"""Seconds per answer from which scoring is slow."""
MIN_REASONING = 100
"""Tokens below which no reasoning fits."""


def check_reward(
    config: Config,
    rows: int = 1000,
    say: Callable[[str], None] = console.note,
    *,
    processing: Processing | None = None,
) -> list[Finding]:
    """Scores made-up answers to rows of `data.train_files`; needs the model's processor, but no weights and no GPU.

    Args:
        rows: most rows to take, evenly spread.
        say: takes the account: what the prompt asks for, and what right and wrong answers to it get.
        processing: the model's, where it is open already.

    Raises:
        ModelError: the model has no processor, or its family is not known.
    """
    processing = processing or open_processing(config)
    tokenizer = processing.tokenizer

    def count(text: str) -> int:
        text = text.encode(errors="replace").decode()  # a truth may hold half of a character, which no model writes
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    try:
        cases = open_cases(config, processing, rows)
        special = tokenizer.all_special_tokens if config.worker.reward.skip_special_tokens else []
        findings = [*_of_lengths(config, cases, count), *_of_kwargs(config), *_special_marks(special, cases)]
        return in_order([*findings, *_try_out(config, cases, special, count, say)])
    except DataError as error:
        return [Finding("error", "data.train_files", *in_two(error))]
    except RewardError as error:
        return [Finding("error", REWARD, f"cannot be used: {error}", "Correct worker.reward or the function's file")]


def open_cases(config: Config, processing: Processing, rows: int) -> list[Case]:
    """Up to `rows` rows, evenly spread, with what is right and wrong there; rows that have no prompt are left out.

    Raises:
        DataError: there are no such rows; or a prompt cannot be made of any.
    """
    assert config.data.train_files is not None
    builder = PromptBuilder(config.data, processing, open_rows(config.data, config.data.train_files))
    cases, failure = [], None
    for index in spread(range(len(builder.rows)), rows):
        try:
            cases.append(_case(builder, builder.draft(index), config))
        except FovealError as error:
            failure = failure or error
    if not cases and failure is not None:
        raise DataError(str(failure))
    add_wrong_answers(cases)
    return cases


def _case(builder: PromptBuilder, draft: Draft, config: Config) -> Case:
    given = builder.rows[draft.row_index][config.data.prompt_key]
    question = text_of(given if isinstance(given, str) else given[-1])
    media, sizes = [], []
    for one in draft.media:
        if one.kind == "image" and not isinstance(one.place, Stills):  # rewards get no videos
            try:
                picture, size = one.read(), picture_size(one.place, one.name)
            except FovealError:  # the data half of the check tells of it
                media.append(Media(one.kind, b"", one.name))
            else:
                media.append(picture)
                sizes.append(size)
    prompt = Prompt(
        uid=f"check-0-{draft.row_index}",
        token_ids=[],
        expanded_ids=[],
        media=media,
        row=draft.row,
        row_index=draft.row_index,
        answer=draft.row[config.data.answer_key],
    )
    return make_case(prompt, draft.text, question, sizes)


def _try_out(
    config: Config, cases: list[Case], special: Sequence[str], count: Callable[[str], int], say: Callable[[str], None]
) -> list[Finding]:
    limit = config.data.max_response_length
    findings = [*odd_truths(cases, config.data.answer_key), *given_away(cases), *outside_pictures(cases)]

    def seen(tries: Iterator[Try]) -> list[Try]:
        """As the reward function sees them, special tokens taken out."""
        made = list(tries)
        for token in special:
            for one in made:
                one.text = one.text.replace(token, "")
        return made

    for case in cases:
        case.text = CHAT_MARK.sub("", case.text)
    with Scorer(config.worker.reward, cases, count) as scorer:
        if scorer.undeclared:
            text = "its module has no REWARD_TYPE, so it is called once with a list of all answers"
            findings.append(Finding("note", REWARD, text, 'Say REWARD_TYPE = "batch" or "sequential" in the module'))
        first = seen(chain.from_iterable(few_tries(place, case, "") for place, case in enumerate(cases[:2])))
        scorer.warm_up(first)
        rows = max(4, math.ceil(scorer.places / 2))  # two answers or more to each
        again = seen(chain.from_iterable(few_tries(place, case, "") for place, case in enumerate(cases[:rows])))
        again = again[: scorer.places or None]
        scorer.score(again)
        pace = max(scorer.pace, 1e-5)
        per_row = len(list(all_tries(0, cases[0], limit)))
        full = min(FULLY, len(cases), int(BUDGET / (pace * per_row)))
        what = all_tries if full >= min(4, len(cases)) else plain_tries
        full = max(full, min(4, len(cases)))
        tries = seen(chain.from_iterable(what(place, cases[place], limit) for place in range(full)))
        timed = [one for one in tries if one.kind != "long without end"]
        scorer.score(timed)
        scorer.score([one for one in tries if one.kind == "long without end"][:8])
        # a function that is too slow for them has at least been given the first ones
        done = [[one for one in made if one.outcome is not None] for made in (tries, again, first)]
        tries = next(made for made in done if made)
        best = Scored(cases, tries).best
        rest = range(full, min(len(cases), full + int(BUDGET / (pace * 2))))
        more = seen(chain.from_iterable(few_tries(place, cases[place], best) for place in rest))
        if more:
            scorer.score(more)
        tries += [one for one in more if one.outcome is not None]
        findings += _failures(tries, cases, config, scorer)
        findings += _slow(scorer, [*again, *timed], config)
        scored = Scored(cases, tries)
        finite = _finite(scored)
        findings += _depends_on_others(scorer, finite)
    _account(scored, say)
    return [*findings, *_keys(scored, config), *_not_finite(scored), *judge(finite)]


def _depends_on_others(scorer: Scorer, scored: Scored) -> list[Finding]:
    """Whether a row that cannot be reached among others can when it is alone."""
    lost = scored.lost
    if not scorer.is_batch or not lost or len(lost) == len(scored.by_case):
        return []
    alone = [replace(one, outcome=None) for one in scored.by_case[lost[0]]]
    scorer.score(alone)
    if _finite(Scored(scored.cases, alone)).lost:
        return []
    text = "scores an answer otherwise when answers to other rows are in the same call: it looks at another row's truth"
    return [Finding("error", REWARD, text, "Take the ground truth of each answer from its own entry of the list")]


def _account(scored: Scored, say: Callable[[str], None]) -> None:
    asked = scored.cases[0].asked
    rows = len(scored.by_case)
    say(f"reward: the prompt asks for {asked.describe()}; {len(scored.tries)} answers to {rows} rows scored")
    for kind in ("right", "wrong", "empty", "cut off"):
        values = [one.score for one in scored.tries if one.kind == kind and one.score is not None]
        values = [value for value in values if math.isfinite(value)]
        if values:
            say(f"  {kind} answers: {min(values):g} to {max(values):g}, mean {sum(values) / len(values):.3f}")


def _keys(scored: Scored, config: Config) -> list[Finding]:
    """Numbers that the configuration names and the function doesn't return, or on another scale."""
    algorithm = config.algorithm
    returned = [one.outcome for one in scored.tries if isinstance(one.outcome, dict)]
    names = {"algorithm.filter_key": [algorithm.filter_key] if algorithm.online_filtering else []}
    names["algorithm.reward_parts"] = list(algorithm.reward_parts)
    findings = []
    for key, wanted in names.items():
        for name in wanted:
            if returned and not any(name in one for one in returned):
                text = f"names {name!r}, which the reward function does not return; it returns {', '.join(returned[0])}"
                findings.append(Finding("error", key, text, "Name one of these, or return it"))
    values = [one[algorithm.filter_key] for one in returned if algorithm.filter_key in one]
    if algorithm.online_filtering and values and max(values) > 2 * algorithm.filter_high > 0:
        high = max(values)
        text = (
            f"is {algorithm.filter_high:g}, and {algorithm.filter_key!r} goes up to {high:g}: good groups are dropped"
        )
        findings.append(Finding("warning", "algorithm.filter_high", text, "Set it just below the highest score"))
    return findings


def _finite(scored: Scored) -> Scored:
    return Scored(scored.cases, [one for one in scored.tries if one.score is None or math.isfinite(one.score)])


def _not_finite(scored: Scored) -> list[Finding]:
    odd = [one for one in scored.tries if one.score is not None and not math.isfinite(one.score)]
    if not odd:
        return []
    kinds = ", ".join(dict.fromkeys(one.kind for one in odd))
    count = f"{len(odd)} of {len(scored.tries)} answers ({kinds})"
    text = f"gives {odd[0].score} as `overall` for {count}, as {odd[0].text[-80:]!r}"
    return [Finding("warning", REWARD, text, "Return a number for every answer; a run leaves out such answers")]


def _failures(tries: Sequence[Try], cases: Sequence[Case], config: Config, scorer: Scorer) -> list[Finding]:
    """One finding for each way in which the function failed."""
    found: dict[tuple[str, str], list[Try]] = {}
    for one in tries:
        if isinstance(one.outcome, Failure):
            found.setdefault((one.outcome.kind, one.outcome.text), []).append(one)
    findings = []
    for (kind, text), failed in found.items():
        outcome = failed[0].outcome
        assert isinstance(outcome, Failure)
        last = outcome.traceback.strip().splitlines()[-1:] if outcome.traceback else []
        everywhere = len(failed) == len(tries)
        kinds = "all that were tried" if everywhere else ", ".join(dict.fromkeys(one.kind for one in failed))
        on_right = any(one.kind == "right" for one in failed)
        grave = (config.worker.reward.on_error == "raise" and kind != "unscored") or len(failed) > 0.1 * len(tries)
        grave &= not (kind == "timeout" and scorer.waits_less)
        level: Level = "error" if grave else "warning"
        message = f"{text} on {len(failed)} of {len(tries)} answers ({kinds}), as {failed[0].text[-80:]!r}"
        if last and last[0].strip() not in message:
            message += f": {last[0].strip()}"
        if kind == "timeout":
            message += " (a run may wait longer than this check)"
        cure = outcome.cure or _cure_of_failure(kind, on_right, scorer.places > 0)
        if everywhere and scorer.undeclared and may_take_one(outcome):
            cure = UNDECLARED
        rows = () if everywhere else tuple(sorted({cases[one.case].prompt.row_index for one in failed}))
        findings.append(Finding(level, REWARD, message, cure, rows if len(rows) < len(cases) else ()))
    return findings[:5]


def _cure_of_failure(kind: str, on_right: bool, asks_server: bool) -> str:
    if kind == "unscored":
        return "See why, in the message; a run stops where more than worker.reward.max_error_rate have no score"
    if kind == "timeout" and asks_server:
        return "See whether the server answers and how many requests it takes at a time (worker.reward.concurrency)"
    if kind == "timeout":
        return "Bound what it does for one answer: symbolic mathematics and nested patterns can go on for ever"
    if on_right:
        return "It fails on right answers too: see which keys it reads (docs/rewards.md), or try it by hand on one row"
    return "Let it return a number for any text, also an empty or broken one"


def _slow(scorer: Scorer, timed: Sequence[Try], config: Config) -> list[Finding]:
    if any(isinstance(one.outcome, Failure) and one.outcome.kind == "timeout" for one in timed):
        return []
    each = scorer.pace
    if each < SLOW:
        return []
    step = config.data.rollout_batch_size * config.worker.rollout.n
    when = "while nothing else goes on" if scorer.is_batch else "partly while answers are still sampled"
    total = f"{each * step:,.0f} s for the {step} answers of a step"
    at_a_time = f" at {scorer.places} at a time" if scorer.places else ""
    text = f"is slow: {each * 1000:,.0f} s per 1,000 answers{at_a_time}, {total}, {when}"
    cure = (
        "Raise worker.reward.concurrency as far as the server takes it, or take a quicker one"
        if scorer.places
        else 'Make it quicker, or REWARD_TYPE = "sequential" with more worker.reward.num_cpus; a function that waits '
        "for a server can be `async def` (worker.reward.concurrency)"
    )
    return [Finding("warning", REWARD, text, cure)]


def _of_lengths(config: Config, cases: Sequence[Case], count: Callable[[str], int]) -> list[Finding]:
    """Whether the asked form fits into the limit of the answer."""
    limit = config.data.max_response_length
    most = 0
    for case in cases[:FULLY]:
        for form in case.forms[:1]:
            for content in case.contents[:1]:
                text = form.write(content)
                most = max(most, min(count(text), len(text) // 3))
    reasons = any(case.asked.reasons for case in cases)
    if most <= limit and not (reasons and limit < MIN_REASONING):
        return []
    asked = cases[0].asked.describe()
    text = f"{limit} tokens cannot hold what the prompt asks for ({asked}): a short answer takes {most}"
    level: Level = "error" if most > limit else "warning"
    return [Finding(level, "data.max_response_length", text, "Raise it, or ask for less in the prompt")]


def _of_kwargs(config: Config) -> list[Finding]:
    """Arguments of the reward that repeat a key of the configuration with another value."""
    reward = config.worker.reward
    given = [reward.reward_function_kwargs, *(one.kwargs for one in reward.functions.values())]
    findings = []
    for kwargs in given:
        for name in ("max_response_length", "max_prompt_length"):
            own = getattr(config.data, name)
            if name in kwargs and kwargs[name] != own:
                text = f"{name}={kwargs[name]!r} is given to the reward function, and data.{name} is {own}"
                cure = "Give both the same value: penalties for length begin at another place otherwise"
                findings.append(Finding("warning", "worker.reward.reward_function_kwargs", text, cure))
    return findings


def _special_marks(special: Sequence[str], cases: Sequence[Case]) -> list[Finding]:
    marks = {mark for case in cases for tag in case.asked.tags for mark in (tag.opening, tag.closing)}
    gone = sorted(marks & set(special))
    if not gone:
        return []
    text = f"{', '.join(gone)} are special tokens of the tokenizer, and the reward function gets answers without them"
    return [Finding("error", "worker.reward.skip_special_tokens", text, "Set worker.reward.skip_special_tokens=false")]
