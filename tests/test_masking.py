"""Keys and passwords of a configuration are in nothing that leaves the process, and reach the reward function."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from foveal.cli import main
from foveal.config import load_config, render
from foveal.config.keys import known_keys
from foveal.errors import ConfigError
from foveal.masking import is_secret, masked, masks, remember, without_secrets, written
from foveal.resume import check_settings, saved_settings
from foveal.view.app import make_app
from foveal.view.export import export
from foveal.view.runs import open_runs
from tests.small_run import small_run
from tests.view_support import write_run

KEY = "planted-0123-secret"
KWARGS = "worker.reward.reward_function_kwargs"
REWARD = f'''
REWARD_NAME = "keyed"
REWARD_TYPE = "batch"


def score(rows, api_key, url):
    """Scores only for the one who has the key."""
    assert api_key == "{KEY}" and url == "http://me:{KEY}@host/v1"
    return [{{"overall": (i * 7 % 5) / 4}} for i in range(len(rows))]
'''


@pytest.mark.parametrize(
    "name",
    ["api_key", "apikey", "openai_api_key", "apiKey", "token", "hf_token", "accessToken", "PASSWORD", "secret",
     "client_secret", "Authorization", "x-api-key", "credentials", "api_keys", "a.b.api_key", "judge_key", "judgeKey",
     "judge_keys", "deepseek_key", "DEEPSEEK-KEY", "pwd", "db_pwd", "auth", "basic_auth", "access_tokens", "cookie"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


def test_ordinary_names_are_shown() -> None:
    ordinary = ["api_key_env", "max_tokens", "token_budget", "tokenizer_path", "answer_key", "monkey", "key"]
    ordinary += ["end_token", "eos_token", "imageToken", "image_pad_token", "cost_per_token", *known_keys()]
    ordinary += ["pad_token", "key_name", "keyboard", "keys", "required_keys", "question_key", "imageKey", "sort_key"]
    ordinary += ["author", "auth_type", "pwd_field", "stop_tokens", "tokens", "cookie_count", "judge_model"]
    assert [name for name in ordinary if is_secret(name)] == []


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"api_key": "x", "n": 1, "flag": True}, {"api_key": "***", "n": 1, "flag": True}),
        ({"extra": [{"headers": {"Authorization": "Bearer x"}}]}, {"extra": [{"headers": {"Authorization": "***"}}]}),
        ({"credentials": {"user": "me", "list": ["a", 7]}}, {"credentials": {"user": "***", "list": ["***", "***"]}}),
        ({"token": None, "password": "", "secret": 1234}, {"token": None, "password": "", "secret": "***"}),
        ({"url": "https://me:pw@host/v1?x=1&api_key=abc"}, {"url": "https://***@host/v1?x=1&api_key=***"}),
        ({"url": "https://me:p@w@host"}, {"url": "https://***@host"}),
        ({"judge_key": "x", "pwd": 1, "auth": ["me", "x"]}, {"judge_key": "***", "pwd": "***", "auth": ["***", "***"]}),
        (
            {"use_auth": True, "url": "http://host/a?pwd=x#auth=y"},
            {"use_auth": True, "url": "http://host/a?pwd=***#auth=***"},
        ),
        ({"proxy": "socks5://me:pw@[::1]:80"}, {"proxy": "socks5://***@[::1]:80"}),
        ({"url": "http://localhost:8000/v1", "at": "a@b"}, {"url": "http://localhost:8000/v1", "at": "a@b"}),
    ],
)
def test_values_of_secrets_are_masked(given: dict[str, Any], shown: dict[str, Any]) -> None:
    assert masked(given) == shown


def test_texts_lose_what_the_environment_calls_a_key_and_kinds_that_are_well_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "fromtheenvironment")
    monkeypatch.setenv("MONKEY_HOUSE", "thereandback")
    key = "0123456789abcdefXYZ" * 2
    text = f"fromtheenvironment thereandback sk-{key} hf_{key} task-{key}"
    assert without_secrets(text) == f"*** thereandback *** *** task-{key}"


def test_a_word_that_any_key_names_stays_in_texts_and_what_may_be_a_secret_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("foveal.masking._remembered", set())
    remember({"scene_key": "validation", "mistral_key": "0123-mistral", "judge_key": "onlyletters"})
    assert without_secrets("validation of 0123-mistral onlyletters") == "validation of *** ***"


def test_the_working_directory_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/home/someone/project")
    monkeypatch.setenv("OLDPWD", "/home/someone/elsewhere")
    monkeypatch.setenv("MYSQL_PWD", "fromtheenvironment")
    assert without_secrets("/home/someone/project /home/someone/elsewhere fromtheenvironment").endswith("elsewhere ***")


@pytest.mark.parametrize("path", ["/models/hf_qwen2_5_vl_7b_instruct_and_more", "runs/sk-learn-baseline-2026-number-2"])
def test_names_that_begin_as_keys_do_are_shown(path: str) -> None:
    assert without_secrets(path) == path


def test_a_value_of_which_a_part_was_masked_is_asked_for_and_a_line_of_stars_is_not() -> None:
    shown = {"head": "Bearer ***", "url": "http://host?api_key=***&n=1", "text": "a ***bold*** word", "line": "-***-"}
    assert list(masks(shown)) == ["head", "url"]


def test_a_written_configuration_is_masked_and_asks_for_the_value_when_it_is_read(tmp_path: Path) -> None:
    config = load_config(["worker.rollout.n=2", f"{KWARGS}={{api_key: short, at: 'http://me:pw@host'}}"])
    file = tmp_path / "config.yaml"
    file.write_text(render(config))
    assert "short" not in file.read_text() and "pw" not in file.read_text()
    with pytest.raises(ConfigError) as error:
        load_config([f"config={file}"])
    assert f"{KWARGS}.api_key: *** stands for" in str(error.value) and f"{KWARGS}.at: ***" in str(error.value)
    given = {"api_key": "other", "at": "http://host"}
    again = load_config([f"config={file}", f"{KWARGS}={json.dumps(given)}"])
    assert again.worker.reward.reward_function_kwargs == given


@pytest.mark.parametrize(
    "argument",
    [f"{KWARGS}={{api_key: 'short", f"{KWARGS}=[{{api_key: short}}]", f"{KWARGS}.api_key='short", "api_key: short",
     f"{KWARGS}={{api_key: short, api_key: short}}", "worker.reward.num_cpus={token: short}"],
)  # fmt: skip
def test_messages_about_the_configuration_do_not_repeat_a_key(argument: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(["worker.rollout.n=2", argument])
    assert "short" not in str(error.value) and "***" in str(error.value)


def test_a_command_line_loses_short_keys_too() -> None:
    command = ["train", "config=a.yaml", "data.answer_key=answer", f"{KWARGS}={{api_key: short, n: 1}}"]
    assert list(map(written, command)) == [*command[:-1], "***"]


def test_a_key_that_was_changed_is_not_told_and_does_not_refuse_a_checkpoint() -> None:
    before, after = (load_config(["worker.rollout.n=2", f"{KWARGS}={{api_key: {key}}}"]) for key in ("first", "second"))
    assert "first" not in json.dumps(saved_settings(before))
    unmasked = {**saved_settings(before), KWARGS: {"api_key": "first"}}  # as older versions kept it
    for settings in (saved_settings(before), unmasked):
        assert check_settings({"settings": settings}, after, "somewhere") is None


def test_the_viewer_masks_what_older_runs_have_in_their_files(tmp_path: Path) -> None:
    reward = {"reward_function_kwargs": {"api_key": KEY, "url": f"http://me:{KEY}@host"}}
    folders = [
        write_run(tmp_path / name, worker={"reward": reward if name == "one" else {}}) for name in ("one", "two")
    ]
    page = TestClient(make_app(open_runs(folders)), base_url="http://127.0.0.1:7007").get("/settings").text
    export(open_runs(folders), tmp_path / "page.html")
    for text in (page, (tmp_path / "page.html").read_text()):
        assert f"{KWARGS}.api_key" in text and "***" in text and KEY not in text


@pytest.mark.slow
def test_no_file_of_a_run_holds_its_keys_and_the_run_goes_on_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process of its own: wandb and SwanLab note the command line, here with the keys in it."""
    (tmp_path / "reward.py").write_text(REWARD)
    keys = f"{KWARGS}={{api_key: {KEY}, url: 'http://me:{KEY}@host/v1'}}"
    args = small_run(tmp_path, "qwen2_5_vl", keys, "trainer.save_freq=1", "algorithm.use_kl_loss=false")
    places = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "SWANLAB_DIR": str(tmp_path / "swan")}
    places |= {"MLFLOW_TRACKING_URI": f"file:{tmp_path / 'mlruns'}", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "foveal", "train", *args, "trainer.logger=[tensorboard,wandb,swanlab,mlflow]"],
        env={**os.environ, **places, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith("reward.")]
    assert {"swan", "wandb", "mlruns"} <= {path.relative_to(tmp_path).parts[0] for path in files}
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in done.stdout + done.stderr
    stored = json.loads((tmp_path / "run/experiment_config.json").read_text())["worker"]["reward"]
    assert stored["reward_function_kwargs"] == {"api_key": "***", "url": "http://***@host/v1"}

    assert main(["train", *args, "trainer.max_steps=2"]) == 0  # the reward function checks the key that it gets
    assert "changed since" not in capsys.readouterr().out
    assert main(["train", *args, "trainer.max_steps=3", f"{KWARGS}.other={KEY}"]) == 1
    error = capsys.readouterr().err
    assert "does not take" in error and KEY not in error
