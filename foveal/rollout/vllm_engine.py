"""Sampling with vLLM, in the trainer's own process and on its device."""

from __future__ import annotations

import gc
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from foveal.cluster.room import needless_spread
from foveal.config import Config
from foveal.data.processing import Processing
from foveal.errors import ConfigError, EngineError
from foveal.rollout.engine import STOPPED, RolloutEngine, check_finite
from foveal.rollout.vllm_available import vllm_version
from foveal.rollout.vllm_failures import explain_failure
from foveal.rollout.vllm_lora import (
    adapter_request,
    complete_packing,
    lacking_modules,
    plan_adapter,
    put_in,
    say_merged,
)
from foveal.rollout.vllm_positions import take_over_positions
from foveal.rollout.vllm_processes import any_of_engine, process_count, set_ranks, shut_down
from foveal.rollout.vllm_requests import RequestBuilder, answer_seed
from foveal.rollout.vllm_scheduler import with_bursts
from foveal.rollout.vllm_setup import create_config, engine_arguments, prepare_environment, quiet_libraries
from foveal.rollout.vllm_weights import by_expert, reload
from foveal.rollout.watchdog import Watchdog
from foveal.track import console
from foveal.types import Group, Prompt, Response, Sampling

STEP_LIMIT = 600.0
"""Seconds that the engine may go without finishing a step."""
WAITING = 256
"""Requests that wait in vLLM for their turn: more than begin in one step."""
_NOTHING = np.zeros(0, np.float32)
AGREEING = 8
"""Steps between two looks of an engine's processes at whether one of them was asked to stop."""
IDLE_LIMIT = 1000
"""Steps in a row that schedule nothing while answers are open: then none ever will."""


@dataclass
class _Answer:
    tokens: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    finish_reason: Any = None

    def response(self, weight_version: int) -> Response:
        tokens = np.concatenate(self.tokens) if self.tokens else np.zeros(0, np.int64)
        logprobs = np.concatenate(self.logprobs) if self.logprobs else np.zeros(0, np.float32)
        return Response(tokens, logprobs, self.finish_reason, weight_spans=[(0, weight_version)])


@dataclass(eq=False)
class _Job:
    prompt: Prompt
    weight_version: int
    answers: dict[str, _Answer]
    unfinished: int

    def group(self) -> Group:
        return Group(self.prompt, [answer.response(self.weight_version) for answer in self.answers.values()])


class VllmEngine(RolloutEngine):
    """Drives vLLM's engine core step by step.

    What vLLM puts around its core (request processing, output objects, detokenizing) is left out: prompts come
    processed from the trainer, and tokens go into arrays. The core starts with arbitrary weights; `update_weights` must
    come before the first `submit`.

    Where torch.distributed is initialised, each of its processes builds an engine, all at once and with the same
    arguments. Consecutive ranks, `tensor_parallel_size` of them, share the weights and the cache of one engine; these
    groups are replicas that know nothing of each other. The processes of one group must make the same calls in the same
    order, with equal prompts, from one group that `collect` yields to the next: each schedules by itself, so they wait
    for each other forever where they differ. All of them yield the same groups of answers, and stop at the same step
    once one is asked to. `update_weights` takes full tensors in every process. The default process group stays when the
    engine ends, unless the engine made it, as it does in a single process.

    Args:
        model_path: a Hugging Face folder or hub id; only its configuration is read.
        images: most pictures in a prompt.

    Raises:
        ConfigError: the processes cannot be divided into groups of `tensor_parallel_size`.
        EngineError: vLLM cannot start, with what to change.
    """

    def __init__(
        self, config: Config, processing: Processing, *, model_path: str, device: torch.device, images: int
    ) -> None:
        self.config = config
        adapter = plan_adapter(config.worker.actor.model, model_path)
        prepare_environment(device.type)
        processes, keep_group = process_count(), dist.is_initialized()
        if processes > 1:
            set_ranks(device)
        try:
            with quiet_libraries():
                arguments = engine_arguments(config, processing, model_path, device.type, images, processes, adapter)
                if adapter:
                    complete_packing()
                vllm_config, self.core = _start(arguments, config.data.max_prompt_length)
        except ConfigError:
            raise
        except Exception as error:  # vLLM raises what it comes across
            failure = explain_failure(error, config, starting=True)
            shut_down(None, keep_group=keep_group)
            raise EngineError(failure) from error
        # At the latest when the process exits: torch complains of a process group that is left.
        self._shut_down = weakref.finalize(self, shut_down, self.core, keep_group=keep_group)
        self.on_cpu = device.type == "cpu"
        self.dtype = vllm_config.model_config.dtype
        if adapter:
            (lacking,) = self.core.collective_rpc(lacking_modules, args=(adapter.modules,))
            self.takes_adapters = not lacking
            if lacking:
                say_merged(f"vLLM {vllm_version()} has none for {lacking[0]}")
        if "video" in processing.placeholders:
            self.core.collective_rpc(take_over_positions)
        # The newer runner draws from each answer's seed in its kernel. The older one would keep a generator for each
        # and draw from one after the other; there a seed for each submission must do.
        self.seeded = bool(getattr(vllm_config, "use_v2_model_runner", False))
        self.random = None if self.seeded else RandomNumbers(device)
        self.requests = RequestBuilder(
            vllm_config,
            self.core.request_block_hasher,
            processing.features,
            placeholders=processing.placeholders,
            forbidden_ids=processing.forbidden_ids,
            eos_ids=processing.eos_ids,
            seeded=self.seeded,
            lora_request=adapter_request() if self.takes_adapters else None,
        )
        self.watchdog = Watchdog("the vLLM engine", STEP_LIMIT)
        self._open: dict[str, _Job] = {}  # by the name of the request
        self._queue: deque[tuple[_Job, Sampling]] = deque()
        self._finished: list[_Job] = []
        self._submitted = 0
        self._split = processes > 1 and vllm_config.parallel_config.tensor_parallel_size > 1
        self._looks = 0
        self._asleep: set[str] = set()
        self._version: int | None = None
        self._adapter_version: int | None = None
        self._died: str | None = None

    # -- answers ------------------------------------------------------------------------------------------------

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values the engine has room for."""
        scheduler = self.core.scheduler
        return int(scheduler.kv_cache_config.num_blocks * scheduler.block_size)

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, weight_version: int) -> None:
        """As `RolloutEngine.submit`.

        Raises:
            EngineError: the engine died or sleeps, or a prompt leaves no room for an answer.
            ConfigError: `sampling` names token ids that the model does not have.
        """
        self._check_ready()
        self.requests.check(sampling)
        if "kv_cache" in self._asleep:
            torch.cuda.empty_cache()  # what the hand-over of weights left in reserve
            with self._fatal():
                self.core.wake_up(["kv_cache"])
            self._asleep.discard("kv_cache")
        if self.random and prompts:
            self.random.seed(answer_seed(sampling.seed, prompts[0].uid, len(prompts)))
        for prompt in prompts:
            if len(prompt.expanded_ids) >= self.requests.max_model_len:
                raise EngineError(
                    f"{prompt.uid}: {len(prompt.expanded_ids)} tokens, but the engine takes sequences of "
                    f"{self.requests.max_model_len}; raise worker.rollout.max_model_len or data.max_prompt_length."
                )
            # The number keeps names apart: a prompt may be submitted twice, as for greedy baselines.
            names = [f"{prompt.uid}/{self._submitted}/{answer}" for answer in range(sampling.n)]
            self._submitted += 1
            job = _Job(prompt, weight_version, {name: _Answer() for name in names}, len(names))
            self._open.update(dict.fromkeys(names, job))
            self._queue.append((job, sampling))

    def collect(self) -> Iterator[Group]:
        """As `RolloutEngine.collect`.

        Raises:
            EngineError: the engine died, or makes no progress.
            ModelError: the model's probabilities are not numbers.
        """
        while self._open or self._finished:
            if not self._finished:
                try:
                    with self.watchdog.watch(), _no_garbage_collection(), self.random or nullcontext():
                        self._advance()
                except BaseException as error:  # Ctrl-C too: tokens of the step that it broke off are lost
                    self._died = self._died or f"the vLLM engine was stopped in the middle of a step: {error!r}"
                    raise
            while self._finished:
                yield self._finished.pop(0).group()

    def abort(self, uids: Collection[str]) -> None:
        names = [name for name, job in self._open.items() if job.prompt.uid in uids]
        self._queue = deque(entry for entry in self._queue if entry[0].prompt.uid not in uids)
        for name in names:  # not all at once: vLLM would end them in the order of a set, another in every process
            self.core.abort_requests([name])
        self._take_pieces()
        for name in names:
            if name in self._open:
                self._finish(name, "abort")

    def check_stop(self) -> None:
        """As `RolloutEngine.check_stop`; processes of one engine agree, as none can go on without the others."""
        if not self._split:
            super().check_stop()
            return
        self._looks += 1
        if self._looks % AGREEING == 0 and any_of_engine(self.stop_asked()):
            raise EngineError(STOPPED)

    def _advance(self) -> None:
        """Steps until at least one group is finished."""
        self._check_alive()
        idle = 0
        while not self._finished:
            self.check_stop()
            self._feed()
            with self._fatal():
                outputs, executed = self.core.step_fn()
                self.core.post_step(model_executed=executed)
            self.watchdog.beat()
            if self.on_step is not None:
                self.on_step()
            progress = self._take_pieces() or executed
            for output in outputs[0].outputs if outputs else ():
                progress = True
                self._take(output)
            idle = 0 if progress else idle + 1
            if idle > IDLE_LIMIT:
                open_prompts = sorted({job.prompt.uid for job in self._open.values()})
                self._died = (
                    f"vLLM schedules nothing although {len(self._open)} answers are open (prompts "
                    f"{', '.join(open_prompts[:3])}, …): they may need more memory than the engine has. "
                    "Raise worker.rollout.gpu_memory_utilization, or lower data.max_prompt_length."
                )
                raise EngineError(self._died)

    def _feed(self) -> None:
        """Gives the core as many requests as it may begin with next.

        The others are made while the device is busy: a batch at once would keep it waiting for a second.
        """
        scheduler = self.core.scheduler
        while self._queue and scheduler.get_request_counts()[1] < WAITING:
            job, sampling = self._queue.popleft()
            for request in self.requests.build(job.prompt, sampling, list(job.answers)):
                self.core.add_request(request)

    def _take(self, output: Any) -> None:
        """What vLLM's own scheduler says of one request after one step."""
        reason = None if output.finish_reason is None else str(output.finish_reason)
        tokens = np.asarray(output.new_token_ids, dtype=np.int64)
        logprobs = output.new_logprobs.logprobs[:, 0].astype(np.float32) if len(tokens) else _NOTHING
        self._extend(output.request_id, tokens, logprobs, reason)

    def _take_pieces(self) -> bool:
        """What bursts wrote since the last call; whether a burst is at work."""
        scheduler = self.core.scheduler
        for piece in scheduler.take_pieces():
            self._extend(*piece)
        return scheduler.burst is not None and bool(scheduler.running)

    def _extend(self, name: str, tokens: np.ndarray, logprobs: np.ndarray, reason: str | None) -> None:
        """Adds to an answer, and ends it where there is a reason; one that is not open any more is passed over."""
        job = self._open.get(name)
        if job is None:
            return
        job.answers[name].tokens.append(tokens)
        job.answers[name].logprobs.append(logprobs)
        if reason is not None:
            self._finish(name, reason)

    def _finish(self, name: str, reason: str) -> None:
        job = self._open.pop(name)
        answer = job.answers[name]
        answer.finish_reason = reason
        for logprobs in answer.logprobs:
            check_finite(logprobs)
        job.unfinished -= 1
        if not job.unfinished:
            self._finished.append(job)

    # -- weights and memory -------------------------------------------------------------------------------------

    def update_weights(self, buckets: Iterator[list[tuple[str, torch.Tensor]]], version: int) -> None:
        """As `RolloutEngine.update_weights`; forgets everything that the former weights computed.

        Raises:
            EngineError: the engine died, answers are open, or the tensors are not those of the model.
        """
        self._check_changeable()
        self._version = self._adapter_version = None
        with self._fatal():
            weights = by_expert(chain.from_iterable(buckets))
            (lacking,) = self.core.collective_rpc(reload, args=(weights,))
        self._forget()
        if lacking:
            self._died = (
                f"the weights handed to vLLM lack {len(lacking)} of its model's ({', '.join(lacking[:3])}, …), so its "
                "answers would be another model's. Try another version of vLLM, or worker.rollout.name=transformers."
            )
            raise EngineError(self._died)
        self._version = version

    def update_adapter(self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], version: int) -> None:
        """As `RolloutEngine.update_adapter`; forgets everything that the former adapter computed.

        Raises:
            EngineError: the engine died, answers are open, the base weights are not there, or the tensors are not an
                adapter of the modules that the engine was started for.
        """
        self._check_changeable()
        if self._version is None:
            raise EngineError("the engine has no weights yet: base weights come before the adapter")
        self._adapter_version = None
        with self._fatal():
            (lacking,) = self.core.collective_rpc(put_in, args=(tensors, config))
        self._forget()
        if lacking:
            raise EngineError(
                f"the engine was not started for adapters of {len(lacking)} modules ({', '.join(lacking[:3])}, …)"
            )
        self._adapter_version = version

    def _forget(self) -> None:
        """Drops keys, values and features of pictures that former weights computed."""
        with self._fatal():
            forgotten = self.core.reset_prefix_cache()
            self.core.reset_mm_cache()
            self.core.reset_encoder_cache()
        if not forgotten:
            self._died = "vLLM still holds keys and values that the former weights computed, so it cannot go on."
            raise EngineError(self._died)

    def sleep(self) -> None:
        """Drops weights and cache from the device. Without a device to share (CPU) there is nothing to do.

        Raises:
            EngineError: answers are open, the engine died, or it was stopped while it woke up.
        """
        if self._open:
            raise EngineError(f"the engine cannot sleep while {len(self._open)} answers are open")
        if self.on_cpu or "weights" in self._asleep:
            return
        self._check_alive()
        if self._asleep:
            raise EngineError("the engine cannot sleep before it is awake: its cache has no memory yet")
        self._version = self._adapter_version = None
        with self._fatal():
            self.core.reset_encoder_cache()  # its memory is not the engine's own, and torch stops counting it
            torch.cuda.empty_cache()
            free = _free_bytes()
            self.core.sleep(2, "abort")
        self._asleep = {"weights", "kv_cache"}
        torch.cuda.empty_cache()
        self.asleep_bytes = _free_bytes() - free

    def wake(self) -> None:
        """Takes the memory for the weights; that for the cache follows at the next `submit`, when its caller may have
        moved its own copy of the weights away."""
        if "weights" in self._asleep:
            torch.cuda.empty_cache()  # what the trainer holds in reserve
            with self._fatal():
                self.core.wake_up(["weights"])
            self.asleep_bytes = 0
            self._asleep.discard("weights")

    def close(self) -> None:
        """Ends the engine; its memory is free afterwards."""
        self._open.clear()
        self._queue.clear()
        if self._shut_down.alive and "weights" in self._asleep and not self._died:
            with suppress(RuntimeError):
                self._wake_to_end()
        self._shut_down()

    def _wake_to_end(self) -> None:
        """Where there is room. Of memory that ends asleep vLLM unmaps every piece a second time, and each prints an
        error of CUDA's, which harms nothing but its reader."""
        torch.cuda.empty_cache()
        if self.asleep_bytes <= _free_bytes():
            self.core.wake_up(sorted(self._asleep))

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """What vLLM raises here leaves it in no known state."""
        try:
            yield
        except Exception as error:  # vLLM raises what it comes across
            self._died = explain_failure(error, self.config)
            raise EngineError(self._died) from error

    def _check_alive(self) -> None:
        if self._died:
            raise EngineError(self._died)

    def _check_changeable(self) -> None:
        self._check_alive()
        if self._open:
            raise EngineError(f"weights cannot change while {len(self._open)} answers are open")

    def _check_ready(self) -> None:
        self._check_alive()
        if self._version is None:
            raise EngineError("the engine has no weights yet: wake and update it first")
        if self.takes_adapters and self._adapter_version is None:
            raise EngineError("the engine has no adapter yet: it takes one after every update of its weights")


def start_engine(config: Config, processing: Processing, *, device: torch.device, images: int) -> VllmEngine:
    """The engine of a run, with a line before and after, and one more where it is spread over devices needlessly.

    Raises:
        as `VllmEngine`.
    """
    model_path = config.worker.actor.model.model_path
    assert model_path is not None
    if device.type == "cuda":
        line = needless_spread(config, torch.cuda.get_device_properties(device).total_memory)
        if line is not None:
            console.note(line)
    console.note(f"starting vLLM: {'one to two minutes' if device.type == 'cuda' else 'about ten seconds'}")
    started = time.perf_counter()
    engine = VllmEngine(config, processing, model_path=model_path, device=device, images=images)
    seconds = time.perf_counter() - started
    console.note(f"vLLM is there after {seconds:.0f} s, with room for {engine.cache_tokens:,} tokens in work")
    return engine


def _start(arguments: Any, longest_prompt: int) -> tuple[Any, Any]:
    """The configuration and the core of an engine."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    config = create_config(arguments, longest_prompt)
    config.scheduler_config.scheduler_cls = with_bursts(config.scheduler_config.get_scheduler_cls())
    return config, EngineCore(config, Executor.get_class(config), log_stats=False)


def _free_bytes() -> int:
    """What the device has free; tests have none."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


class RandomNumbers(AbstractContextManager[None]):
    """The engine's own state of torch's global generator, in place within the block; outside it is the caller's."""

    def __init__(self, device: torch.device) -> None:
        self.generators: Any = torch.cuda if device.type == "cuda" else torch.random
        self.state = self.generators.get_rng_state()
        self.outer = self.state

    def seed(self, seed: int) -> None:
        self.outer = self.generators.get_rng_state()
        self.generators.manual_seed(seed)
        self.__exit__()

    def __enter__(self) -> None:
        self.outer = self.generators.get_rng_state()
        self.generators.set_rng_state(self.state)

    def __exit__(self, *_: object) -> None:
        self.state = self.generators.get_rng_state()
        self.generators.set_rng_state(self.outer)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collections walk over every object of the libraries, at a time when the device waits for the next step."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
