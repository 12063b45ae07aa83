"""A scheduler for vLLM that makes plain decoding cheap on the host.

With a thousand and more answers in work, vLLM's own scheduler spends several times what the GPU needs for a step on
Python loops over the requests: slots, counters, output objects. But between two admissions nothing happens that needs
them: every request gets one token a step. So whenever all running requests only decode, a *burst* of steps is planned
at once: slots for all of it are allocated at its start, the steps share their lists, sampled tokens land in one array,
and ends are found by comparing whole rows. Requests get back what the burst did when it ends.

What is inherited handles everything else: prefill, preemption, aborting, and admission but for one rule. Where the
cache of computed pictures is full, vLLM would start a waiting request on the few tokens before its picture. Started so,
it no longer looks for the prefix that it shares with its siblings, and each of them computes the whole prompt alone.
Here it waits, unless it has more pictures than a step computes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

STEPS = 64
"""Longest burst: its slots are taken at its start, so a long one holds memory that others could start with."""
STEPS_WHILE_WAITING = 16
"""The same while requests wait: none is admitted before the burst ends."""
SHORTEST = 4


class Piece(NamedTuple):
    """Tokens that a burst wrote for one request.

    Attributes:
        token_ids, logprobs: (L,) int64 and float32.
        finish_reason: "stop" or "length"; None while it goes on.
    """

    request_id: str
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str | None


class Burst:
    """Some decoding steps of fixed requests, a row each.

    Attributes:
        limits: (R,) steps that each row may still be scheduled for.
        tokens, logprobs: (steps, R) what was sampled.
        received: (R,) tokens of each row so far.
        alive: (R,) rows that have not finished.
    """

    def __init__(self, requests: list[Any], steps: int, template: Any) -> None:
        self.requests = requests
        self.steps = steps
        self.template = template
        self.step = 0
        self.computed = np.array([request.num_computed_tokens for request in requests])
        written = [request.num_output_tokens + request.num_output_placeholders for request in requests]
        self.written = np.array(written)
        self.limits = np.array([request.max_tokens for request in requests]) - self.written
        self.tokens = np.zeros((steps, len(requests)), dtype=np.int64)
        self.logprobs = np.zeros((steps, len(requests)), dtype=np.float32)
        self.received = np.zeros(len(requests), dtype=np.int64)
        self.scheduled = np.zeros(len(requests), dtype=np.int64)
        self.alive = np.ones(len(requests), dtype=bool)
        self.stop_ids = np.array(requests[0].sampling_params.stop_token_ids or [], dtype=np.int64)
        self._use(np.arange(len(requests)))

    def _use(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.names = [self.requests[row].request_id for row in rows.tolist()]
        self.counts = dict.fromkeys(self.names, 1)
        self.no_blocks: list[Any] = [None] * len(rows)

    def next_rows(self) -> bool:
        """Narrows the rows to those that go on; False when the burst is over."""
        if self.step == self.steps:
            return False
        going = np.flatnonzero(self.alive & (self.scheduled < self.limits))
        if len(going) != len(self.rows):
            self._use(going)
        return len(going) > 0

    def schedule(self, finished_ids: set[str], freed_encoder_hashes: list[str], new_blocks: list[Any] | None) -> Any:
        """The scheduler output of the next step, which remembers its rows for `receive`."""
        cached = replace(
            self.template.scheduled_cached_reqs,
            req_ids=self.names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=new_blocks or self.no_blocks,
            num_computed_tokens=(self.computed[self.rows] + self.step).tolist(),
            num_output_tokens=(self.written[self.rows] + self.step).tolist(),
        )
        output = replace(
            self.template,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=self.counts,
            total_num_scheduled_tokens=len(self.rows),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=set(),
            finished_req_ids=finished_ids,
            free_encoder_mm_hashes=freed_encoder_hashes,
        )
        output.burst, output.burst_rows, output.burst_step = self, self.rows, self.step
        self.scheduled[self.rows] += 1
        self.step += 1
        return output

    def receive(self, step: int, rows: np.ndarray, names: list[str], output: Any) -> list[tuple[int, str]]:
        """Takes the tokens of one step; returns the rows that end with it, each with its reason."""
        count = len(rows)
        tokens = np.fromiter(chain.from_iterable(output.sampled_token_ids), np.int64, count)
        logprobs = output.logprobs.logprobs[:, 0]
        if output.req_ids != names:  # the runner put them in an order of its own
            order = np.array([output.req_id_to_index[name] for name in names])
            tokens, logprobs = tokens[order], logprobs[order]
        going = self.alive[rows]
        if not going.all():
            rows, tokens, logprobs = rows[going], tokens[going], logprobs[going]
        self.tokens[step, rows] = tokens
        self.logprobs[step, rows] = logprobs
        self.received[rows] += 1
        stopped = (tokens[:, None] == self.stop_ids).any(1)
        ended = stopped | (self.received[rows] == self.limits[rows])
        if not ended.any():
            return []
        self.alive[rows[ended]] = False
        reasons = np.where(stopped, "stop", "length")
        return list(zip(rows[ended].tolist(), reasons[ended].tolist(), strict=True))

    def piece(self, row: int, reason: str | None) -> Piece:
        length = self.received[row]
        return Piece(
            self.requests[row].request_id, self.tokens[:length, row].copy(), self.logprobs[:length, row].copy(), reason
        )

    def hand_back(self, row: int) -> None:
        """Makes a request that goes on look as if vLLM's own scheduler had done these steps."""
        request, received = self.requests[row], int(self.received[row])
        if received:
            request.append_output_token_ids(self.tokens[:received, row].tolist())
        scheduled = int(self.scheduled[row])
        request.num_computed_tokens = int(self.computed[row]) + scheduled
        request.num_output_placeholders += scheduled - received
        if hasattr(request, "num_in_flight_tokens"):  # newer versions know by it what a preemption made stale
            request.num_in_flight_tokens += scheduled - received


def with_bursts(base: type[Any]) -> type[Any]:
    """A subclass of vLLM's scheduler (`Scheduler`, or `AsyncScheduler`) that decodes in bursts."""
    from vllm.v1.request import RequestStatus

    ends = {"stop": RequestStatus.FINISHED_STOPPED, "length": RequestStatus.FINISHED_LENGTH_CAPPED}

    class BurstScheduler(base):  # type: ignore[misc]
        running: list[Any]
        finished_req_ids: set[str]

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.burst: Burst | None = None
            self.template: Any = None
            self.pieces: list[Piece] = []
            self.bursts_allowed = (
                len(self.kv_cache_config.kv_cache_groups) == 1
                and not self.needs_kv_cache_zeroing
                and not self.has_mamba_layers
                and self.num_spec_tokens == 0
                and self.connector is None
                and self.ec_connector is None
            )

        def take_pieces(self) -> list[Piece]:
            """What bursts have written since the last call."""
            pieces, self.pieces = self.pieces, []
            return pieces

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            if self.burst is not None:
                if self.burst.next_rows() and not self._must_admit():
                    return self._burst_step(None)
                self._end_burst()
            steps = self._burst_steps()
            if steps >= SHORTEST:
                return self._begin_burst(steps)
            output = super().schedule(*args, **kwargs)
            plain = output.total_num_scheduled_tokens == len(output.num_scheduled_tokens)
            settled = plain and not output.scheduled_new_reqs and not output.preempted_req_ids
            # Only what follows a settled step may be a burst: nothing was admitted, so nothing more fits just now.
            self.template = output if settled else None
            return output

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            burst = self.burst
            if burst is None or getattr(scheduler_output, "burst", None) is not burst:
                outputs = super().update_from_output(scheduler_output, model_runner_output)
                if burst is not None:  # a step from before it, whose tokens may have ended some of its requests
                    for row, request in enumerate(burst.requests):
                        if request.is_finished():
                            burst.alive[row] = False
                return outputs
            assert burst is not None
            names = scheduler_output.scheduled_cached_reqs.req_ids
            ended = burst.receive(scheduler_output.burst_step, scheduler_output.burst_rows, names, model_runner_output)
            for row, reason in ended:
                self.pieces.append(burst.piece(row, reason))
                request = burst.requests[row]
                request.status = ends[reason]
                self._free_request(request)
            if ended:
                self.running = [request for request in self.running if not request.is_finished()]
                if not burst.alive.any():
                    self._end_burst()  # or its requests, with their pictures, would be held until the next rollout
            return {}

        def _try_schedule_encoder_inputs(self, request: Any, computed: int, new: int, *args: Any, **kwargs: Any) -> Any:
            found = super()._try_schedule_encoder_inputs(request, computed, new, *args, **kwargs)
            starts = computed == 0 and request.status != RequestStatus.RUNNING
            if found[1] < new and starts and self.running and self._fits_a_step(request):
                return (found[0], 0, *found[2:])
            return found

        def _fits_a_step(self, request: Any) -> bool:
            """Whether one step can compute all its pictures: only then is there something to wait for."""
            tokens = sum(feature.mm_position.length for feature in request.mm_features)
            return bool(tokens <= self.max_num_encoder_input_tokens)

        def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
            self._end_burst()
            return super().finish_requests(*args, **kwargs)

        def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
            self._end_burst()
            return super().reset_prefix_cache(*args, **kwargs)

        def _must_admit(self) -> bool:
            """New requests came during a burst that began with none waiting."""
            assert self.burst is not None
            return self.burst.steps > STEPS_WHILE_WAITING and self.get_request_counts()[1] > 0

        def _burst_steps(self) -> int:
            """How long a burst could be now; 0 when this step must be one of vLLM's own."""
            if self.template is None or not self.bursts_allowed or not self.running:
                return 0
            running = self.running
            stops = running[0].sampling_params.stop_token_ids
            for request in running:
                params = request.sampling_params
                if (
                    request.is_prefill_chunk
                    or request.num_output_tokens + request.num_output_placeholders == 0
                    or request.num_computed_tokens != request.num_tokens + request.num_output_placeholders - 1
                    or params.stop_token_ids != stops
                    or params.min_tokens
                    or params.logprobs is None
                    or request.use_structured_output
                ):
                    return 0
            waiting = self.get_request_counts()[1]
            steps = STEPS_WHILE_WAITING if waiting else STEPS
            longest = max(
                request.max_tokens - request.num_output_tokens - request.num_output_placeholders for request in running
            )
            free = self.kv_cache_manager.block_pool.get_num_free_blocks() // len(running)
            return min(steps, longest, (free - 1) * self.block_size)

        def _begin_burst(self, steps: int) -> Any:
            burst = Burst(list(self.running), steps, self.template)
            self.burst = burst
            self.template = None
            burst.next_rows()
            new_blocks = []
            for row in burst.rows.tolist():
                blocks = self.kv_cache_manager.allocate_slots(
                    burst.requests[row], 1, num_lookahead_tokens=min(steps, int(burst.limits[row])) - 1
                )
                assert blocks is not None, "the free blocks were counted before"
                new_blocks.append(blocks.get_block_ids(allow_none=True))
            return self._burst_step(new_blocks)

        def _burst_step(self, new_blocks: list[Any] | None) -> Any:
            assert self.burst is not None
            self.current_step += 1
            self.kv_cache_manager.new_step_starts()
            finished, self.finished_req_ids = self.finished_req_ids, set()
            freed = self.encoder_cache_manager.get_freed_mm_hashes()
            return self.burst.schedule(finished, freed, new_blocks)

        def _end_burst(self) -> None:
            """Gives the requests their tokens; what is still under way comes back as a step of vLLM's own."""
            burst, self.burst = self.burst, None
            if burst is None:
                return
            for row in np.flatnonzero(burst.alive).tolist():
                burst.hand_back(row)
                if burst.received[row]:
                    self.pieces.append(burst.piece(row, None))
            if not self.use_v2_model_runner:
                self.prev_step_scheduled_req_ids.clear()
                self.prev_step_scheduled_req_ids.update(burst.names)
            # Nothing was admitted or preempted meanwhile, so another burst may follow at once.
            if self.get_request_counts()[1] == 0:
                self.template = burst.template

    BurstScheduler.__name__ = f"Burst{base.__name__}"
    return BurstScheduler
