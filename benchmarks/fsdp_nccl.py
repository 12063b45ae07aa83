"""FSDP2 over NCCL with one process: the same log-probabilities and gradients as without, on tiny models in float32.

    python3 benchmarks/fsdp_nccl.py --out benchmarks/results/fsdp_nccl.json

Without a GPU it runs over gloo.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from foveal.config.schema_model import FsdpConfig
from foveal.models.loading import empty_model, load_model
from foveal.quickstart.tiny import build_tiny
from foveal.train.layout import PromptLayouts
from foveal.train.peers import spread
from foveal.train.scorer import TokenScorer
from foveal.train.scoring import Packer
from tests.random_groups import random_groups

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3")
EXACT = FsdpConfig(torch_dtype="fp32", mp_param_dtype="fp32", mp_reduce_dtype="fp32")


def passed(folder: Path, *, sharded: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of some answers, and the gradient of their sum in every weight."""
    build = empty_model if sharded else load_model
    model: Any = build(str(folder), dtype=torch.float32, device=DEVICE)
    scorer = TokenScorer(model, forbidden_ids=[201], temperature=1.0, autocast=None)
    if sharded:
        spread(scorer, str(folder), EXACT, DEVICE)
    else:
        scorer.to(DEVICE)
    packer = Packer(60, True, PromptLayouts(model, lambda prompt: prompt.features or {}), DEVICE)
    pictures = [1, 0, 2] if hasattr(model.config, "vision_config") else [0, 0, 0]
    found = []
    for pack in packer.packs(random_groups(model, pictures)):
        logprobs = scorer(pack).logprobs
        logprobs.sum().backward()
        found.append(logprobs.detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    return torch.cat(found), whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    backend = "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    record: dict[str, Any] = {"device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"}
    record |= {"torch": torch.__version__, "backend": backend}
    with tempfile.TemporaryDirectory() as root:
        for family in FAMILIES:
            folder = build_tiny(Path(root) / family, family)  # type: ignore[arg-type]
            (plain, expected), (logprobs, gradients) = (passed(folder, sharded=sharded) for sharded in (False, True))
            assert gradients.keys() == expected.keys()
            furthest = max(float((gradients[k] - e).norm() / e.norm().clamp(min=1e-12)) for k, e in expected.items())
            difference = float((logprobs - plain).abs().max())
            record[family] = {"logprobs": difference, "gradients": furthest, "weights": len(expected)}
            print(f"{family}: {json.dumps(record[family])}", flush=True)
            assert difference < 1e-4 and furthest < 1e-5, family
    dist.destroy_process_group()
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
