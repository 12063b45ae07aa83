"""A set-up as people have it: rows, format prompt, reward file, keys; and how it is laid out in a folder."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

R1V = """{{ content | trim }}

Think first, between <think> and </think>. Then give the final answer between <answer> and </answer>."""
BOXED = "{{ content | trim }}\n\nReason step by step, then put your final answer within \\boxed{}."
ANSWER_ONLY = "{{ content | trim }}\n\nPut the final answer, and nothing else, between <answer> and </answer>."

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One set-up.

    Attributes:
        task: what the rows ask.
        kind: the class of fault, or for a sound one what is unusual in it.
        note: what is wrong; for a sound one why it's right although it looks odd.
        report: the public report that it's modelled on, or the kind of report.
        rows: makes the rows, drawing their pictures below the folder given.
        prompt: the format prompt's text.
        keys: further overrides.
        files: further files of the folder; an override's `{folder}` stands for its path.
    """

    id: str
    task: str
    kind: str
    sound: bool
    note: str
    report: str
    rows: Callable[[Path], list[Row]]
    prompt: str | None
    reward: str
    keys: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path, model_path: str | Path | None = None) -> list[str]:
        """Lay it out in `folder`; the overrides for `foveal check`, with the model when its path is given."""
        folder = Path(folder).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows(folder)]
        texts = {"rows.jsonl": "".join(lines), "reward.py": self.reward, **self.files}
        keys: dict[str, Any] = {
            "data.train_files": folder / "rows.jsonl",
            "data.val_files": folder / "rows.jsonl",
            "data.prompt_key": "problem",
            "data.answer_key": "answer",
            "data.image_key": "images",
            "data.image_dir": folder,
            "data.max_prompt_length": 2048,
            "data.max_response_length": 2048,
            "data.rollout_batch_size": 8,
            "worker.actor.global_batch_size": 8,
            "worker.rollout.n": 4,
            "worker.rollout.tensor_parallel_size": 1,
            "worker.reward.reward_function": f"{folder / 'reward.py'}:compute_score",
            "trainer.n_gpus_per_node": 1,
        }
        if self.prompt is not None:
            texts["prompt.jinja"] = self.prompt
            keys["data.format_prompt"] = folder / "prompt.jinja"
        if model_path is not None:
            keys["worker.actor.model.model_path"] = model_path
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        keys.update(self.keys)
        return [f"{key}={_value(value, folder)}" for key, value in keys.items()]


def _value(value: Any, folder: Path) -> str:
    if isinstance(value, (str, Path)):
        return str(value).replace("{folder}", str(folder))
    return json.dumps(value)


def batch(score: str, arguments: str = "one['response'], one['ground_truth']") -> str:
    """A batch reward file around the function `score`."""
    return _file(
        "batch", score, f"def compute_score(reward_inputs):\n    return [score({arguments}) for one in reward_inputs]\n"
    )


def sequential(score: str) -> str:
    """A reward file that scores one answer a call, around the function `score`."""
    call = (
        "def compute_score(reward_input):\n    return score(reward_input['response'], reward_input['ground_truth'])\n"
    )
    return _file("sequential", score, call)


def whole(source: str, kind: Literal["batch", "sequential"] = "batch") -> str:
    """A reward file whose `source` has `compute_score` itself."""
    return _file(kind, source, "")


def example(name: str, folder: str = "reward_function") -> str:
    return (EXAMPLES / folder / name).read_text(encoding="utf-8")


def _file(kind: str, source: str, call: str) -> str:
    head = f'import json\nimport math\nimport re\nimport time\n\nREWARD_NAME = "custom"\nREWARD_TYPE = "{kind}"\n'
    return head + "\n\n" + textwrap.dedent(source).strip() + "\n" + (f"\n\n{call}" if call else "")
