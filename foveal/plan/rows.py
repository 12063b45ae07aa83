"""What a step works on: the lengths that are assumed, and the passes that they make."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from foveal.config import Config
from foveal.models.flops import Work
from foveal.models.grids import Grid


@dataclass(frozen=True)
class Lengths:
    """Tokens that are assumed.

    Attributes:
        prompt: of a prompt, the visual ones included.
        visual: those that stand for pictures.
        answer: of an answer, in passes whose memory is counted.
        mean_answer: of an answer, where time is.
        rows: of the training data; None where nobody says.
    """

    prompt: int
    visual: int
    answer: int
    mean_answer: int
    rows: int | None = None

    @classmethod
    def of(
        cls,
        config: Config,
        sees: bool,
        *,
        prompt: int | None = None,
        visual: int | None = None,
        answer: int | None = None,
        rows: int | None = None,
    ) -> Lengths:
        """The limits of the configuration where nothing else is said: prompts as long as they may be and, for a model
        that sees, of pictures but for a twentieth; answers for memory as long as they may be, and in the mean half."""
        limit = config.data.max_response_length
        length = min(prompt or config.data.max_prompt_length, config.data.max_prompt_length)
        seen = min(length if visual is None else visual, int(0.95 * length)) if sees else 0
        return cls(length, seen, limit, min(answer or math.ceil(limit / 2), limit), rows)

    def within(self, config: Config) -> Lengths:
        """The same for limits that may be lower."""
        limit = config.data.max_response_length
        return replace(self, answer=limit, mean_answer=min(self.mean_answer, limit))

    def grids(self) -> tuple[Grid, ...]:
        """One picture of so many tokens, two patches a side each."""
        if not self.visual:
            return ()
        height = max(1, math.isqrt(self.visual))
        return ((1, 2 * height, 2 * math.ceil(self.visual / height)),)


@dataclass(frozen=True)
class Packed:
    """Groups laid out in passes.

    Attributes:
        first: tokens of the first pass of an optimizer step.
        later: of the largest after it, 0 for none.
        passes: how many there are.
        scored: part of the tokens that are of answers.
        visual: part that stands for pictures.
        keys_per_token: keys that attention is given for each token.
    """

    first: int
    later: int
    passes: int
    scored: float
    visual: float
    keys_per_token: float


def pack(config: Config, lengths: Lengths, groups: int, budget: int) -> Packed:
    """Groups with answers of full length, laid out as `packing.split_into_packs` does."""
    prompt, answer, n = lengths.prompt, lengths.answer, config.worker.rollout.n
    shared = config.worker.actor.shared_prefix
    alone = prompt + answer
    group = prompt + n * answer if shared else n * alone
    if group <= budget:
        in_pass, per_pass = n, budget // group
        pieces = groups
    else:  # cut between answers, each piece with the prompt
        in_pass = max(1, min(n, (budget - prompt) // answer if shared else budget // alone))
        pieces, per_pass = groups * math.ceil(n / in_pass), 1
    # The last token of an answer predicts nothing.
    copies = 1 if shared else in_pass
    piece = copies * prompt + in_pass * (answer - 1)
    return Packed(
        first=min(pieces, per_pass) * piece,
        later=min(max(pieces - per_pass, 0), per_pass) * piece,
        passes=math.ceil(pieces / per_pass),
        scored=in_pass * answer / piece,
        visual=copies * lengths.visual / piece,
        keys_per_token=(prompt + in_pass * alone) / (prompt + in_pass * answer) if shared and in_pass > 1 else 1.0,
    )


def work_of(config: Config, lengths: Lengths, groups: float) -> Work:
    """What groups with answers of mean length feed to a model. Fractions of tokens are of no concern."""
    prompt, answer, n = lengths.prompt, lengths.mean_answer, config.worker.rollout.n
    of_prompt, of_answer = prompt * (prompt + 1) // 2, answer * (answer + 1) // 2 + answer * prompt
    copies = 1 if config.worker.actor.shared_prefix else n
    return Work(
        tokens=round(groups * (copies * prompt + n * answer)),
        pairs=round(groups * (copies * of_prompt + n * of_answer)),
        scored=round(groups * n * answer),
        grids=lengths.grids() * round(groups * copies),
    )
