"""A model behind an OpenAI-compatible address as the judge of answers: it sees question, picture, truth and answer.

worker:
  reward:
    reward_function: foveal.rewards.judge:Judge
    reward_function_kwargs: {url: http://localhost:8000/v1, model: Qwen/Qwen2.5-VL-7B-Instruct, question: problem}
    concurrency: 32     # requests at a time

A reply that ends with `Score: 7` gives 0.7 where `scale` is 10. An answer whose reply has no score gets
`worker.reward.timeout_score`; the first is shown, and the run goes on up to `max_error_rate`. An answer may take as
long as all its tries and the pauses between them, 400 s, unless `worker.reward.time_limit` is set.

Beside `overall` each answer has `judge_tokens` and `judge_cost`, 0 where the reply came from the cache, and
`judge_cached`; times the number of answers they are a step's totals. Nothing is sent anywhere but to `url`, by way of
the proxy that the environment names, if any (`NO_PROXY`).
"""

from __future__ import annotations

import base64
import io
import os
import re
from pathlib import Path
from typing import Any

import jinja2

from foveal.errors import RewardError
from foveal.reward.contract import NoScore
from foveal.reward.pictures import RewardPicture
from foveal.rewards.judge_cache import ReplyCache
from foveal.rewards.judge_client import ChatClient, Reply

TEMPLATE = """\
Judge an answer to a question. Grade only whether it is right; its length and its tone do not count.

Question:
{{ question }}

Correct answer:
{{ ground_truth }}

Answer to judge:
{{ response }}

Say in a sentence or two what is right or wrong with it. Then end with a line of its own, from 0 (wrong) to \
{{ scale }} (entirely right):
Score: NUMBER"""
NUMBER = r"score\s*[:=]?\s*\**\s*(-?\d+(?:\.\d+)?)"
MARK = re.compile("<image>|<video>")
MAGIC = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}


class Judge:
    """Scores one answer after the other, many at a time.

    Args:
        url: of the server, up to and including `/v1`.
        model: its name there.
        api_key_env: name of the environment variable that holds the key; none is sent without it.
        template: Jinja file of the judge's prompt in place of `TEMPLATE`. Its variables are `question`, `response`,
            `ground_truth`, `scale`, and what else a reward function gets.
        question: column that holds the question (its `<image>` marks are left out); without it the whole prompt as the
            model saw it.
        images: whether the judge gets the prompt's pictures.
        scale: the score that stands for 1.
        pattern: regular expression whose last match in the reply holds the score as its first group.
        requests_per_minute: of this process; no limit without it. The wait for a turn counts towards the time of an
            answer, which has a minute more for each try then.
        timeout: seconds of one try. retries: further tries after a time-out, a lost connection, 429 or 5xx.
        cache: SQLite file that keeps replies, so that what was judged before is not paid for again; none without it.
        input_price, output_price: of a million tokens, for `judge_cost`.
        extra: further fields of the request, such as `{seed: 1}`.

    Raises:
        RewardError: the environment variable is not set, or the template cannot be read.
    """

    REWARD_TYPE = "sequential"

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        template: str | None = None,
        question: str | None = None,
        images: bool = True,
        scale: float = 10,
        pattern: str = NUMBER,
        max_tokens: int = 512,
        temperature: float = 0.0,
        requests_per_minute: float | None = None,
        timeout: float = 60.0,
        retries: int = 5,
        cache: str | None = None,
        input_price: float = 0.0,
        output_price: float = 0.0,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self._request = {"model": model, "max_tokens": max_tokens, "temperature": temperature, **(extra or {})}
        self._question, self._images, self._scale = question, images, scale
        self._pattern = re.compile(pattern, re.IGNORECASE)
        self._prices = (input_price / 1e6, output_price / 1e6)
        self._template = _read_template(template)
        self._cache = ReplyCache(cache) if cache else None
        self._client = ChatClient(url, _key(api_key_env), timeout, retries, requests_per_minute)
        self.REWARD_TIME_LIMIT = self._client.longest

    async def __call__(self, one: dict[str, Any]) -> dict[str, float]:
        """The score of one answer.

        Raises:
            JudgeError: the server refused, or could not be reached in all tries.
            NoScore: the reply has no score between 0 and `scale`.
        """
        request = {**self._request, "messages": [{"role": "user", "content": self._content(one)}]}
        address = self._client.address
        cached = self._cache.get(address, request) if self._cache else None
        reply = cached or await self._client.ask(request)
        overall = self._score(reply.text)
        if self._cache and not cached:
            self._cache.put(address, request, reply)
        paid = Reply("", 0, 0) if cached else reply
        return {
            "overall": overall,
            "judge_tokens": paid.input_tokens + paid.output_tokens,
            "judge_cost": paid.input_tokens * self._prices[0] + paid.output_tokens * self._prices[1],
            "judge_cached": float(cached is not None),
        }

    def _content(self, one: dict[str, Any]) -> list[dict[str, Any]]:
        question = MARK.sub("", str(one["row"][self._question] if self._question else one["prompt"])).strip()
        text = self._template.render({**one, "question": question, "scale": f"{self._scale:g}"})
        pictures = one["images"] if self._images else []
        return [*map(_picture_part, pictures), {"type": "text", "text": text}]

    def _score(self, text: str) -> float:
        found = self._pattern.findall(text)
        score = float(found[-1]) if found else None
        if score is None or not 0 <= score <= self._scale:
            raise NoScore(
                f"the judge's reply has no score from 0 to {self._scale:g}: {text[-300:]!r}. If it is cut off, raise "
                "max_tokens; if it is not, see its template and its pattern"
            )
        return score / self._scale


def _read_template(path: str | None) -> jinja2.Template:
    try:
        source = Path(path).expanduser().read_text() if path else TEMPLATE
        return jinja2.Template(source, undefined=jinja2.StrictUndefined)
    except (OSError, UnicodeDecodeError, jinja2.TemplateSyntaxError) as error:
        raise RewardError(f"the judge's template {path}: {error}") from None


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()  # files with keys end in a newline, which no header may hold
    if not key:
        raise RewardError(
            f"the judge's api_key_env is {variable!r}, and there is no such environment variable; "
            f"export {variable}=… before the run, or leave api_key_env out for a server that takes no key"
        )
    if not (key.isascii() and key.isprintable()):
        raise RewardError(
            f"the environment variable {variable} of the judge's api_key_env holds characters that no key has "
            "(line breaks, or letters outside ASCII); export it again"
        )
    return key


def _picture_part(picture: RewardPicture) -> dict[str, Any]:
    """A picture as a data URL: the file's own bytes where servers know the format, else as PNG."""
    data = picture.data
    kind = next((kind for magic, kind in MAGIC.items() if data.startswith(magic)), None)
    if kind is None:
        buffer = io.BytesIO()
        picture.open().save(buffer, "PNG")
        data, kind = buffer.getvalue(), "image/png"
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}
