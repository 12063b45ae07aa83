"""A whole run in seconds: a micro model, eight rows with pictures, four of them in a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from foveal.quickstart.tiny import Family, build_tiny

COLORS = {"red": (255, 0, 0), "green": (0, 200, 0), "blue": (0, 0, 255), "black": (0, 0, 0)}

REWARD = '''
REWARD_NAME = "spread"
REWARD_TYPE = "batch"


def score(rows):
    """Differs between the answers of a group."""
    return [{"overall": (i * 7 % 5) / 4, "accuracy": float(i * 7 % 5 >= 2)} for i in range(len(rows))]
'''


def write_rows(folder: Path, count: int = 8, name: str = "rows.jsonl", **changes: Any) -> Path:
    """Rows that ask for the colour of a 56×56 picture; `changes` replace columns of every row."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(count):
        color = list(COLORS)[index % len(COLORS)]
        picture = folder / f"{color}.png"
        if not picture.exists():
            Image.new("RGB", (56, 56), COLORS[color]).save(picture)
        rows.append({"problem": "<image>Which color?", "answer": color, "images": [picture.name], **changes})
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def small_run(root: Path, family: Family = "qwen2_5_vl", *overrides: str) -> list[str]:
    """Arguments of `foveal train` for a one-step run with everything under `root`."""
    model = root / f"model_{family}"
    if not (model / "config.json").exists():
        build_tiny(model, family)
    rows = write_rows(root / "data")
    reward = root / "reward.py"
    if not reward.exists():
        reward.write_text(REWARD)
    return [
        f"data.train_files={rows}",
        f"data.val_files={rows}",
        f"data.image_dir={rows.parent}",
        "data.prompt_key=problem",
        "data.answer_key=answer",
        "data.max_prompt_length=128",
        "data.max_response_length=8",
        "data.rollout_batch_size=4",
        "data.val_batch_size=8",
        "data.min_pixels=784",
        "data.max_pixels=200704",
        "worker.actor.global_batch_size=4",
        f"worker.actor.model.model_path={model}",
        "worker.actor.optim.lr=1.0e-3",
        "worker.rollout.name=transformers",  # vLLM, where it is installed, would start for 20 seconds
        "worker.rollout.n=4",
        f"worker.reward.reward_function={reward}:score",
        "algorithm.use_kl_loss=true",
        "algorithm.kl_penalty=low_var_kl",
        "trainer.max_steps=1",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=false",
        "trainer.logger=[file]",
        f"trainer.save_checkpoint_path={root / 'run'}",
        *overrides,
    ]


def read_log(run: Path) -> list[dict[str, Any]]:
    """The records of a run's experiment_log.jsonl."""
    return [json.loads(line) for line in (run / "experiment_log.jsonl").read_text(encoding="utf-8").splitlines()]
