"""The CUDA path of the ordinary trainer, at the size of Qwen2.5-VL-3B with random weights, for some steps.

    python3 benchmarks/cuda_smoke.py --out benchmarks/results/cuda_smoke.json

First the packed kernel is compared with the plain forward on tiny models (bf16 against float32), then `foveal train`
runs `--steps` steps, by default with the transformers engine, saves and merges; the gap between engine and trainer in
each step is printed.
`--layers 2` and a small `--pixels` try the script out without a GPU. KEY=VALUE arguments go to `foveal train`: with
`worker.actor.fsdp.mp_param_dtype=fp32` the gap between engine and trainer shows what of it is bf16 rounding.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.real_size import build_model, picture_rows
from foveal.cli import main as foveal
from foveal.models.loading import load_model
from foveal.quickstart.tiny import build_tiny
from foveal.train.layout import PromptLayouts
from foveal.train.packing import build_pack, split_into_packs
from foveal.train.scorer import TokenScorer
from tests.random_groups import random_groups

REWARD = """
REWARD_TYPE = "batch"


def score(rows):
    # Random weights write noise: reward short words, so that answers of a group differ.
    return [{"overall": float(sum(map(ord, r["response"])) % 7) / 7} for r in rows]
"""


def kernel_agreement(root: Path, device: torch.device) -> dict[str, float]:
    """Largest and mean difference of log-probabilities: packed 16-bit kernel with shared prompts, against float32."""
    found: dict[str, float] = {}
    for family in ("qwen2_5_vl", "qwen3_vl"):
        folder = build_tiny(root / family, family)  # type: ignore[arg-type]
        logprobs = {}
        for name, dtype, autocast in (("fp32", torch.float32, None), ("bf16", torch.float32, torch.bfloat16)):
            model: Any = load_model(str(folder), dtype=dtype, device=device)
            groups = random_groups(model, [1, 0, 2], longest=40)
            scorer = TokenScorer(model, forbidden_ids=[201], temperature=1.0, autocast=autocast).to(device)
            (parts,) = split_into_packs(groups, 10**6, True)
            pack = build_pack(
                parts,
                layouts=PromptLayouts(model, lambda p: p.features or {}),
                shared_prefix=True,
                device=device,
            )
            out = scorer(pack).logprobs
            out.sum().backward()
            logprobs[name] = out.detach()
            assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        gap = (logprobs["fp32"] - logprobs["bf16"]).abs()
        found[f"{family}/max"], found[f"{family}/mean"] = float(gap.max()), float(gap.mean())
    return found


def train(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    model = build_model(root / "model", "3B", layers=options.layers)
    rows = picture_rows(
        root / "rows", options.prompts * options.steps, width=options.pixels[0], height=options.pixels[1]
    )
    built = time.perf_counter() - started
    (root / "reward.py").write_text(REWARD)
    run = root / "run"
    parity = None
    check = [sys.executable, "-m", "foveal", "check", "--parity", "--rows", "16"]  # a process of its own: memory
    if options.parity:
        parity = subprocess.run([*check, *settings(root, model, rows, options)], check=False).returncode
        print(f"parity check: exit status {parity}")
    status = foveal(["train", *settings(root, model, rows, options)])
    assert status == 0, status
    log = [json.loads(line) for line in (run / "experiment_log.jsonl").read_text().splitlines()]
    gaps = [step["rollout"]["logprob_gap"]["mean"] for step in log if "rollout" in step]
    print("mean gap between engine and trainer by step:", ", ".join(f"{gap:.4f}" for gap in gaps))
    result: dict[str, Any] = {"seconds_to_build": built, "parity_status": parity, "gaps": gaps, "log": log}
    before = time.perf_counter()
    assert foveal(["merge", "--local_dir", str(run / f"global_step_{options.steps}" / "actor")]) == 0
    result["seconds_to_merge"] = time.perf_counter() - before
    return result


def settings(root: Path, model: Path, rows: Path, options: argparse.Namespace) -> list[str]:
    return [
        f"data.train_files={rows}",
        f"data.val_files={rows}@train",
        f"data.image_dir={rows.parent}",
        "data.prompt_key=problem",
        f"data.max_response_length={options.response}",
        "data.max_prompt_length=1024",
        f"data.rollout_batch_size={options.prompts}",
        f"worker.actor.global_batch_size={options.prompts}",
        "data.min_pixels=3136",
        f"worker.actor.model.model_path={model}",
        "worker.actor.micro_batch_size_per_device_for_update=8",
        "worker.actor.micro_batch_size_per_device_for_experience=16",
        "worker.rollout.n=5",
        "worker.rollout.ignore_eos=true",
        f"worker.reward.reward_function={root / 'reward.py'}:score",
        "algorithm.use_kl_loss=true",
        "algorithm.kl_penalty=low_var_kl",
        f"trainer.max_steps={options.steps}",
        "trainer.n_gpus_per_node=1",
        "trainer.save_model_only=true",
        "trainer.val_before_train=false",
        "trainer.logger=[console]",
        f"trainer.save_checkpoint_path={root / 'run'}",
        *options.overrides,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--parity", action="store_true", help="compare engine and trainer first")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--response", type=int, default=128)
    parser.add_argument("--pixels", type=int, nargs=2, default=(672, 448))
    options, options.overrides = parser.parse_known_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        result["kernel_agreement"] = kernel_agreement(root, device)
        print("kernel agreement:", result["kernel_agreement"])
        result |= train(root, options)
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
