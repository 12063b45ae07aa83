"""An export loads with the Auto classes and equals the trained weights, cast once, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, AutoTokenizer

from foveal.cli import main
from foveal.errors import ConfigError
from foveal.quickstart.tiny import Family
from foveal.train.export import export
from tests.model_helpers import TEXT, Trained, load, same_tensors, trained


def cast(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}


def exported(run: Trained, folder: Path, **options: Any) -> Path:
    run.save(folder / "actor")
    return export(folder / "actor", **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl", "qwen3", "llama"])
def test_weights_and_logits_equal_the_trained_ones(tmp_path: Path, family: Family, tie: bool, dtype: str) -> None:
    run = trained(tmp_path / "model", family, tie=tie, dtype=dtype)
    folder = exported(run, tmp_path)
    model, expected = load(folder, "auto"), load(run.source, dtype)
    expected.load_state_dict(cast(run.model, getattr(torch, dtype)))
    assert same_tensors(model.state_dict(), expected.state_dict())
    ids = torch.arange(20, 40)[None]
    assert torch.equal(model(input_ids=ids).logits, expected(input_ids=ids).logits)
    (AutoTokenizer if family in TEXT else AutoProcessor).from_pretrained(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(tmp_path_factory.mktemp("model"), dtype="bfloat16")


def test_dtype_option_wins_over_the_source(run: Trained, tmp_path: Path) -> None:
    folder = exported(run, tmp_path, dtype="fp16", target=tmp_path / "model")
    assert same_tensors(load(folder, "auto").state_dict(), cast(run.model, torch.float16))
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"


def test_unknown_dtype_names_the_allowed_ones(run: Trained, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"int4.*bf16"):
        export(tmp_path, dtype="int4")


def test_configuration_files_are_those_of_the_source(run: Trained, tmp_path: Path) -> None:
    generation = {"eos_token_id": [258, 256], "do_sample": False, "temperature": 0.1, "top_p": 0.9}
    (run.source / "generation_config.json").write_text(json.dumps(generation))
    folder = exported(run, tmp_path)
    assert (folder / "generation_config.json").read_text() == json.dumps(generation)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "processor_config.json"):
        before, after = (run.source / name).read_text(), (folder / name).read_text()
        assert before == after if name.endswith("jinja") else json.loads(before) == json.loads(after), name


def test_a_source_without_generation_config_gets_none(tmp_path: Path) -> None:
    run = trained(tmp_path / "model")
    (run.source / "generation_config.json").unlink()
    assert not (exported(run, tmp_path) / "generation_config.json").exists()


def test_dtype_of_a_source_that_does_not_state_it_is_that_of_its_weights(tmp_path: Path) -> None:
    run = trained(tmp_path / "model", dtype="bfloat16")
    config = json.loads((run.source / "config.json").read_text())
    del config["dtype"]
    (run.source / "config.json").write_text(json.dumps(config))
    assert load(exported(run, tmp_path), "auto").dtype == torch.bfloat16


def test_dtype_of_parts_follows(tmp_path: Path) -> None:
    run = trained(tmp_path / "model")
    config = json.loads((run.source / "config.json").read_text())
    config["text_config"]["dtype"] = "float32"
    (run.source / "config.json").write_text(json.dumps(config))
    folder = exported(run, tmp_path, dtype="bf16")
    assert json.loads((folder / "config.json").read_text())["text_config"]["dtype"] == "bfloat16"


def test_a_second_export_replaces_the_first_and_leaves_other_files(run: Trained, tmp_path: Path) -> None:
    run.save(tmp_path / "actor")
    target = tmp_path / "target"
    export(tmp_path / "actor", target)
    (target / "README.md").write_text("mine")
    (target / "model-00001-of-00002.safetensors").write_text("old")
    export(tmp_path / "actor", target, dtype="fp32")
    assert load(target, "auto").dtype == torch.float32
    assert [path.name for path in target.glob("*.safetensors")] == ["model.safetensors"]
    assert (target / "README.md").read_text() == "mine"


def test_the_folder_one_is_in_can_be_written(run: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(tmp_path / "actor")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export(tmp_path / "actor", Path("."))
    assert (tmp_path / "here" / "model.safetensors").is_file()


def test_a_link_to_another_disk_can_be_written(run: Trained, tmp_path: Path) -> None:
    run.save(tmp_path / "actor")
    with TemporaryDirectory(dir="/dev/shm") as disk:
        if Path(disk).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("there is one disk only")
        (tmp_path / "target").symlink_to(disk)
        export(tmp_path / "actor", tmp_path / "target")
        assert (Path(disk) / "model.safetensors").is_file()


def test_script_runs_from_a_checkout(run: Trained, tmp_path: Path) -> None:
    run.save(tmp_path / "global_step_1" / "actor")
    script = Path(__file__).parents[1] / "scripts" / "model_merger.py"
    command = [sys.executable, "-P", str(script), "--local_dir", str(tmp_path / "global_step_1" / "actor")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "saved" in done.stdout and "global_step_1/actor/huggingface" in done.stdout
    load(tmp_path / "global_step_1" / "actor" / "huggingface", "auto")


def test_a_failed_upload_is_an_error_that_says_where_the_model_lies(
    run: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    run.save(tmp_path / "actor")
    assert main(["merge", "--local_dir", str(tmp_path / "actor"), "--hf_upload_path", "me/model"]) == 1
    error = capsys.readouterr().err
    assert "me/model: the upload failed" in error and "actor/huggingface" in error
