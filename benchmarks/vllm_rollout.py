"""The vLLM engine at real model sizes with random weights: sampling speed, hand-over of weights, memory, profiles.

    python3 benchmarks/vllm_rollout.py --models 3B,7B,4B,30B-A3B
    python3 benchmarks/vllm_rollout.py --models 3B --profile --torch-profile 16 --set worker.rollout.seed=2

Each prompt holds a 448×672 picture and is 560 tokens long. Several models run one after the other, each in a process of
its own. Prints a line per measurement and writes `vllm_rollout_MODEL.json` (after each measurement, so that an
interrupted run leaves what it has), and with the profile options `vllm_rollout_MODEL_host.txt` and `_kernels.txt`.
`--tiny --prompts 4 --n 2 --tokens 24` tries the script out on a CPU, with two layers in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engine_profiles import host_profile, kernel_profile
from benchmarks.real_size import CHAT_TOKENS, SIZES, build_model, models_asked_for, picture_rows, random_module
from foveal.config import Config, load_config
from foveal.data.loader import THREADS, PromptLoader, open_loader
from foveal.models.loading import DTYPES
from foveal.models.named_tensors import named_tensors
from foveal.preflight import open_processing
from foveal.rollout.collect import training_sampling
from foveal.rollout.engine import RolloutEngine
from foveal.rollout.vllm_engine import VllmEngine
from foveal.types import Group, Prompt, Sampling

HEIGHT, WIDTH = 448, 672
PROMPT_TOKENS = 560
WARM_PROMPTS = 16
GIB = 2**30
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Result = TypeVar("Result")
Buckets: TypeAlias = Iterator[list[tuple[str, torch.Tensor]]]
NO_ROOM_FOR_TRAINER = ("30B-A3B",)
"""Models whose weights do not fit twice on one device, so that the engine gets tensors made on the way."""


class Record:
    """The numbers of one model: printed and written as they come."""

    def __init__(self, out: Path, size: str) -> None:
        self.stem = out / f"vllm_rollout_{size}"
        self.values: dict[str, Any] = {
            "command": " ".join(sys.argv),
            "model": SIZES[size].name,
            "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
            "cpus": os.cpu_count(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__}
            | {"transformers": transformers.__version__},
        }
        out.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, value: Any) -> None:
        self.values[name] = value
        print(f"{self.values['model']} {name}: {value}", flush=True)
        self.stem.with_suffix(".json").write_text(json.dumps(self.values, indent=1) + "\n")

    def add_text(self, kind: str, text: str) -> None:
        path = self.stem.with_name(f"{self.stem.name}_{kind}.txt")
        path.write_text(text)
        print(f"{self.values['model']} {kind}: {path}\n{text[:6000]}", flush=True)


def timed(work: Callable[..., Result], *arguments: Any) -> tuple[Result, float]:
    """What `work` returns and the seconds that it takes, the device's part included."""
    started = time.perf_counter()
    result = work(*arguments)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return result, round(time.perf_counter() - started, 3)


def used_gib() -> float:
    """Memory of the device that is taken, by whomever; 0 without one."""
    if DEVICE.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / GIB, 2)


def settings(options: argparse.Namespace, folder: Path, rows: Path) -> Config:
    values = {
        "data.train_files": rows,
        "data.image_dir": rows.parent,
        "data.prompt_key": "problem",
        "data.max_prompt_length": 1024,
        "data.max_response_length": options.tokens,
        "data.rollout_batch_size": options.prompts,
        "worker.actor.global_batch_size": options.prompts,
        "worker.actor.model.model_path": folder,
        "worker.rollout.name": "vllm",
        "worker.rollout.n": options.n,
        "worker.rollout.ignore_eos": "true",
        "worker.rollout.tensor_parallel_size": 1,
        "worker.rollout.gpu_memory_utilization": 0.85,
        "trainer.n_gpus_per_node": 1,
    }
    if options.tiny:
        values |= {"worker.rollout.dtype": "fp32", "worker.rollout.enforce_eager": "true"}
    return load_config([*(f"{key}={value}" for key, value in values.items()), *options.set])


def check(groups: list[Group], sampling: Sampling, forbidden: list[int]) -> None:
    answers = [response for group in groups for response in group.responses]
    assert all(len(group.responses) == sampling.n for group in groups)
    assert all(len(r.token_ids) == len(r.logprobs) == sampling.max_tokens for r in answers), "an answer is too short"
    assert all(np.isfinite(r.logprobs).all() for r in answers), "a log-probability is not finite"
    assert not any(np.isin(r.token_ids, forbidden).any() for r in answers), "a vision id was sampled"
    assert len({r.token_ids.tobytes() for r in answers}) == len(answers), "two answers are the same"


def trainer_weights(size: str, folder: Path, dtype: torch.dtype) -> Callable[[], Buckets]:
    """Gives the weights of a trainer's module, which stays on the device as it does in a run, as often as called.

    Where there is no room for the module the tensors are made one by one.
    """
    if size not in NO_ROOM_FOR_TRAINER:
        return partial(named_tensors, random_module(folder, DEVICE, dtype), dtype=dtype)
    shapes = random_module(folder, torch.device("meta"), dtype)

    def make(shape: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty_like(shape, device=DEVICE)
        return tensor.normal_(std=0.02) if tensor.dim() > 1 else tensor.fill_(1.0)

    def weights() -> Buckets:
        for bucket in named_tensors(shapes, dtype=dtype):
            yield [(name, make(shape)) for name, shape in bucket]

    return weights


def hand_over(
    engine: RolloutEngine, weights: Callable[[], Buckets], sample: Callable[[], list[Group]], record: Record
) -> float:
    """Wakes the engine, moves the weights into it, and puts it to sleep again, three times; it ends awake.

    Returns:
        GiB of the device that were taken while it slept for the last time.
    """
    used = 0.0
    times: dict[str, list[float]] = defaultdict(list)
    for turn in range(4):
        _, wake = timed(engine.wake)
        _, update = timed(lambda: engine.update_weights(weights(), 0))
        for name, took in (("wake", wake), ("update", update), ("ready", wake + update)):
            times[name].append(round(took, 3))
        times["first_answers"].append(timed(sample)[1])
        if turn < 3:
            times["sleep"].append(timed(engine.sleep)[1])
            used = used_gib()
    for name, values in times.items():
        record.add(f"hand_over_{name}_seconds", values)
    return used


def rollouts(engine: RolloutEngine, loader: PromptLoader, config: Config, record: Record) -> list[Prompt]:
    """Samples two batches; each has pictures that the engine has not seen. Returns the last batch's prompts."""
    prompts: list[Prompt] = []
    for turn in range(2):
        prompts, pictures = timed(loader.take, config.data.rollout_batch_size)
        sampling = training_sampling(config).with_seed(turn)
        groups, took = timed(engine.generate, prompts, sampling, 0)
        check(groups, sampling, loader.builder.processing.forbidden_ids)
        tokens = sum(len(response.token_ids) for group in groups for response in group.responses)
        run = {
            "prompt_tokens": float(np.mean([len(prompt.expanded_ids) for prompt in prompts])),
            "output_tokens": tokens,
            "pictures_seconds": pictures,
            "generate_seconds": took,
            "tokens_per_second": round(tokens / took),
            "tokens_per_second_with_pictures": round(tokens / (took + pictures)),
            "mean_logprob": float(np.mean([r.logprobs.mean() for group in groups for r in group.responses])),
        }
        record.add(f"rollout_{turn + 1}", run)
    return prompts


def measure(size: str, options: argparse.Namespace, root: Path) -> None:
    record = Record(options.out, size)
    folder = build_model(root / "model", size, layers=2 if options.tiny else None, weights=False)
    config = settings(options, folder, root / "rows" / "rows.jsonl")
    rollout = config.worker.rollout.model_dump()
    record.add("settings", {key: rollout[key] for key in ("dtype", "gpu_memory_utilization", "max_num_batched_tokens")})
    processing = open_processing(config)
    few = min(WARM_PROMPTS, options.prompts)
    characters = PROMPT_TOKENS - CHAT_TOKENS - processing.visual_tokens((HEIGHT, WIDTH))
    count = few + 2 * options.prompts
    picture_rows(root / "rows", count, width=WIDTH, height=HEIGHT, characters=characters)
    loader = open_loader(config, processing, "train")
    warm = loader.take(few)
    sampling = training_sampling(config)

    before = used_gib()
    build = partial(VllmEngine, model_path=str(folder), device=DEVICE, images=1)
    engine, start_up = timed(build, config, processing)
    record.add("vllm", sys.modules["vllm"].__version__)
    record.add("start_up_seconds", start_up)
    record.add("engine_gib", round(used_gib() - before, 2))
    record.add("first_sleep_seconds", timed(engine.sleep)[1])
    asleep = used_gib()
    record.add("asleep_gib", round(asleep - before, 2))
    weights = trainer_weights(size, folder, DTYPES[config.worker.rollout.dtype])
    torch.cuda.empty_cache()
    trainer = used_gib() - asleep
    record.add("trainer_gib", round(trainer, 2))
    sample = partial(engine.generate, warm, replace(sampling, max_tokens=16), 0)
    used = hand_over(engine, weights, sample, record)
    record.add("asleep_gib_after_use", round(used - before - trainer, 2))

    record.add("picture_threads", THREADS)
    prompts = rollouts(engine, loader, config, record)
    engine.update_weights(weights(), 0)  # forgets prompts and pictures
    record.add("one_token_seconds", timed(engine.generate, prompts, replace(sampling, max_tokens=1), 0)[1])
    record.add("used_gib_awake", used_gib())
    if options.profile:
        engine.update_weights(weights(), 0)  # forgets prompts and pictures, so that they are computed again
        record.add_text("host", host_profile(engine, prompts, replace(sampling, max_tokens=min(128, options.tokens))))
    if options.torch_profile:
        record.add_text("kernels", kernel_profile(engine, prompts, sampling, options.torch_profile))
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="3B", help=f"comma-separated, of {', '.join(SIZES)}")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--n", type=int, default=5, help="answers to each prompt")
    parser.add_argument("--tokens", type=int, default=512, help="length of each answer")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results")))
    parser.add_argument("--tiny", action="store_true", help="two layers, a small vocabulary, float32")
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="configuration")
    parser.add_argument("--profile", action="store_true", help="cProfile of the main thread")
    parser.add_argument("--torch-profile", type=int, default=0, metavar="STEPS", help="kernels of so many decode steps")
    options = parser.parse_args()
    if options.torch_profile and options.tokens <= options.torch_profile + 16:
        parser.error("--torch-profile: STEPS + 16 must be fewer than --tokens")
    size = models_asked_for(parser, options.models)
    with tempfile.TemporaryDirectory() as temporary:
        measure(size, options, Path(temporary))


if __name__ == "__main__":
    main()
