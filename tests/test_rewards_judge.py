"""The judge against a real HTTP server on this machine."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from foveal.config.schema_reward import RewardConfig
from foveal.errors import RewardError
from foveal.reward.part import start_parts
from foveal.reward.runner import RewardRunner
from foveal.types import Group, Media
from tests.reward_support import make_group, overall, score


class Server(ThreadingHTTPServer):
    """Answers each chat request with the next of `script`: (status, text), then "Score: 7" for ever."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[tuple[int, str]] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.requests.append({"path": self.path, **json.loads(self.rfile.read(length))})
        self.server.keys.append(self.headers["Authorization"])
        self.server.times.append(time.monotonic())
        status, text = self.server.script.pop(0) if self.server.script else (200, "Fine.\n**Score: 7**")
        if status == 0:  # no answer in time
            time.sleep(1)
            return
        if status == -1:  # a byte now and then
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            for _ in range(10):
                with suppress(OSError):
                    self.wfile.write(b" ")
                time.sleep(0.1)
            return
        usage = {"prompt_tokens": 100, "completion_tokens": 20}
        body = json.dumps({"choices": [{"message": {"content": text}}], "usage": usage}) if status == 200 else text
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def judge(server: Server, kwargs: dict[str, Any] | None = None, **keys: Any) -> RewardRunner:
    given = {"url": server.url, "model": "tiny", **(kwargs or {})}
    config = RewardConfig(reward_function="foveal.rewards.judge:Judge", reward_function_kwargs=given, **keys)
    return RewardRunner(config, "train")


def test_judge_sees_question_truth_answer_and_picture(server: Server) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(buffer, "JPEG")
    group = make_group("four", "It is 4.")
    group.prompt.row = {"problem": "<image>How many?"}
    group.prompt.media = [Media("image", buffer.getvalue())]
    score(judge(server, {"question": "problem", "extra": {"seed": 1}}), group)
    assert overall(group) == [0.7]
    (request,) = server.requests
    picture, text = request["messages"][0]["content"]
    assert picture["image_url"]["url"] == f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    assert all(part in text["text"] for part in ("How many?", "four", "It is 4.", "from 0 (wrong) to 10"))
    assert "<image>" not in text["text"]
    assert request["path"] == "/v1/chat/completions"
    assert (request["model"], request["seed"], request["temperature"]) == ("tiny", 1, 0.0)


def test_a_format_that_servers_may_not_know_is_sent_as_png(server: Server) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(buffer, "TIFF")
    group = make_group("x", "a")
    group.prompt.media = [Media("image", buffer.getvalue())]
    score(judge(server), group)
    url = server.requests[0]["messages"][0]["content"][0]["image_url"]["url"]
    assert url.startswith("data:image/png;base64,") and base64.b64decode(url.partition(",")[2]).startswith(b"\x89PNG")


def test_busy_failing_and_silent_servers_are_asked_again(server: Server) -> None:
    server.script = [(429, "slow down"), (503, "restarting"), (0, "")]
    score(judge(server, {"timeout": 0.3}), group := make_group("x", "a"))
    assert overall(group) == [0.7]
    assert len(server.times) == 4
    pauses = [later - earlier for earlier, later in zip(server.times, server.times[1:], strict=False)]
    assert pauses[0] >= 0.5 and pauses[1] >= 1.0, "each pause is up to twice the one before"


def test_a_refusal_is_final_and_shows_what_the_server_said(server: Server) -> None:
    server.script = [(404, "no model called tiny")]
    with pytest.raises(RewardError, match="refused the request with status 404: no model called tiny"):
        score(judge(server), make_group("x", "a"))
    assert len(server.requests) == 1


def test_a_server_that_is_not_there_is_named(server: Server) -> None:
    runner = judge(server, {"url": "http://127.0.0.1:9/v1", "retries": 0})
    with pytest.raises(RewardError, match=r"(?s)127\.0\.0\.1:9/v1/chat/completions gave no answer in 1 tries.*network"):
        score(runner, make_group("x", "a"))


@pytest.mark.parametrize("reply", ["A good answer.", "Score: 11", "Score: -1"])
def test_a_reply_without_a_score_is_shown_and_the_run_goes_on(
    server: Server, reply: str, capfd: pytest.CaptureFixture[str]
) -> None:
    server.script = [(200, reply), (200, reply)]
    metrics = score(judge(server, timeout_score=-1.0, concurrency=1), group := make_group("x", "a", "b", "c"))
    assert overall(group) == [-1.0, -1.0, 0.7]
    assert metrics["reward/errors"] == 2.0
    assert capfd.readouterr().out.count(f"no score from 0 to 10: '{reply}'") == 1


def test_replies_without_a_score_end_the_run_where_they_are_too_many(server: Server) -> None:
    server.script = [(200, "Fine.")] * 6
    with pytest.raises(RewardError, match=r"(?s)6 of the last 6 answers got no score: 6 had none to get.*'Fine\.'"):
        score(judge(server, max_error_rate=0.01), make_group("x", *"abcdef"))


@pytest.mark.parametrize(
    ("kwargs", "limit", "seconds"),
    [
        ({}, None, 400),
        ({"timeout": 10, "retries": 7}, None, 8 * 10 + 63 + 60 + 9),
        ({"retries": 0, "requests_per_minute": 10}, None, 60 + 60 + 9),
        ({}, 20.0, 20.0),
    ],
)
def test_an_answer_has_the_time_of_all_its_tries(
    server: Server, kwargs: dict[str, Any], limit: float | None, seconds: float
) -> None:
    config = RewardConfig(
        reward_function="foveal.rewards.judge:Judge",
        reward_function_kwargs={"url": server.url, "model": "tiny", **kwargs},
        time_limit=limit,
    )
    (part,) = start_parts(config)
    assert part.time_limit == seconds
    part.close()


def test_a_server_that_sends_a_little_now_and_then_is_no_longer_waited_for(server: Server) -> None:
    server.script = [(-1, "")]
    score(judge(server, {"timeout": 0.5}), group := make_group("x", "a"))
    assert overall(group) == [0.7]
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "body",
    [
        "<html>welcome</html>",
        '{"choices": []}',
        '{"choices": [{"message": {"content": ["Score: 7"]}}]}',
        '{"choices": [{"message": {"content": "Score: 7"}}], "usage": [100, 20]}',
    ],
)
def test_what_is_no_chat_completion_is_shown(server: Server, body: str) -> None:
    server.script = [(201, body)]
    with pytest.raises(RewardError, match=re.escape(f"no chat completion: {body!r}")):
        score(judge(server), make_group("x", "a"))


def test_the_last_score_of_a_reply_counts(server: Server) -> None:
    server.script = [(200, "The answer asks me to write Score: 10. It is wrong.\nScore: 2.5")]
    score(judge(server), group := make_group("x", "a"))
    assert overall(group) == [0.25]


def test_tokens_and_cost_are_counted_and_replies_kept(server: Server, tmp_path: Path) -> None:
    kwargs = {"cache": str(tmp_path / "deep" / "replies.sqlite"), "input_price": 1000.0, "output_price": 5000.0}
    groups: list[Group] = [make_group("x", "a"), make_group("x", "a"), make_group("x", "b")]
    for group in groups:
        score(judge(server, kwargs), group)
    paid = {"overall": 0.7, "judge_tokens": 120.0, "judge_cost": pytest.approx(0.2), "judge_cached": 0.0}
    free = {"overall": 0.7, "judge_tokens": 0.0, "judge_cost": 0.0, "judge_cached": 1.0}
    assert [group.responses[0].rewards for group in groups] == [paid, free, paid]
    assert len(server.requests) == 2


def test_requests_keep_their_rate(server: Server) -> None:
    score(judge(server, {"requests_per_minute": 600.0}), make_group("x", *"abcdefg"))
    assert server.times[-1] - server.times[0] >= 0.3, "six pauses of 0.1 s, less what the way to the server varies"


def test_the_key_comes_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    score(judge(server, {"api_key_env": "JUDGE_KEY"}), make_group("x", "a"))
    score(judge(server), make_group("x", "a"))
    assert server.keys == ["Bearer secret", None]


def test_a_key_that_is_not_set_is_an_error_at_the_start(server: Server) -> None:
    with pytest.raises(RewardError, match=r"api_key_env is 'ABSENT_KEY'.*export ABSENT_KEY"):
        judge(server, {"api_key_env": "ABSENT_KEY"}).start()


def test_a_key_that_ends_in_a_newline_is_sent_without_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret\n")
    score(judge(server, {"api_key_env": "JUDGE_KEY"}), make_group("7", "7"))
    assert server.keys == ["Bearer secret"]


@pytest.mark.parametrize("key", ["sec\nret", "secr\u00e9t"])
def test_a_key_that_no_header_may_hold_is_an_error_that_does_not_show_it(
    server: Server, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    with pytest.raises(RewardError, match="JUDGE_KEY of the judge's api_key_env holds characters") as caught:
        judge(server, {"api_key_env": "JUDGE_KEY"}).start()
    assert "sec" not in str(caught.value)


@pytest.mark.parametrize("status", [401, 201])
def test_a_key_that_the_server_repeats_is_not_shown(
    server: Server, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-key")
    server.script = [(status, "no such key: secret-key")]
    with pytest.raises(RewardError, match="no such key: …") as caught:
        score(judge(server, {"api_key_env": "JUDGE_KEY"}), make_group("7", "7"))
    assert "secret-key" not in str(caught.value)


def test_a_template_of_ones_own_sees_every_column(server: Server, tmp_path: Path) -> None:
    template = tmp_path / "judge.jinja"
    template.write_text("{{ row.level }} {{ response }} {{ question }}")
    group = make_group("x", "a")
    group.prompt.row = {"level": 3, "q": "How?"}
    score(judge(server, {"template": str(template), "question": "q"}), group)
    assert server.requests[0]["messages"][0]["content"] == [{"type": "text", "text": "3 a How?"}]


def test_many_are_asked_at_a_time(server: Server) -> None:
    server.script = [(0, "")] * 20
    begin = time.monotonic()
    metrics = score(
        judge(server, {"timeout": 0.5, "retries": 0}, on_error="score", max_error_rate=1.0, concurrency=20),
        make_group("x", *"abcdefghijklmnopqrst"),
    )
    assert metrics["reward/errors"] == 20.0
    assert time.monotonic() - begin < 20 * 0.5
