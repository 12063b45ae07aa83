"""Sample answers that people read: validation prompts, what the model said, and how it was scored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from foveal.track.lines import number
from foveal.types import Media, Prompt, Response


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: list[int]) -> Any: ...


@dataclass
class Sample:
    """One answer, as text.

    Attributes:
        step: trainer step whose weights answered.
        prompt: what the model was given, one placeholder per picture.
        answer: the ground truth, as text.
        images: names of the prompt's pictures and videos.
        media: these themselves, for trackers that show pictures.
    """

    step: int
    uid: str
    prompt: str
    response: str
    answer: str
    rewards: dict[str, float]
    images: list[str]
    media: list[Media] = field(default_factory=list, repr=False)

    @classmethod
    def of(cls, prompt: Prompt, response: Response, step: int, tokenizer: Decoder) -> Sample:
        """The sample of one answer of a prompt."""
        return cls(
            step=step,
            uid=prompt.uid,
            prompt=str(tokenizer.decode(prompt.token_ids)),
            response=response.text,
            answer=str(prompt.answer),
            rewards=dict(response.rewards),
            images=[medium.name for medium in prompt.media],
            media=prompt.media,
        )

    @property
    def scores_text(self) -> str:
        """All rewards in one line, as `overall 0.900, accuracy 1.000`."""
        return ", ".join(f"{name} {number(value)}" for name, value in self.rewards.items()) or "not scored"

    def text(self) -> str:
        """The sample as `generations.log` shows it."""
        parts = [
            f"===== step {self.step} · {self.uid} · {self.scores_text} =====",
            f"[prompt]\n{self.prompt}",
            f"[images]\n{', '.join(self.images)}" if self.images else "",
            f"[response]\n{self.response}",
            f"[answer]\n{self.answer}",
        ]
        return "\n".join(part for part in parts if part) + "\n\n"
