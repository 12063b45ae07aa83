"""Everything that is wrong with a configuration is said at once, with the key, the value and the cure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foveal.config import load_config
from foveal.errors import ConfigError


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(["worker.rollout.n=2", *argv])
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [
        ("trainer.n_gpu_per_node", "trainer.n_gpus_per_node"),
        ("trainer.max_step", "trainer.max_steps"),
        ("actor.optim.lr", "worker.actor.optim.lr"),
        ("worker.actor.lr", "worker.actor.optim.lr"),
        ("trainer.rollout_batch_size", "data.rollout_batch_size"),
        ("gpus_per_node", "trainer.n_gpus_per_node"),
        ("worker.rollout.temprature", "worker.rollout.temperature"),
    ],
)
def test_an_unknown_key_names_the_nearest(mistyped: str, meant: str) -> None:
    assert problems(f"{mistyped}=1") == [f"{mistyped}: unknown key; did you mean {meant}?"]


def test_an_unknown_section_is_named_even_when_it_is_empty() -> None:
    assert problems("workers={}")[0].startswith("workers: unknown key")


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("data.seed=true", "data.seed: true given; allowed: an integer ≥ 0 (default 1)"),
        ("data.rollout_batch_size=0", "data.rollout_batch_size: 0 given; allowed: an integer ≥ 1 (default 512)"),
        (
            "worker.actor.model.lora.target_modules=(q_proj",
            "worker.actor.model.lora.target_modules: (q_proj given, which is no regular expression (missing ), "
            "unterminated subpattern at position 0); or give a list of names",
        ),
        ("data.shuffle=maybe", "data.shuffle: maybe given; allowed: true or false (default true)"),
        ("data.prompt_key=", "data.prompt_key: '' given; allowed: text that is not empty (default prompt)"),
        ("worker.rollout.top_p=1.5", "worker.rollout.top_p: 1.5 given; allowed: a number > 0 and ≤ 1 (default 1.0)"),
        ("worker.rollout.top_p=.nan", "worker.rollout.top_p: nan given; allowed: a number > 0 and ≤ 1 (default 1.0)"),
        ("trainer.val_freq=-2", "trainer.val_freq: -2 given; allowed: -1 or an integer ≥ 1 (default -1)"),
        (
            "worker.rollout.name=sglang",
            "worker.rollout.name: sglang given; allowed: auto, vllm, transformers (default auto)",
        ),
        ("worker.actor.strategy=ddp", "worker.actor.strategy: ddp given; allowed: fsdp (default fsdp)"),
        ("worker.hybrid_engine=false", "worker.hybrid_engine: false given; allowed: true (default true)"),
        (
            "trainer.project_name=null",
            "trainer.project_name: null given; allowed: text that is not empty (default easy_r1)",
        ),
        ("worker.actor=5", "worker.actor: 5 given, but it is a section; set keys in it, as worker.actor.strategy=…"),
    ],
)
def test_a_wrong_value_is_shown_with_what_is_allowed(argument: str, line: str) -> None:
    assert problems(argument) == [line]


def test_an_unknown_estimator_lists_the_known_ones() -> None:
    (line,) = problems("algorithm.adv_estimator=grppo")
    assert "reinforce_plus_plus_baseline, remax, gae, or FILE:function" in line


def test_all_problems_come_together() -> None:
    lines = problems(
        "foo",
        "--lr=3",
        "trainer.epochs=3",
        "data.seed=x",
        "data.min_pixels=[1",
        "data.rollout_batch_size=512",
        "worker.actor.global_batch_size=100",
        "algorithm.filter_low=1",
    )
    beginnings = [re.split("[:=(]| is not", line)[0] for line in lines]
    assert beginnings == [
        "argument 'foo'",
        "argument '--lr",
        "data.min_pixels",
        "trainer.epochs",
        "data.seed",
        "algorithm.filter_low",
        "data.rollout_batch_size",
    ]


def test_a_rule_is_silent_about_a_key_that_was_mistyped() -> None:
    lines = problems("data.rollout_batch_sise=100", "worker.actor.global_batch_size=50")
    assert lines == ["data.rollout_batch_sise: unknown key; did you mean data.rollout_batch_size?"]


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"config=no/such\.yaml: no such file"):
        load_config(["config=no/such.yaml"])


def test_broken_yaml_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text("data:\n  seed: 1\n  shuffle: [true\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml, line 4, column 1: not valid YAML"):
        load_config([f"config={file}"])


def test_a_key_that_stands_twice_in_the_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("data:\n  seed: 1\n  shuffle: true\n  seed: 2\n")
    (line,) = problems(f"config={file}")
    assert line == f"{file}, line 4: data.seed stands there twice, first in line 2; keep one of them"


def test_a_file_that_is_no_mapping_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    file.write_text("- 1\n")
    with pytest.raises(ConfigError, match="must hold the sections data, algorithm, worker, trainer"):
        load_config([f"config={file}"])


def test_two_files_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "one.yaml"
    file.write_text("")
    assert "only one file is read" in problems(f"config={file}", f"config={file}")[0]


@pytest.mark.parametrize(
    ("argument", "beginning"),
    [
        ("worker.actor=[1]", "worker.actor: [1] given, but it is a section"),
        ("trainer.logger.0=wandb", "trainer.logger: {'0': 'wandb'} given; allowed: a list of console"),
        ("worker.rollout.val_override_config=[1]", "worker.rollout.val_override_config: [1] given; allowed: a mapping"),
        ("worker.actor.optim.lr=.inf", "worker.actor.optim.lr: inf given; allowed: a number"),
    ],
)
def test_an_override_of_another_kind_than_the_files_value(tmp_path: Path, argument: str, beginning: str) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(
        "worker:\n  actor: {ppo_epochs: 1}\n  rollout: {val_override_config: {n: 1}}\ntrainer:\n  logger: [file]\n"
    )
    assert problems(f"config={file}", argument)[0].startswith(beginning)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("data: &a\n  x: *a\n", "an anchor (&) holds itself"),
        ("data: " + "[" * 2000 + "]" * 2000, "lie too deep in each other"),
        ("null: 2\n", "null: unknown key"),
        ("data.seed: 3\n", "line 1: data.seed: write it as nested mappings"),
    ],
)
def test_odd_files_are_named_and_not_a_traceback(tmp_path: Path, content: str, fault: str) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_config([f"config={file}"])
    assert fault in str(caught.value)


@pytest.mark.parametrize("path", ["", "/tmp", "a" * 5000])
def test_what_cannot_be_opened_as_a_file_says_so(path: str) -> None:
    with pytest.raises(ConfigError, match="give the path of a YAML file"):
        load_config([f"config={path}"])
