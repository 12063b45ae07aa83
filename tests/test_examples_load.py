"""Every script under examples/ runs from the checkout's root and asks for a configuration that loads."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from foveal.config import Config, load_config

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path.relative_to(ROOT / "examples").as_posix() for path in (ROOT / "examples").rglob("*.sh"))

NAMES = [
    "qwen2_5_7b_math_grpo",
    "qwen2_5_vl_3b_geo3k_grpo",
    "qwen2_5_vl_7b_geo3k_grpo",
    "qwen2_5_vl_32b_geo3k_grpo",
    "qwen2_5_vl_7b_geo3k_cispo",
    "qwen2_5_vl_7b_geo3k_dapo",
    "qwen2_5_vl_7b_geo3k_gspo",
    "qwen2_5_vl_7b_geo3k_reinforce",
    "qwen2_5_vl_7b_geo3k_sapo",
    "qwen2_5_vl_7b_geo3k_swanlab",
    "qwen2_5_vl_7b_multi_image",
    "qwen2_5_vl_3b_android_gui_grpo",
    "qwen3_4b_math_grpo",
    "qwen3_4b_math_grpo_lora",
    "qwen3_14b_dapo17k_dapo",
    "qwen3_vl_4b_geo3k_grpo",
    "qwen3_vl_4b_geo3k_grpo_lora",
    "qwen3_vl_30b_geo3k_grpo",
    "baselines/qwen2_5_vl_3b_clevr",
    "baselines/qwen2_5_vl_3b_geoqa8k",
]

SMALL = ["trainer.n_gpus_per_node=1", "data.rollout_batch_size=8", "worker.actor.global_batch_size=4"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a script with a `python3` that writes its arguments down; returns the configuration they make."""
    shim = tmp_path / "bin" / "python3"
    shim.parent.mkdir()
    shim.write_text('#!/bin/sh\nprintf "%s\\0" "$@" > "$RECORD"\n')
    shim.chmod(0o755)
    record = tmp_path / "argv"
    monkeypatch.chdir(ROOT)  # the scripts name examples/config.yaml

    def _run(name: str, *arguments: str, **environment: str) -> Config:
        variables = {**os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}", "RECORD": str(record), **environment}
        subprocess.run(["bash", f"examples/{name}", *arguments], check=True, env=variables, capture_output=True)
        argv = record.read_text().split("\0")[:-1]
        assert argv[:2] == ["-m", "verl.trainer.main"]
        return load_config(argv[2:])

    return _run


def test_all_scripts_of_easyr1_are_there() -> None:
    assert {f"{name}.sh" for name in NAMES} <= set(SCRIPTS)


@pytest.mark.parametrize("name", [f"{name}.sh" for name in NAMES])
def test_a_script_loads_and_passes_overrides_on(run, name: str) -> None:
    config = run(name, *SMALL, "trainer.experiment_name=a b", MODEL_PATH="/a folder/model")
    assert config.worker.actor.model.model_path == "/a folder/model"
    assert config.trainer.experiment_name == "a b"
    assert config.data.rollout_batch_size == 8
    assert Path(str(config.worker.reward.reward_function).partition(":")[0]).is_file()
    assert Path(str(config.data.format_prompt)).is_file()


@pytest.mark.parametrize("name", [f"{name}.sh" for name in NAMES])
def test_a_script_as_it_stands_loads(run, name: str) -> None:
    assert run(name).worker.actor.model.model_path.startswith("Qwen/")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (
            "qwen2_5_vl_7b_geo3k_gspo.sh",
            {
                "worker.actor.loss_type": "gspo_token",
                "worker.actor.loss_avg_mode": "seq",
                "worker.actor.clip_ratio_low": 3e-4,
                "worker.actor.clip_ratio_high": 4e-4,
                "algorithm.disable_kl": True,
            },
        ),
        (
            "qwen2_5_vl_7b_geo3k_cispo.sh",
            {
                "worker.actor.loss_type": "cispo",
                "worker.actor.clip_ratio_low": 0,
                "worker.actor.clip_ratio_high": 4,
                "algorithm.disable_kl": False,
            },
        ),
        (
            "qwen2_5_vl_7b_geo3k_dapo.sh",
            {
                "data.mini_rollout_batch_size": 128,
                "worker.actor.clip_ratio_low": 0.2,
                "worker.actor.clip_ratio_high": 0.28,
                "algorithm.disable_kl": True,
                "algorithm.online_filtering": True,
            },
        ),
        (
            "qwen2_5_vl_7b_geo3k_reinforce.sh",
            {
                "algorithm.adv_estimator": "reinforce_plus_plus",
                "algorithm.use_kl_loss": False,
                "algorithm.kl_penalty": "kl",
                "algorithm.kl_coef": 1e-3,
            },
        ),
        (
            "qwen3_vl_30b_geo3k_grpo.sh",
            {
                "worker.actor.fsdp.torch_dtype": "bf16",
                "worker.actor.optim.strategy": "adamw_bf16",
                "worker.rollout.tensor_parallel_size": 8,
            },
        ),
        ("qwen3_vl_4b_geo3k_grpo_lora.sh", {"worker.actor.model.lora.rank": 64, "worker.actor.optim.lr": 1e-5}),
        ("qwen2_5_vl_7b_multi_image.sh", {"data.rollout_batch_size": 256, "worker.rollout.limit_images": 2}),
        ("qwen2_5_vl_7b_geo3k_swanlab.sh", {"trainer.logger": ["console", "swanlab"]}),
        (
            "qwen3_14b_dapo17k_dapo.sh",
            {"worker.rollout.val_override_config": {"n": 16, "temperature": 1.0, "top_p": 0.7}},
        ),
    ],
)
def test_a_script_sets_these_values(run, name: str, values: dict[str, object]) -> None:
    config = run(name)
    assert {key: config.value(key) for key in values} == values
