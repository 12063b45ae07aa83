"""What a reward function may return, and what crosses the pipe between the run and the reward process.

No torch, no numpy: reward processes import this. Scalars of those libraries are recognised by their `item()`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypeAlias

EXPECTED = "a number, or a dict of numbers that has `overall`"


@dataclass(frozen=True)
class FunctionSpec:
    """Which function or class to load.

    Attributes:
        path: absolute path of a file, or dotted name of a module.
        name: of the function or class in it.
        kwargs: keyword arguments to bind; those of the constructor for a class.
        concurrency: answers that an `async def` function of one dict works on at a time, in each process.
        kind: how it is called where it has no REWARD_TYPE; None when nobody says.
    """

    path: str
    name: str
    kwargs: dict[str, Any]
    concurrency: int = 1
    kind: Literal["batch", "sequential"] | None = None

    @property
    def label(self) -> str:
        return f"{self.path}:{self.name}"


@dataclass(frozen=True)
class FunctionInfo:
    """What the loaded function says of itself, or its module.

    Attributes:
        kind: REWARD_TYPE, else `worker.reward.reward_type`; "batch" when there is neither.
        split_groups: REWARD_SPLIT = "group": a batch function is called once for each group.
        declares_kind: whether there is either.
        is_async: written with `async def`.
        time_limit: REWARD_TIME_LIMIT, the seconds that an answer takes at most; None when there is none.
    """

    kind: Literal["batch", "sequential"]
    split_groups: bool
    declares_kind: bool
    is_async: bool = False
    time_limit: float | None = None

    @property
    def flows(self) -> bool:
        """Whether a process works on several answers at a time, each a call of its own."""
        return self.is_async and self.kind == "sequential"


@dataclass(frozen=True)
class Answer:
    """One answer on its way to a function that works on several at a time.

    Attributes:
        limit: seconds that it may take.
    """

    input: dict[str, Any]
    limit: float


class NoScore(Exception):
    """Raised by a reward function for an answer that it has no score for, through no fault of its own.

    The answer gets `worker.reward.timeout_score` and is counted. It does not end the run by itself.
    """


@dataclass(frozen=True)
class Failure:
    """Why an answer, or all answers of one call, got no score.

    Attributes:
        kind: "raised" by the function; "unscored" as the function says itself; "broken" contract; "timeout"; "died"
            process; beyond the "memory" limit.
        text: what happened, to follow the function's name in a sentence.
        traceback: of the user's code, for "raised".
        covers: how many answers this one failure took with it.
        cure: what to do about it, where the failure itself tells.
    """

    kind: Literal["raised", "unscored", "broken", "timeout", "died", "memory"]
    text: str
    traceback: str = ""
    covers: int = 1
    cure: str = ""


@dataclass(frozen=True)
class PictureRequest:
    """Asked by a reward process during a call: the encoded bytes of picture `picture` of input `sample`."""

    sample: int
    picture: int


Rewards: TypeAlias = dict[str, float]
Outcome: TypeAlias = Rewards | Failure


def to_number(value: Any) -> float | None:
    """`value` as a float when it is one number (Python, numpy, a one-element tensor), else None."""
    item = getattr(value, "item", None)
    if callable(item):
        try:
            value = item()
        except (TypeError, ValueError, RuntimeError):  # more than one element
            return None
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:  # an int beyond 1e308; not finite either way
        return math.inf


def to_outcome(result: Any) -> Outcome:
    """What the function returned for one answer as named floats; a Failure that says what is wrong with it."""
    if not isinstance(result, dict):
        number = to_number(result)
        if number is None:
            return Failure("broken", f"returned {_show(result)} where {EXPECTED} is expected")
        return {"overall": number}
    if "overall" not in result:
        return Failure("broken", f"returned a dict without `overall`, with the keys {list(result)}")
    rewards: Rewards = {}
    for key, value in result.items():
        number = to_number(value)
        if not isinstance(key, str) or number is None:
            return Failure("broken", f"returned {_show(value)} under the key {key!r} where a number is expected")
        rewards[str.__str__(key)] = number  # plain text: a class of the user's module cannot cross the pipe
    return rewards


def to_outcomes(result: Any, count: int) -> list[Outcome]:
    """What a batch function returned for `count` answers, one outcome each."""
    if callable(tolist := getattr(result, "tolist", None)):  # an array or a tensor
        result = tolist()
    if not isinstance(result, list | tuple):
        text = f"returned {_show(result)} where a list of {count} results, one for each answer, is expected"
        return [Failure("broken", text, covers=count)] * count
    if len(result) != count:
        text = f"returned a list of {len(result)} results where {count} are expected, one for each answer"
        return [Failure("broken", text, covers=count)] * count
    return [to_outcome(one) for one in result]


def _show(value: Any) -> str:
    if value is None:
        return "None"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
