"""The step loop: generate, score, credit, update; validate and save when due."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foveal.ahead import Ahead
from foveal.algorithm import KLController, get_advantage
from foveal.cluster.group import start_workers
from foveal.cluster.machines import joined
from foveal.config import Config
from foveal.data.loader import PromptLoader, open_loader
from foveal.errors import CheckpointError, DataError, EngineError, RewardError, WorkerError
from foveal.folder import RunFolder
from foveal.masking import without_secrets
from foveal.preflight import check_runnable, open_processing
from foveal.resume import Identity, check_rows, find_start, saved_settings
from foveal.reward.runner import RewardRunner
from foveal.rollout import surplus
from foveal.rollout.collect import Collector, training_sampling
from foveal.signals import Stopped, StopSignals
from foveal.track import Trackers, console
from foveal.track.alarms import Alarms, signs
from foveal.track.curve import draw_curve
from foveal.track.metrics import perf_metrics, rollout_metrics, staleness, timing_metrics
from foveal.track.sample_files import SampleFiles
from foveal.track.timing import timer
from foveal.train.credit import assign_credit, logprob_gap, needs_old_logprobs, take_sampled_logprobs
from foveal.train.critic import check_critic_model
from foveal.train.processes import in_first_process
from foveal.train.retention import Checkpoints
from foveal.train.sums import FileSum
from foveal.types import Group, Metrics
from foveal.validation import Validator


class Trainer:
    """One run, from checked inputs to the last checkpoint.

    Building it opens processor, checkpoint, reward function and data, in that order, before any model is loaded, so
    that what is wrong shows within seconds.

    Args:
        config: the whole configuration.
        tracker_ids: of the trackers' runs to go on with, where no checkpoint tells them.
        token_ceiling: tokens that no pass may exceed, because memory ran out above.

    Raises:
        FovealError: whatever is wrong with configuration, model folder, data or reward function.
    """

    def __init__(
        self, config: Config, *, tracker_ids: Mapping[str, str] | None = None, token_ceiling: int = sys.maxsize
    ) -> None:
        check_runnable(config)
        self.config = config
        trainer = config.trainer
        self.root = trainer.checkpoint_dir
        self.checkpoints = Checkpoints(self.root, trainer.save_limit, trainer.best_metric, trainer.best_mode)
        self.processing = open_processing(config)
        algorithm = config.algorithm
        self.has_critic = get_advantage(algorithm.adv_estimator).needs_values
        if self.has_critic:
            check_critic_model(config, self.processing)
        self.kl = KLController(algorithm.kl_coef, algorithm.kl_type, algorithm.kl_target, algorithm.kl_horizon)
        self.step = 0
        self.saved_step = 0
        self.idle_steps = 0
        self.val_score: tuple[int, float | None] = (-1, None)
        self.record: Metrics = {}
        self.signals = StopSignals()
        self.alarms = Alarms()
        self._started = time.monotonic()
        self._told_of_metric = False
        with ExitStack() as held:
            held.callback(RunFolder(self.root).close)
            held.enter_context(joined(config))
            start = find_start(config, self.checkpoints, has_critic=self.has_critic)
            rewards = held.enter_context(RewardRunner(config.worker.reward, "train", self.processing.tokenizer))
            self.loader = open_loader(config, self.processing, "train")
            self.validator: Validator | None = None
            self.total_steps = self._count_steps()
            self._surplus: list[Group] = []
            self._rows = self._identity()
            if start.folder is not None:
                self._resume_data(start.folder, start.state)
            self._loader_state = self.loader.state_dict()
            images = self.loader.most_images
            if config.data.val_files:
                val_loader = open_loader(config, self.processing, "val")
                val_rewards = held.enter_context(RewardRunner(config.worker.reward, "val", self.processing.tokenizer))
                images = max(images, val_loader.most_images)
            self._account_for_rows([self.loader, val_loader] if config.data.val_files else [self.loader])
            self.workers = start_workers(
                config,
                self.processing,
                train=True,
                weights=start.weights,
                images=images,
                token_ceiling=token_ceiling,
            )
            held.callback(self.workers.close)
            self.samples = SampleFiles(self.root, self.processing.tokenizer, after=start.state.get("step", 0))
            if config.data.val_files:
                self.validator = Validator(config, val_loader, self.workers, val_rewards, self.processing, self.samples)
            self.collector = Collector(config, self.loader, self.workers, rewards, list(self._surplus))
            self.ahead = Ahead(self.collector) if config.trainer.async_rollout else None
            if start.folder is not None:
                self._resume(start.folder, start.state)
            run_ids = {**(tracker_ids or {}), **start.tracker_ids(config)}
            self.trackers = Trackers(config, self.root, resume_step=self.step, run_ids=run_ids)
            self._held = held.pop_all()

    def _account_for_rows(self, loaders: list[PromptLoader]) -> None:
        """Lists every row that is not used; the terminal gets the first few."""
        path = self.root / "left_out_rows.jsonl"
        path.unlink(missing_ok=True)
        for loader in loaders:
            loader.keep_account(path)
        if path.exists():
            console.note(f"all rows that are left out, and why: {path}")

    def _count_steps(self) -> int:
        trainer, batch = self.config.trainer, self.config.data.rollout_batch_size
        if trainer.max_steps is not None:
            return trainer.max_steps
        return trainer.total_epochs * self.loader.steps_per_epoch(batch)

    # -- the run ------------------------------------------------------------------------------------------------

    def fit(self) -> int:
        """Trains to the end.

        Returns:
            the process's exit status: 0, or 128 + the signal's number when Ctrl-C or SIGTERM ended the run early (what
            was learned is saved then).

        Raises:
            FovealError: what ended the run. Where it was the data, the reward function or the engine, what was learned
                is saved.
        """
        with self.signals:
            try:
                return self._run_and_save()
            except KeyboardInterrupt:
                self.checkpoints.abandon()
                raise
            finally:
                self.close()

    def _run_and_save(self) -> int:
        """As `fit`, up to the last save."""
        try:
            self._run()
            self.checkpoints.wait()
            return 0
        except Stopped as stop:
            name = signal.Signals(stop.signum).name
            console.note(f"{name}: stopping once step {self.step} is saved (a second one stops at once)")
            self._save_after(name)
            return 128 + stop.signum
        except (DataError, EngineError, RewardError) as error:  # between updates: the weights are those of a step
            try:
                if not self._is_saved():
                    self._save_after(type(error).__name__)
            except (
                CheckpointError,
                OSError,
                RuntimeError,
                WorkerError,
            ) as failure:  # with the engine the whole device may be gone
                console.warn(f"step {self.step} could not be saved: {failure}")
            raise

    def _run(self) -> None:
        trainer = self.config.trainer
        if self.step >= self.total_steps:
            console.note(
                f"nothing left to do: step {self.step} of {self.total_steps} is done. Raise trainer.max_steps or "
                "trainer.total_epochs to go on, or give a new run another trainer.experiment_name."
            )
            return
        if self.has_critic and trainer.critic_warmup >= self.total_steps:
            console.warn(
                f"trainer.critic_warmup={trainer.critic_warmup}: all {self.total_steps} steps train the critic alone, "
                "the model stays as it is."
            )
        if self.step == 0 and trainer.val_before_train:
            self.validate()
            self._write_record()
        validates = trainer.val_before_train or trainer.val_freq > 0
        while self.step < self.total_steps:
            self.checkpoints.check()
            self.train_step()
            last = self.step == self.total_steps
            if (trainer.val_freq > 0 and self.step % trainer.val_freq == 0) or (last and validates):
                self.validate()
            if (trainer.save_freq > 0 and self.step % trainer.save_freq == 0) or last:
                self.save(background=trainer.async_save and not last)
            self._write_record()
            self.signals.check()

    def train_step(self) -> None:
        """One step: a batch of groups in, better weights out."""
        step = self.step + 1
        timings: dict[str, float] = {}
        profiled = step in self.config.trainer.profile_steps
        if profiled:
            self.workers.start_profile(step, self.root.absolute() / "profile")
        with timer(timings, "step"):
            groups, metrics = self._collect(step, timings)
            if self.config.algorithm.old_logprobs == "rollout":
                take_sampled_logprobs(groups)
            elif needs_old_logprobs(self.config):
                with timer(timings, "old"):
                    self.workers.old_logprobs(groups)
            if self.config.algorithm.needs_ref_logprobs:
                with timer(timings, "ref"):
                    self.workers.ref_logprobs(groups)
            if self.has_critic:
                with timer(timings, "values"):
                    self.workers.values(groups)
            with timer(timings, "adv"):
                metrics |= assign_credit(groups, self.config, self.kl)
            if self.has_critic:
                with timer(timings, "update_critic"):
                    metrics |= self.workers.update_critic(groups, step, self.total_steps)
            if not self.has_critic or step > self.config.trainer.critic_warmup:
                with timer(timings, "update_actor"):
                    metrics |= self.workers.update(groups, step, self.total_steps, self.kl.kl_coef)
        if profiled:
            console.note(self.workers.stop_profile(timings))
        self.step = step
        self._loader_state, self._surplus = (self.ahead or self.collector).position()
        self._record_step(groups, metrics, timings)
        self._keep_samples(groups)

    def _collect(self, step: int, timings: dict[str, float]) -> tuple[list[Group], Metrics]:
        with self.signals.interruptible(), console.phase(f"step {step}: answers", None) as advance:
            if self.ahead is None:
                return self.collector.collect(step, timings, advance)
            groups, metrics = self.ahead.take(step, timings, advance)
        if step < self.total_steps:
            self.ahead.start(step + 1)
        return groups, metrics

    def validate(self) -> None:
        """Scores the current weights on the validation set, if there is one."""
        if self.validator is None:
            return
        timings: dict[str, float] = {}
        with timer(timings, "validation"), self.signals.interruptible():
            if self.ahead is not None:
                self.ahead.settle()
            metrics, samples = self.validator.run(self.step, {})
        self.workers.performance({})  # the next step is measured by itself
        self.val_score = (self.step, self._score(metrics))
        metrics |= timing_metrics(timings)
        self.record |= metrics
        self.trackers.log_samples(samples, self.step)
        console.validation_line(self.step, metrics)

    def _score(self, metrics: Metrics) -> float | None:
        """What the checkpoint of these weights is judged by; says once where validation doesn't give it."""
        name = self.config.trainer.best_metric
        given = [metric for metric in metrics if metric.startswith("val/")]
        if name not in metrics and given and not self._told_of_metric:
            self._told_of_metric = True
            console.warn(
                f"trainer.best_metric: validation gives no {name}, so no checkpoint is the best; it gives "
                f"{', '.join(given)}."
            )
        return metrics.get(name)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def save(self, *, background: bool = False) -> None:
        """Writes `global_step_N`, whole or not at all, judged by a validation of these very weights if there is one.

        Args:
            background: while training goes on, if the host has room for a copy. A failure comes up at the next step.

        Raises:
            CheckpointError: this save failed, or the one before.
        """
        timings: dict[str, float] = {}
        validated, score = self.val_score
        left_over = surplus.dump_groups(self._surplus) if self._surplus else None
        with timer(timings, "save_checkpoint"):
            self.checkpoints.wait()  # the snapshot before is in the memory that this one takes
            snapshot = self.workers.snapshot(model_only=self.config.trainer.save_model_only, copied=background)

            def write(folder: Path) -> None:
                snapshot.write(folder)
                if left_over is not None:
                    in_first_process(lambda: (folder / surplus.FILE).write_bytes(left_over))

            self.checkpoints.save(
                self.step,
                write,
                score if validated == self.step else None,
                state=self._state(left_over),
                background=snapshot.copied,
            )
        self.saved_step = self.step
        self.record |= timing_metrics(timings)

    def _state(self, left_over: bytes | None) -> dict[str, Any]:
        """What a resumed run needs beside weights and optimizer; plain JSON."""
        return {
            "step": self.step,
            "loader": self._loader_state,
            "kl": self.kl.state_dict(),
            "elapsed_s": self._elapsed(),
            "trackers": self.trackers.run_ids,
            "data": self._rows,
            "files": {surplus.FILE: asdict(FileSum.of(left_over))} if left_over is not None else {},
            "settings": saved_settings(self.config),
        }

    def _identity(self) -> Identity:
        data, rows = self.config.data, self.loader.builder.rows
        return Identity(
            source=without_secrets(str(data.train_files)),
            rows=len(rows),
            checksum=rows.checksum([data.prompt_key, data.answer_key]),
        )

    def _resume_data(self, folder: Path, state: dict[str, Any]) -> None:
        """Goes on in the data where a checkpoint was written, with the groups that were left over there."""
        if self.config.trainer.restart_data:
            console.note("the training rows begin anew (trainer.restart_data)")
            return
        check_rows(state.get("data"), self._rows, str(folder))
        self.loader.load_state_dict(state["loader"])
        if surplus.FILE in state.get("files", {}):
            self._surplus = surplus.read_groups(folder / surplus.FILE, self.loader.rebuild)

    def _resume(self, folder: Path, state: dict[str, Any]) -> None:
        """Goes on with the models and counters of a checkpoint."""
        self.workers.load(folder, state["step"])
        self.kl.load_state_dict(state["kl"])
        self.step = self.saved_step = state["step"]
        self._started -= state.get("elapsed_s", 0.0)
        console.note(f"resuming from {folder}: going on after step {self.step} of {self.total_steps}")

    def _elapsed(self) -> float:
        """Seconds that the run has taken, in all processes that went on with it."""
        return time.monotonic() - self._started

    def _save_after(self, reason: str) -> None:
        if self._is_saved():
            console.note(f"{reason}: stopping; nothing has been learned since step {self.saved_step}.")
            return
        console.note(f"{reason}: saving step {self.step} before stopping.")
        self.save()

    def _is_saved(self) -> bool:
        """Whether the current step is on the disk, once a save in the background has ended."""
        try:
            self.checkpoints.wait()
        except CheckpointError as error:
            console.warn(str(error))
            self.saved_step = -1
        except WorkerError:  # which is told by whatever calls the workers next
            self.saved_step = -1
        return self.saved_step == self.step

    # -- the record ---------------------------------------------------------------------------------------------

    def _record_step(self, groups: list[Group], metrics: Metrics, timings: dict[str, float]) -> None:
        answers = [len(r.token_ids) for g in groups for r in g.trained]
        prompts = sum(len(g.prompt.expanded_ids) * len(g.trained) for g in groups)
        total = sum(answers) + prompts
        if training_sampling(self.config).full_distribution:
            metrics |= logprob_gap(groups)
        # rewards are those of all answers that were sampled, so that they tell of the model whatever is filtered out
        metrics = rollout_metrics(groups, self.config.data.max_prompt_length) | metrics
        metrics |= timing_metrics(timings, sum(answers), total)
        metrics |= perf_metrics(total, timings["step"], self.config.trainer.devices)
        metrics["perf/elapsed_s"] = self._elapsed()
        metrics |= self.workers.performance(timings)
        if self.ahead is not None:
            warmup = self.config.trainer.critic_warmup if self.has_critic else 0
            metrics |= staleness(groups, self.step - 1, warmup)
        metrics |= signs(groups)
        console.step_line(self.step, self.total_steps, metrics)
        self.record |= metrics | self.alarms.look(self.step, metrics)
        self._warn_of_nothing_learned(groups)

    def _keep_samples(self, groups: list[Group]) -> None:
        """Keeps the answers to the first prompts of the step, as many as `trainer.log_training_samples` says."""
        count = self.config.trainer.log_training_samples
        before = self.samples.written
        part = self.samples.part("train", self.step)
        part.add(groups if count < 0 else groups[:count])
        part.write()
        self.samples.foresee(self.samples.written - before, self.total_steps - self.step)

    def _warn_of_nothing_learned(self, groups: list[Group]) -> None:
        """Says at the first step without a learning signal what that means, and again as such steps go on."""
        trained = [r for g in groups for r in g.trained]
        if any(r.columns["advantages"].any() for r in trained):
            self.idle_steps = 0
            return
        self.idle_steps += 1
        if self.idle_steps & (self.idle_steps - 1):  # 1, 2, 4, 8 … steps in a row
            return
        if trained:
            scores = sorted({r.rewards["overall"] for r in trained})
            shown = ", ".join(f"{score:g}" for score in scores[:3]) + (", …" if len(scores) > 3 else "")
            reason = f"no answer was scored better or worse than those it is compared with (scores: {shown})"
            cure = (
                "If the score is always the same, the prompt's format and the reward function may disagree, or the "
                "task is too easy or too hard; see generations.log, or raise worker.rollout.n"
            )
        else:
            reason = "no score was a finite number, so every answer was left out"
            cure = "Look at the reward function"
        console.warn(f"step {self.step}: nothing was learned, {reason}; {self.idle_steps} step(s) in a row. {cure}.")

    def _write_record(self) -> None:
        """Logs everything that is known of the current step, as one record."""
        if not self.record:
            return
        self.trackers.log(self.record, self.step)
        if any(name.startswith("val/") for name in self.record):
            draw_curve(self.trackers.log_file, self.root / "curve.png")
        self.record = {}

    def close(self) -> None:
        """Writes out what the trackers hold, ends the reward processes and lets go of the folder; waits for a save."""
        self._is_saved()
        self._write_record()
        draw_curve(self.trackers.log_file, self.root / "curve.png")
        self.trackers.close()
        self._held.close()
        if self.ahead is not None:
            self.ahead.join()
