"""How far the scaling model is from measured steps of several GPUs: a record of `many_gpus.py`, predicted.

    python3 benchmarks/scale_check.py benchmarks/results/many_gpus_3B.json

The phases of the record's first side with one GPU and its measured network go into `scale_model.py`, whose assumptions
hold, and the other sides come out. Further ones:
1. A rollout on one GPU is the hand-over of the weights, seconds for each token of an answer's length (`constant`), and
   seconds for each answer (prefill included). A second side with one GPU and fewer prompts tells the two apart;
   without one, a decode step's constant part is bf16 weights read at 4 TB/s and 2 ms of launches. The hand-over is that
   of `vllm_rollout_MODEL.json`.
2. With tensor parallelism the GPUs of an engine divide the weights that are read and `DIVIDED` of what each answer
   takes (products, keys and values), but neither launches nor the rest (sampling, the host). Each layer sums hidden
   states twice, which takes `SUM_LATENCY` and the bytes' time, and hides behind nothing.
3. One step ahead, engines sample on GPUs of their own while the others train: the slower of sampling (with rewards) and
   training (with what a step does besides its phases) decides. The hand-over comes on top: weights are gathered, sent
   whole to the engines, and loaded.
4. Rewards, credit and what a step does besides its phases take as long as on one GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.real_size import SIZES
from benchmarks.scale_model import Measured, Network, Work, constant_step, hand_over_seconds, step_seconds, units_of

DIVIDED = 0.8
SUM_LATENCY = 20e-6
ALLOWED = 0.15
"""How far a prediction may be off, where it takes more than a hundredth of the step."""
PHASES = {"gen": "gen", "reward": "reward", "old": "old", "update_actor": "update", "step": "step"}
OTHERS = ("reward", "adv")
Seconds = dict[str, float]


def bases(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The sides with one GPU that were measured; the one with most prompts, and one with fewer, if there is any."""
    alone = [side for side in record["sides"].values() if side.get("gpus") == 1 and side["medians"]]
    if not alone:
        raise SystemExit("no side with one GPU, from which the others could be predicted")
    fewer = [side for side in alone if side["prompts"] < alone[0]["prompts"]]
    return [alone[0], *fewer[:1]]


def measured_in(record: dict[str, Any]) -> Measured:
    """What the record says of one GPU, for the scaling model."""
    one, *fewer = bases(record)
    seconds, tokens = one["medians"], record["response_tokens"]
    hand_over = hand_over_seconds(record["model"])
    constant = constant_step(record["parameters"])
    if fewer:
        of_prompt = (seconds["gen"] - fewer[0]["medians"]["gen"]) / (one["prompts"] - fewer[0]["prompts"])
        constant = max(0.0, seconds["gen"] - hand_over - of_prompt * one["prompts"]) / tokens
    of_group = record["prompt_tokens"] + record["n"] * tokens
    update_groups = max(1, one.get("pass_tokens", 3 * of_group) // of_group)
    # `auto` finds room for about seven times as many tokens without gradient.
    fixed = any(re.match(r"worker\.actor\.token_budget=\d", text) for text in [*record["settings"], *one["settings"]])
    return Measured(
        record["model"],
        record["parameters"],
        units_of(record["model"]),
        answers=one["prompts"] * record["n"],
        steps=tokens,
        prefill_seconds=0.0,
        decode_seconds=seconds["gen"] - hand_over,
        constant_step=constant,
        groups=one["prompts"],
        old_seconds=seconds["old"],
        update_seconds=seconds["update_actor"],
        optimizer_seconds=0.0,  # in the update, and divided among the GPUs as it is
        old_groups=update_groups if fixed else 7 * update_groups,
        update_groups=update_groups,
        hand_over_seconds=hand_over,
    )


def predicted(record: dict[str, Any], side: dict[str, Any]) -> Seconds:
    """Seconds of a side's phases and of its step."""
    one, base = measured_in(record), bases(record)[0]["medians"]
    work = Work(side["prompts"], record["n"], record["response_tokens"], 0.0, round(side["optimizer_steps"]))
    work = replace(work, gather_weights=gathering(record, side))
    engines = side["engine_gpus"] or side["gpus"]
    trainers = side["gpus"] - side["engine_gpus"]
    network = network_of(record)
    sampling = step_seconds(in_teams(one, record, side, network), work, network, engines // side["tensor_parallel"])
    training = step_seconds(one, work, network, trainers)
    rest = base["step"] - sum(base.get(name, 0.0) for name in ("gen", "reward", "old", "adv", "update_actor"))
    driver = step_seconds(one, work, network, side["gpus"])["driver"]
    found = {"gen": sampling["rollout"], "old": training["old"], "update": training["update"]}
    found |= {name: base.get(name, 0.0) for name in OTHERS}
    hand_over = training["hand over"]
    if not side["engine_gpus"]:
        found["gen"] += hand_over  # which is timed in it
        return found | {"step": sum(found.values()) + rest + driver}
    engine, trainer = found["gen"] + found["reward"], found["old"] + found["adv"] + found["update"] + rest
    hand_over += 2 * one.weights / network.nvlink
    both = max(engine, trainer) if side["ahead"] else engine + trainer
    return found | {"hand over": hand_over, "step": both + hand_over + driver}


def gathering(record: dict[str, Any], side: dict[str, Any]) -> str:
    """The `gather_weights` of a side; a record that is older than the setting says itself how it was done."""
    found = re.findall(r"actor\.fsdp\.gather_weights=(\w+)", " ".join([*record["settings"], *side["settings"]]))
    return found[-1] if found else record.get("gather_weights", "auto")


def network_of(record: dict[str, Any]) -> Network:
    """The measured one, or the scaling model's where none was."""
    rate = record.get("network", {}).get("all_gather")
    return Network(nvlink=rate) if rate else Network()


def in_teams(one: Measured, record: dict[str, Any], side: dict[str, Any], network: Network) -> Measured:
    """What one engine of `tensor_parallel` GPUs would have measured in the place of one GPU."""
    size = side["tensor_parallel"]
    if size == 1:
        return one
    text = SIZES[record["model"]].text
    sums = 2 * text["num_hidden_layers"]
    of_token = sums * 2 * text["hidden_size"] * 2 * (size - 1) / size  # bytes of bf16, sent and received
    tokens = one.groups * record["prompt_tokens"] + one.answers * one.steps
    answers = one.decode_seconds - one.steps * one.constant_step
    answers = answers * (DIVIDED / size + 1 - DIVIDED) + tokens * of_token / network.nvlink
    reading = min(one.constant_step, constant_step(one.weights) - constant_step(0))
    constant = one.constant_step - reading * (1 - 1 / size) + sums * SUM_LATENCY
    return replace(one, decode_seconds=answers + one.steps * constant, constant_step=constant)


def compared(record: dict[str, Any]) -> list[dict[str, Any]]:
    """For each side but those that it is predicted from, and each phase: seconds predicted, measured, and by how much
    the prediction is off."""
    known = [id(side) for side in bases(record)]
    rows = []
    for name, side in record["sides"].items():
        if not side["medians"] or id(side) in known:
            continue
        found = predicted(record, side)
        for phase, short in PHASES.items():
            seconds = side["medians"][phase]
            rows.append({"side": name, "phase": phase, "predicted": found[short], "measured": seconds})
            rows[-1] |= {"off": found[short] / seconds - 1, "counts": seconds > 0.01 * side["medians"]["step"]}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path)
    options = parser.parse_args()
    for path in options.records:
        print(path.name)
        for row in compared(json.loads(path.read_text())):
            mark = f"  more than {ALLOWED:.0%}" if abs(row["off"]) > ALLOWED and row["counts"] else ""
            times = f"predicted {row['predicted']:8.2f} s  measured {row['measured']:8.2f} s"
            print(f"{row['side']:>12}  {row['phase']:<12}  {times}  {row['off']:+.0%}{mark}")


if __name__ == "__main__":
    main()
