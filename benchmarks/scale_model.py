"""How long a training step would take on many GPUs, from what was measured on one.

    python3 benchmarks/scale_model.py --gpus 1,8,64,256

Each phase is scaled from its measurement in `benchmarks/results` by the rules below, and every number that was not
measured here is an argument of `Network` or `Work`; `scale_check.py` compares with measured runs. One step: answers are
sampled, scored (hidden behind sampling, as measured), gone through once for log-probabilities, and trained on in some
optimizer steps; then weights go to the engines.

Assumptions:
1. Prompts are spread evenly. A GPU decodes its share side by side: a decode step takes a constant part (weights read
   once, the host's and kernels' launches) and a part for each answer still open (products, its keys and values,
   sampling). The longest answer of all decides when the phase ends. Prefill is proportional to prompts.
2. The passes are proportional to tokens. Whole groups are dealt out by cost, largest first, to the rank with the
   least; the slowest rank decides. Each optimizer step ends with all.
3. Weights are fully sharded over all GPUs (FSDP2). They are gathered once for the passes without gradient and once for
   each optimizer step where they take little enough memory (`gather_weights`), else in each micro-batch's forward and
   again in its backward pass; gradients are summed once for each micro-batch. Communication hides behind computation as
   far as `overlap` of it goes; what is left adds to the phase, and so does the host's time for each module that is
   gathered or summed on its own. A node's GPUs talk over NVLink; among nodes each GPU has a share of the network, which
   carries (nodes − 1) / nodes of the bytes.
4. An optimizer step's own time is divided by the number of GPUs. The hand-over gathers all weights on each GPU and
   adds the measured seconds.
5. Groups travel through one driver: `BYTES_OF_TOKEN` for each token of an answer and its columns, pictures once in
   each direction; the driver's network decides, and none of it hides.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.real_size import SIZES
from foveal.plan.gpus import find_gpu
from foveal.plan.seconds import GATHER_SECONDS, SUM_SECONDS
from foveal.train.sharding import WHOLE_SHARE

RESULTS = Path(__file__).resolve().parent / "results"
BYTES_OF_TOKEN = 32
"""Token, log-probabilities of engine, policy and reference, advantage and return: 8 + 6 × 4 bytes."""


@dataclass(frozen=True)
class Measured:
    """One GPU's phases, as measured.

    Attributes:
        weights: of the model. units: its modules that are gathered on their own.
        answers: sampled side by side in the measured rollout, of `steps` tokens each.
        prefill_seconds: until the first token of all of them. decode_seconds: for the rest.
        constant_step: seconds of a decode step that do not depend on how many answers are open.
        old_seconds, update_seconds: for `groups` groups; the update without `optimizer_seconds` a step.
        old_groups, update_groups: in a pass.
        hand_over_seconds: wake, all weights, sleep.
    """

    name: str
    weights: float
    units: int
    answers: int
    steps: int
    prefill_seconds: float
    decode_seconds: float
    constant_step: float
    groups: int
    old_seconds: float
    update_seconds: float
    optimizer_seconds: float
    old_groups: int
    update_groups: int
    hand_over_seconds: float


@dataclass(frozen=True)
class Work:
    """A step's work.

    Attributes:
        spread: 0 for answers of `tokens` each; else lengths are uniform within (1 ± spread) × tokens.
        gather_weights: as `worker.actor.fsdp.gather_weights`.
    """

    prompts: int = 512
    n: int = 5
    tokens: int = 512
    spread: float = 0.9
    optimizer_steps: int = 4
    picture_bytes: int = 400_000
    gather_weights: str = "auto"

    def gathers_once(self, weights: float) -> bool:
        """Whether weights stay gathered for an optimizer step, on H200s."""
        fits = 2 * weights <= WHOLE_SHARE * find_gpu("h200-141").bytes
        return fits if self.gather_weights == "auto" else self.gather_weights == "step"


@dataclass(frozen=True)
class Network:
    """Bytes per second of each GPU that reach a use like ours, and how much of it hides behind computation; the host's
    seconds for each module that is gathered, and whose gradients are summed.

    NVLink of an H100 or H200 moves 450 GB/s in each direction, of which NCCL reached 244 between two H200s
    (many_gpus_3B.json); 400 Gbit/s of network for a GPU are 50 GB/s, of which about 80 % are taken to be reached.
    """

    gpus_of_node: int = 8
    nvlink: float = 240e9
    fabric: float = 40e9
    overlap: float = 0.8
    driver: float = 5e9
    unit_gather: float = GATHER_SECONDS
    unit_sum: float = SUM_SECONDS

    def gather_seconds(self, size: float, gpus: int) -> float:
        """Until each GPU has all of `size` bytes that are spread over all."""
        nodes = math.ceil(gpus / self.gpus_of_node)
        local = min(gpus, self.gpus_of_node)
        within = size * (local - 1) / local / self.nvlink
        return within + (size * (nodes - 1) / nodes / self.fabric / local if nodes > 1 else 0.0)


def measured(name: str) -> Measured:
    """From the committed results of the rollout and the training engine."""
    rollout = json.loads((RESULTS / f"vllm_rollout_{name}.json").read_text())
    engine = json.loads((RESULTS / f"train_engine_{name}.json").read_text())
    phases = next(value for key, value in engine.items() if isinstance(value, dict) and key.endswith("equal"))
    sampled, first = rollout["rollout_2"], rollout["one_token_seconds"]
    weights = engine["parameters"]
    optimizer = phases.get("optimizer_seconds", 0.7)
    optimizer_steps = 4
    return Measured(
        name,
        weights,
        units_of(name),
        answers=1280,
        steps=sampled["output_tokens"] // 1280,
        prefill_seconds=first,
        decode_seconds=sampled["generate_seconds"] - first,
        constant_step=constant_step(weights),
        groups=int(phases["groups"]),
        old_seconds=phases["seconds/old"],
        update_seconds=phases["seconds/update_actor"] - optimizer_steps * optimizer,
        optimizer_seconds=optimizer,
        old_groups=21,
        update_groups=3,
        hand_over_seconds=hand_over_seconds(name),
    )


def units_of(name: str) -> int:
    """What FSDP2 gathers on its own of a published size: layers, the vision tower, the token embedding unless it is the
    output layer, and the rest."""
    real = SIZES[name]
    return int(real.text["num_hidden_layers"] + 1 + (not real.tied) + 1)


def constant_step(weights: float) -> float:
    """Seconds of a decode step on one GPU without its answers: bf16 weights at 4 TB/s, and 2 ms of launches."""
    return 2 * weights / 4.0e12 + 2e-3


def hand_over_seconds(name: str) -> float:
    """Until an engine has new weights, and to put it to sleep, from the committed results of the rollout."""
    rollout = json.loads((RESULTS / f"vllm_rollout_{name}.json").read_text())
    return max(rollout["hand_over_ready_seconds"][1:]) + max(rollout["hand_over_sleep_seconds"])


def step_seconds(one: Measured, work: Work, network: Network, gpus: int, seed: int = 0) -> dict[str, float]:
    """Seconds of each phase, and of the whole `step`."""
    lengths = _lengths(work, seed)
    found = {
        "rollout": _rollout(one, work, lengths, gpus),
        "old": _passes(one.old_seconds, one, work, lengths, gpus, network, update=False),
        "update": _passes(one.update_seconds, one, work, lengths, gpus, network, update=True)
        + work.optimizer_steps * one.optimizer_seconds / gpus,
        "hand over": one.hand_over_seconds + network.gather_seconds(2 * one.weights, gpus),
        "driver": (BYTES_OF_TOKEN * float(lengths.sum()) + 2 * work.prompts * work.picture_bytes) / network.driver
        if gpus > 1
        else 0.0,
    }
    return found | {"step": sum(found.values())}


def _lengths(work: Work, seed: int) -> np.ndarray:
    """(prompts, n) tokens of each answer."""
    low, high = (1 - work.spread) * work.tokens, (1 + work.spread) * work.tokens
    return np.random.default_rng(seed).uniform(low, high, (work.prompts, work.n)).round()


def _rollout(one: Measured, work: Work, lengths: np.ndarray, gpus: int) -> float:
    for_each = (one.decode_seconds / one.steps - one.constant_step) / one.answers
    prefill = one.prefill_seconds / one.answers * work.prompts * work.n / gpus
    longest = 0.0
    for share in np.array_split(lengths, gpus):
        if share.size:
            longest = max(longest, share.max() * one.constant_step + share.sum() * for_each)
    return prefill + longest


def _passes(
    seconds: float,
    one: Measured,
    work: Work,
    lengths: np.ndarray,
    gpus: int,
    network: Network,
    *,
    update: bool,
) -> float:
    prompt = 560  # tokens, of the measured groups
    of_token = seconds / one.groups / (prompt + work.n * one.steps)
    total = 0.0
    batches = np.array_split(lengths, work.optimizer_steps if update else 1)
    for batch in batches:
        costs = np.sort(prompt + batch.sum(1))[::-1]
        loads, counts = np.zeros(gpus), np.zeros(gpus, int)
        for cost in costs:
            rank = int(loads.argmin())
            loads[rank] += cost
            counts[rank] += 1
        computing = float(loads.max()) * of_token
        total += computing
        if gpus == 1:
            continue
        micro_batches = math.ceil(counts.max() / (one.update_groups if update else one.old_groups))
        gathers = 1 if work.gathers_once(one.weights) else micro_batches * (1 + update)
        sums = micro_batches * update
        talking = (gathers + 2 * sums) * network.gather_seconds(2 * one.weights, gpus)  # gradients in float32
        total += max((1 - network.overlap) * talking, talking - computing)
        total += one.units * (gathers * network.unit_gather + sums * network.unit_sum)
    return total


def table(one: Measured, work: Work, network: Network, counts: list[int]) -> list[dict[str, Any]]:
    alone = step_seconds(one, work, network, 1)["step"]
    rows = []
    for gpus in counts:
        seconds = step_seconds(one, work, network, gpus)
        tokens = work.prompts * 560 + float(_lengths(work, 0).sum())
        rows.append(
            {"model": one.name, "gpus": gpus, "prompts": work.prompts}
            | {name: round(value, 2) for name, value in seconds.items()}
            | {"efficiency": round(alone / seconds["step"] / gpus, 3)}
            | {"tokens_per_s_per_gpu": round(tokens / seconds["step"] / gpus)}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="7B")
    parser.add_argument("--gpus", default="1,8,64,256")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    counts = [int(count) for count in options.gpus.split(",")]
    rows = []
    for name in options.models.split(","):
        for work in (Work(prompts=options.prompts), replace(Work(), prompts=max(counts) * options.prompts // 8)):
            rows += table(measured(name), work, Network(), counts)
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
