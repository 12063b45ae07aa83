"""Values arrive as they were written, whether from the YAML file or the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foveal.config import Config, load_config, render
from foveal.errors import ConfigError

N = "worker.rollout.n=2"  # the default estimator compares answers


def load(*argv: str) -> Config:
    return load_config([N, *argv])


def from_file(folder: Path, text: str, *argv: str) -> Config:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return load(f"config={file}", *argv)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("trainer.experiment_name=0123", "0123"),
        ("trainer.experiment_name=1e5", "1e5"),
        ("trainer.experiment_name=true", "true"),
        ("trainer.experiment_name='quoted: text'", "quoted: text"),
        ("trainer.experiment_name=${ENV}", "${ENV}"),
        ("trainer.experiment_name=cost $5 ${", "cost $5 ${"),
        ("data.train_files=/a b/c=d: e#f.jsonl@train[:10]", "/a b/c=d: e#f.jsonl@train[:10]"),
        ("data.train_files=*.jsonl", "*.jsonl"),
        ("data.format_prompt=null", None),
        ("data.format_prompt=", None),
        ("data.image_key=", ""),
        ("data.max_pixels=", None),
        ('trainer.logger=["file"]', ["file"]),
        ("trainer.logger=file", ["file"]),
        ("worker.actor.optim.lr=1e-6", 1e-6),
        ("worker.actor.optim.lr=0", 0.0),
        ("worker.actor.optim.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("worker.actor.fsdp.torch_dtype=bfloat16", "bf16"),
        ("worker.actor.token_budget=4096", 4096),
        ("worker.actor.model.lora.target_modules=q_proj,v_proj", ["q_proj", "v_proj"]),
        ("worker.actor.model.lora.target_modules=q_proj", ["q_proj"]),
        (r"worker.actor.model.lora.target_modules=.*\.\d{1,2}\..*", r".*\.\d{1,2}\..*"),
        ("worker.actor.model.lora.exclude_modules=.*visual.*", ".*visual.*"),
        ('worker.rollout.val_override_config={"n":16,"temperature":1.0}', {"n": 16, "temperature": 1.0}),
        ("worker.reward.reward_function_kwargs={x: 1e-3, y: '1e-3'}", {"x": 1e-3, "y": "1e-3"}),
        ("trainer.save_freq=0", -1),
        ("algorithm.adv_estimator=my.py:advantages", "my.py:advantages"),
    ],
)
def test_an_override_gives_this_value(argument: str, expected: Any) -> None:
    value = load(argument).value(argument.partition("=")[0])
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize("written", ["'0123'", "0123", '"0123"'])
def test_text_in_a_file_stays_text(tmp_path: Path, written: str) -> None:
    assert from_file(tmp_path, f"trainer: {{experiment_name: {written}}}").trainer.experiment_name == "0123"


def test_a_file_may_write_numbers_without_a_point(tmp_path: Path) -> None:
    assert from_file(tmp_path, "algorithm:\n  kl_coef: 1e-2\n").algorithm.kl_coef == 0.01


def test_overrides_win_over_the_file_and_the_last_one_wins(tmp_path: Path) -> None:
    config = from_file(tmp_path, "data: {seed: 5, shuffle: false}", "data.seed=6", "data.seed=7")
    assert (config.data.seed, config.data.shuffle) == (7, False)


def test_an_override_changes_one_part_of_a_mapping(tmp_path: Path) -> None:
    text = "worker: {rollout: {val_override_config: {n: 1, top_p: 0.9}}}"
    config = from_file(tmp_path, text, "worker.rollout.val_override_config.n=4")
    assert config.worker.rollout.val_override_config == {"n": 4, "top_p": 0.9}


def test_an_empty_section_is_all_defaults(tmp_path: Path) -> None:
    assert from_file(tmp_path, "data:\ntrainer:\n").data == Config().data


def test_a_resolvable_interpolation_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOVEAL_TEST_MODEL", "/models/a")
    config = load(
        "worker.actor.model.model_path=${oc.env:FOVEAL_TEST_MODEL}",
        "trainer.experiment_name=${data.seed}",
        "data.seed=7",
    )
    assert config.worker.actor.model.model_path == "/models/a"
    assert config.trainer.experiment_name == "7"


def test_the_run_folder_follows_project_and_experiment() -> None:
    assert load("trainer.experiment_name=x").trainer.checkpoint_dir == Path("checkpoints/easy_r1/x")
    assert load("trainer.save_checkpoint_path=out").trainer.checkpoint_dir == Path("out")


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load("trainer.save_checkpoint_path=~/runs/x", "worker.actor.model.model_path=~/models/a")
    assert config.trainer.checkpoint_dir == Path("/home/me/runs/x")
    assert config.worker.actor.model.model_path == "/home/me/models/a"


def test_given_holds_exactly_the_keys_that_were_set(tmp_path: Path) -> None:
    assert from_file(tmp_path, "data: {seed: 1}").given == {"data.seed", "worker.rollout.n"}


def test_val_sampling_takes_absent_parameters_from_the_rollout_except_n() -> None:
    config = load("worker.rollout.top_p=0.8", "worker.rollout.val_override_config={temperature: 0}")
    sampling = config.worker.rollout.val_sampling
    assert (sampling["n"], sampling["top_p"], sampling["temperature"]) == (1, 0.8, 0)


def test_render_reads_back_to_the_same_configuration(tmp_path: Path) -> None:
    config = load(
        "trainer.experiment_name=0123",
        "trainer.project_name=${ENV} ${",
        "data.train_files=数/c=d: e #f",
        "worker.actor.optim.lr=3e-7",
        'worker.reward.reward_function_kwargs={"a": "1e-6", "b": "yes", "c": null, "d": [1, 2.5]}',
    )
    file = tmp_path / "printed.yaml"
    file.write_text(render(config), encoding="utf-8")
    assert load_config([f"config={file}"]).model_dump() == config.model_dump()


def test_loading_is_fast_and_imports_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # the first of three compiles what has changed
    code = (
        "import sys, time; start = time.process_time()\n"
        "from foveal.config import load_config, render\n"
        "render(load_config(['worker.rollout.n=2']))\n"
        "print(time.process_time() - start)\n"
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(3)]
    printed = [run.stdout.splitlines() for run in runs]
    assert min(float(seconds) for seconds, _ in printed) < 1  # half of it on a machine that does nothing else
    assert {heavy for _, heavy in printed} == {"[]"}


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("trainer.experiment_name=${oc.env:FOVEAL_NO_SUCH}", "trainer.experiment_name"),
        (
            "worker.reward.reward_function_kwargs={api_key: '${oc.env:FOVEAL_NO_SUCH}'}",
            "worker.reward.reward_function_kwargs",
        ),
    ],
)
def test_a_variable_that_is_not_set_is_told(argument: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: the environment variable FOVEAL_NO_SUCH is not set; export it"):
        load_config([argument])
    load(argument.replace("NO_SUCH}", "NO_SUCH,text}"))
