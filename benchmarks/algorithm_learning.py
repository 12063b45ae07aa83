"""Does each algorithm learn? Every one on the quick start's task, from the same warm models, with curves.

    python3 benchmarks/algorithm_learning.py --out benchmarks/results/algorithms.json --curves docs/algorithms.png

For each algorithm: held-out accuracy (greedy, 256 pictures) before and after 60 steps through the ordinary trainer, for
seeds 1, 2, 3 in turn; the third seed only where one of the first two rose by less than 0.15. `--share 0/2` takes every
second algorithm, so that two cores can work side by side; results are merged into the file that is there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from foveal.quickstart.run import Folders, accuracies, prepare, train_arguments

STEPS = 60
ENOUGH = 0.15
TWO_STEPS = "worker.actor.global_batch_size=32"
"""Two optimizer steps a batch, so that ratio and clipping have something to do."""

ALGORITHMS: dict[str, list[str]] = {
    "grpo": [],
    "dr_grpo": ["algorithm.adv_estimator=dr_grpo", "worker.actor.loss_avg_mode=seq_sum_norm"],
    "grpo_passk": ["algorithm.adv_estimator=grpo_passk"],
    "rloo": ["algorithm.adv_estimator=rloo"],
    "reinforce_plus_plus": ["algorithm.adv_estimator=reinforce_plus_plus"],
    "reinforce_plus_plus_baseline": ["algorithm.adv_estimator=reinforce_plus_plus_baseline"],
    "remax": ["algorithm.adv_estimator=remax"],
    "opo": ["algorithm.adv_estimator=opo"],
    "maxrl": ["algorithm.adv_estimator=maxrl"],
    "gdpo": ["algorithm.adv_estimator=gdpo", "algorithm.reward_parts={accuracy: 0.9, format: 0.1}"],
    "gae (PPO)": [
        "algorithm.adv_estimator=gae",
        "worker.critic.global_batch_size=64",
        "worker.critic.optim.lr=1.0e-3",
        "trainer.critic_warmup=5",
    ],
    "PPO clip, two steps": [TWO_STEPS],
    "gspo": [
        TWO_STEPS,
        "worker.actor.loss_type=gspo_token",
        "worker.actor.loss_avg_mode=seq",
        "worker.actor.clip_ratio_low=0.1",
        "worker.actor.clip_ratio_high=0.1",
    ],
    "cispo": [
        TWO_STEPS,
        "worker.actor.loss_type=cispo",
        "worker.actor.clip_ratio_low=1",
        "worker.actor.clip_ratio_high=4",
    ],
    "sapo": [TWO_STEPS, "worker.actor.loss_type=sapo"],
    "policy_gradient": ["worker.actor.loss_type=policy_gradient"],
    "dapo": [
        TWO_STEPS,
        "algorithm.online_filtering=true",
        "algorithm.filter_key=accuracy",
        "worker.actor.clip_ratio_high=0.28",
        "worker.reward.overlong_buffer=4",
    ],
}


def learn(name: str, seed: int, warm: Folders, run: Path) -> dict[int, float]:
    """Accuracy by step of one run, made in a process of its own."""
    command = [sys.executable, "-m", "foveal", "train", *train_arguments(warm, seed), *ALGORITHMS[name]]
    command += [f"trainer.max_steps={STEPS}", "trainer.val_freq=15", f"trainer.save_checkpoint_path={run}"]
    command += ["trainer.save_model_only=true"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return accuracies(run)


def rise(curve: dict[str, float]) -> float:
    steps = sorted(curve, key=int)
    return curve[steps[-1]] - curve[steps[0]]


def measure(name: str, warm: dict[int, Folders], root: Path) -> dict[str, dict[str, float]]:
    """Curves by seed."""
    curves: dict[str, dict[str, float]] = {}
    for seed, folders in warm.items():
        if sum(rise(curve) >= ENOUGH for curve in curves.values()) >= 2:
            break
        found = learn(name, seed, folders, root / f"{name.replace(' ', '_')}_{seed}")
        curves[str(seed)] = {str(step): accuracy for step, accuracy in found.items()}
        print(f"{name}, seed {seed}: {' '.join(f'{a:.2f}' for a in found.values())}", flush=True)
    return curves


def draw(results: dict[str, Any], out: Path) -> None:
    """One small panel an algorithm, one line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = 6
    rows = -(-len(results) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(14, 2.3 * rows), sharex=True, sharey=True, squeeze=False)
    for axis in axes.flat[len(results) :]:
        axis.axis("off")
    for axis, (name, curves) in zip(axes.flat, results.items(), strict=False):
        for curve in curves.values():
            steps = sorted(map(int, curve))
            axis.plot(steps, [curve[str(s)] for s in steps], marker="o", markersize=3)
        axis.set_title(name, fontsize=9)
        axis.set_ylim(0.3, 1.02)
        axis.grid(alpha=0.3)
    figure.supxlabel("step")
    figure.supylabel("held-out accuracy")
    figure.tight_layout()
    figure.savefig(out, dpi=80)


def table(results: dict[str, Any]) -> str:
    """Markdown: accuracy before → after, for each seed."""
    lines = ["| algorithm | seed 1 | seed 2 | seed 3 |", "|---|---|---|---|"]
    for name, curves in results.items():
        cells = []
        for seed in ("1", "2", "3"):
            curve = curves.get(seed)
            steps = sorted(curve, key=int) if curve else []
            cells.append(f"{curve[steps[0]]:.2f} → {curve[steps[-1]]:.2f}" if curve else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/algorithms.json"))
    parser.add_argument("--curves", type=Path, help="picture of the curves")
    parser.add_argument("--share", default="0/1", help="K/N: every N-th algorithm, starting with the K-th")
    parser.add_argument("--only", nargs="*", help="names of algorithms")
    parser.add_argument("--keep", type=Path, help="folder for models and runs (default: a temporary one)")
    options = parser.parse_args()
    first, count = map(int, options.share.split("/"))
    names = options.only if options.only is not None else list(ALGORITHMS)[first::count]
    with tempfile.TemporaryDirectory() as temporary:
        root = options.keep or Path(temporary)
        warm = {seed: Folders(root / f"warm{seed}") for seed in (1, 2, 3)}
        for seed, folders in warm.items():
            if names and not (folders.warm / "config.json").exists():
                prepare(folders, seed)
        for name in names:
            curves = measure(name, warm, root)
            known = json.loads(options.out.read_text()) if options.out.exists() else {}
            known[name] = curves
            ordered = {key: known[key] for key in ALGORITHMS if key in known}
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(ordered, indent=1) + "\n")
    results = json.loads(options.out.read_text())
    print(table(results))
    if options.curves:
        draw(results, options.curves)


if __name__ == "__main__":
    main()
