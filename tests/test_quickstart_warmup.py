from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from foveal.config import Config, load_config
from foveal.data.processing import Processing, load_processing
from foveal.data.prompts import PromptBuilder
from foveal.data.source import load_rows
from foveal.errors import DataError
from foveal.quickstart import warmup
from foveal.quickstart.task import make_rows, write_rows
from foveal.quickstart.tiny import build_tiny
from foveal.quickstart.warmup import Recipe, greedy_accuracy, make_batch, warm_up
from foveal.types import Prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model"), "qwen3_vl")


def _config(folder: Path, rows: int) -> Config:
    path = write_rows(make_rows("warmup", rows, seed=1), folder / "rows.parquet")
    return load_config(
        [
            f"data.train_files={path}",
            "data.prompt_key=problem",
            "data.min_pixels=9216",
            "data.max_pixels=9216",
            "worker.rollout.n=2",
        ]
    )


def _prompts(folder: Path, model: Path, rows: int) -> tuple[list[Prompt], Processing]:
    config = _config(folder, rows)
    processing = load_processing(
        str(model), tokenizer_path=None, trust_remote_code=False, min_pixels=9216, max_pixels=9216, chat_template=None
    )
    assert config.data.train_files
    builder = PromptBuilder(config.data, processing, load_rows(config.data.train_files))
    return [builder.build(row, str(row)) for row in range(rows)], processing


def test_only_the_answer_and_its_end_are_learned(tmp_path: Path, model: Path) -> None:
    prompts, processing = _prompts(tmp_path, model, 4)
    batch = make_batch(prompts, processing)
    learned = [batch.inputs["input_ids"][row][batch.answer[row]].tolist() for row in range(4)]
    assert [processing.tokenizer.decode(ids) for ids in learned] == [f"{p.answer}<|im_end|>" for p in prompts]


def test_accuracy_is_that_of_greedy_decoding(tmp_path: Path, model: Path) -> None:
    prompts, processing = _prompts(tmp_path, model, 4)
    network = AutoModelForImageTextToText.from_pretrained(model)
    batch = make_batch(prompts, processing)
    assert greedy_accuracy(network, batch) == 0.0
    for row in (0, 2):  # half of the answers become what greedy decoding writes
        count = int(batch.answer[row].sum())
        ids = torch.tensor([prompts[row].expanded_ids])
        written = network.generate(
            input_ids=ids,
            mm_token_type_ids=ids.eq(processing.image_token_id or -1).long(),
            **processing.features(prompts[row]),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
        )
        batch.inputs["input_ids"][row, batch.answer[row]] = written[0, -count:]
    assert greedy_accuracy(network, batch) == 0.5


def test_supervised_steps_lower_the_loss_and_save_a_whole_folder(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warmup, "CHECK_ROWS", 4)
    warm_up(_config(tmp_path, 40), model, tmp_path / "warm", Recipe(max_steps=20, batch=4))
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0] - 2
    AutoModelForImageTextToText.from_pretrained(tmp_path / "warm")
    load_processing(
        str(tmp_path / "warm"),
        tokenizer_path=None,
        trust_remote_code=False,
        min_pixels=None,
        max_pixels=None,
        chat_template=None,
    )


def test_training_stops_at_the_target(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warmup, "CHECK_ROWS", 4)
    warm_up(_config(tmp_path, 40), model, tmp_path / "warm", Recipe(target=0.0, max_steps=20, batch=4))
    assert "step 5:" in (printed := capsys.readouterr().out) and "step 10:" not in printed


def test_too_few_rows_say_how_many_are_needed(tmp_path: Path, model: Path) -> None:
    with pytest.raises(DataError, match=r"has 40 rows; the warm-up needs 288 or more"):
        warm_up(_config(tmp_path, 40), model, tmp_path / "warm", Recipe())
