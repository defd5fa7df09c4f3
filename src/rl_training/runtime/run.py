"""`Run`: counting, logging, evaluation, checkpoints and stopping of one run, each when it is due."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import UpdateResult, read_metrics
from rl_training.errors import did_you_mean
from rl_training.experiment.checkpointing import CheckpointFolder
from rl_training.experiment.logging import RunLogger
from rl_training.runtime.evaluation import EvaluationResult, Evaluator
from rl_training.runtime.params import Schedule
from rl_training.runtime.session import Session
from rl_training.runtime.spec import Collected
from rl_training.validation import StrictModel

CHECKPOINT_SECONDS = 60.0
MOST_SAVING = 19  # seconds of training per second of writing checkpoints, at least
SCHEMA = 1
AnyFloat = Annotated[float, Field(allow_inf_nan=True)]


class TrainingFailure(RuntimeError):
    """The run cannot go on (a NaN, for example); the last good checkpoint is kept."""


class Callback:
    """Base class of callbacks: override what you need; return False from a method to stop the run."""

    def on_start(self, run: Run) -> bool | None:
        """Before the first step."""

    def on_update(self, run: Run) -> bool | None:
        """After each turn of the loop."""

    def on_evaluation(self, run: Run, metrics: dict[str, Any]) -> bool | None:
        """After each evaluation."""

    def on_end(self, run: Run) -> bool | None:
        """After the last step."""


class RunState(StrictModel):
    """What a checkpoint holds of a `Run`: a field is the attribute of the same name."""

    step: int = Field(ge=0)
    updates: int = Field(ge=0)
    train_seconds: float = Field(ge=0)
    best_return: float = Field(lt=math.inf, allow_inf_nan=True)  # minus infinity before the first evaluation
    good_evaluations: int = Field(ge=0)
    next_log: int = Field(ge=1)
    next_evaluation: int = Field(ge=0)
    next_checkpoint: int = Field(ge=0)
    episodes: list[tuple[float, int]]
    latest: dict[str, AnyFloat]
    collected_metrics: dict[str, AnyFloat]
    last_evaluation: dict[str, int | AnyFloat]


class Run:
    """The state of a run beside its algorithm and source, and everything that happens at a cadence."""

    def __init__(
        self, session: Session, run_dir: Path, *, callbacks: Iterable[Callback] = (), console: bool = False,
        restored: RunState | None = None,
    ) -> None:  # fmt: skip
        self.session, self.run_dir = session, run_dir
        self.config, self.params = session.config, session.params
        self.schedules: dict[str, Schedule] = {**session.params.built_in_schedules(), **session.params.schedules}
        self.callbacks = list(callbacks)
        self.step = 0
        self.updates = 0
        self.train_seconds = 0.0
        self.stop_reason: str | None = None
        self.episodes: deque[tuple[float, int]] = deque(maxlen=100)
        self.latest: dict[str, Any] = {}
        self.collected_metrics: dict[str, float] = {}
        self.last_evaluation: dict[str, Any] = {}
        self.best_return = -math.inf
        self.good_evaluations = 0
        self.next_log = self.config.log_interval
        self.next_evaluation = self.params.eval_interval
        self.next_checkpoint = self.config.checkpoint_interval
        if restored is not None:
            self._restore(restored)
        self.checkpoints = CheckpointFolder(run_dir / "checkpoints", keep=self.config.checkpoint_keep)
        self.logger = RunLogger(
            run_dir, console=console, total_steps=self.config.total_timesteps, append=restored is not None,
            resume_step=self.step,
        )  # fmt: skip
        self.evaluator = Evaluator(session.recipe, session.spaces, self.config.seed)
        self._checks_every_update = self.config.device == "cpu"
        self._signal: int | None = None
        self._begun = self._resumed_at = self._last_save = time.perf_counter()
        self._steps_at_start = self.step
        self._paused = self._save_seconds = 0.0
        self._logged_update = self._evaluated_step = -1

    # the loop's questions ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Write the first checkpoint, so that a kill at any later moment finds one."""
        self.save_checkpoint()
        self._tell("on_start")
        self._begun = self._resumed_at = time.perf_counter()
        self._paused = 0.0

    def finished(self) -> bool:
        """Whether a budget is spent or somebody asked to stop."""
        if self.stop_reason is None:
            if self.step >= self.config.total_timesteps:
                self.stop_reason = "total_timesteps"
            elif self.params.max_updates is not None and self.updates >= self.params.max_updates:
                self.stop_reason = "max_updates"
            elif self._signal is not None:
                self.stop_reason = signal.Signals(self._signal).name
            elif self.config.max_seconds is not None and self._trained_seconds() >= self.config.max_seconds:
                self.stop_reason = "max_seconds"
        return self.stop_reason is not None

    def scheduled_values(self) -> dict[str, float]:
        """Every scheduled number at this step."""
        progress = min(1.0, self.step / self.config.total_timesteps)
        return {name: schedule.value(progress) for name, schedule in self.schedules.items()}

    def apply_schedules(self) -> None:
        """Move every scheduled number to its value at this step, wherever it is read."""
        algorithm, source = self.session.algorithm, self.session.source
        for name, value in self.scheduled_values().items():
            if algorithm.scheduled(name):
                setattr(algorithm, name, value)
            if hasattr(source, name):  # perhaps too: a replay buffer discounts as the learner does
                setattr(source, name, value)

    def count_steps(self, collected: Collected) -> None:
        """Count real transitions and finished episodes."""
        self.step += collected.steps
        self.episodes.extend(collected.episodes)
        self.collected_metrics = collected.metrics

    def count_update(self, result: UpdateResult) -> None:
        """Count an update; on the CPU, where looking is free, stop at the first value that is not finite."""
        self.updates += 1
        self.latest = result.metrics
        if self._checks_every_update:
            value = result.metrics.get(result.watch, 0.0)
            if not math.isfinite(value.item() if isinstance(value, Tensor) else value):
                self._fail(result.watch)

    def tick(self) -> None:
        """Log, evaluate, checkpoint and stop early, each when it is due."""
        if self.updates >= self.next_log:
            self.next_log = self.updates - self.updates % self.config.log_interval + self.config.log_interval
            self.log_row()
        elif self.logger.progress_due:
            self._show_progress(read_metrics(self.latest))
        if self.params.eval_interval and self.step >= self.next_evaluation:
            self.next_evaluation += self.params.eval_interval * (
                1 + (self.step - self.next_evaluation) // self.params.eval_interval
            )
            self.evaluate()
        if self._checkpoint_due():
            self.save_checkpoint(keep_step=bool(self.config.checkpoint_interval))
        if self.callbacks:
            self._tell("on_update")

    # what is due -------------------------------------------------------------------------------------------------

    def progress_metrics(self) -> dict[str, float]:
        """Counters, episode statistics and scheduled values."""
        metrics: dict[str, float] = {"updates": self.updates}
        if self.episodes:
            metrics["episode_return_mean"] = sum(e[0] for e in self.episodes) / len(self.episodes)
            metrics["episode_length_mean"] = sum(e[1] for e in self.episodes) / len(self.episodes)
        return metrics | self.scheduled_values()

    def log_row(self, *, last: bool = False) -> None:
        """One row of metrics, checked for NaN; `last` when it is there only because the run ends."""
        metrics = read_metrics(self.latest)
        for name, value in metrics.items():
            if not math.isfinite(value):
                self._fail(name)
        row = {**self.progress_metrics(), **self.collected_metrics, **metrics, **self.scheduled_values()}
        self.logger.log(self.step, {**row, "steps_per_second": self.steps_per_second()}, last=last)
        self._logged_update = self.updates
        if self.logger.progress_due:
            self._show_progress(metrics)

    def _show_progress(self, metrics: dict[str, float]) -> None:
        mean = sum(e[0] for e in self.episodes) / len(self.episodes) if self.episodes else None
        losses = {name: value for name, value in metrics.items() if name.endswith("loss")}
        self.logger.progress(self.step, self.steps_per_second(), mean, losses)

    def steps_per_second(self) -> float:
        """Steps of this process over its training time."""
        seconds = time.perf_counter() - self._begun - self._paused
        return (self.step - self._steps_at_start) / max(seconds, 1e-9)

    def _trained_seconds(self) -> float:
        """`train_seconds` up to now; it counts over pauses and resumes."""
        return self.train_seconds + time.perf_counter() - self._resumed_at

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time that does not count as training."""
        begun = time.perf_counter()
        self.train_seconds += begun - self._resumed_at
        try:
            yield
        finally:
            self._resumed_at = time.perf_counter()
            self._paused += self._resumed_at - begun

    def evaluate(self, *, last: bool = False) -> dict[str, Any]:
        """Evaluate now; keeps the best checkpoint and, unless `last` as in `log_row`, watches for early stopping."""
        if not self.config.eval_episodes:
            return {}
        result = self._play_evaluation()
        with self.pause():
            self.last_evaluation = metrics = result.metrics()
            self.logger.log(self.step, {**metrics, "eval_returns": result.returns}, kind="eval", last=last)
            self._evaluated_step = self.step
            if not last:
                self._watch_early_stopping({**self.progress_metrics(), **read_metrics(self.latest), **metrics})
            if metrics["eval_return_mean"] > self.best_return:
                self.best_return = metrics["eval_return_mean"]
                self._check_parameters()
                self.checkpoints.save_best(self.checkpoint_tree(replay=False))
        self._tell("on_evaluation", metrics)
        return metrics

    def _play_evaluation(self) -> EvaluationResult:
        """The episodes; what was learned is kept when an environment raises here, or never ends and is interrupted."""
        try:
            with self.pause():
                return self.evaluator.evaluate(self.session.algorithm, self.config.eval_episodes)
        except BaseException:
            self.save_checkpoint()
            raise

    def _watch_early_stopping(self, metrics: dict[str, Any]) -> None:
        rule = self.params.early_stopping
        if rule is None:
            return
        if rule.metric not in metrics:
            hint = did_you_mean(rule.metric, metrics)
            self.logger.message(f"warning: early_stopping watches {rule.metric!r}, which is no metric here; {hint}")
        good = metrics.get(rule.metric, -math.inf) >= rule.threshold
        self.good_evaluations = self.good_evaluations + 1 if good else 0
        if self.good_evaluations >= rule.patience:
            self.stop_reason = "early_stopping"

    def _checkpoint_due(self) -> bool:
        if self.config.checkpoint_interval:
            return self.step >= self.next_checkpoint
        return time.perf_counter() - self._last_save >= max(
            CHECKPOINT_SECONDS, MOST_SAVING * self._save_seconds  # a large buffer must not stall training for long
        )

    def save_checkpoint(self, *, keep_step: bool = False) -> None:
        """Write `latest`, and `step_<n>` when asked."""
        interval = self.config.checkpoint_interval
        if interval and self.step >= self.next_checkpoint:
            self.next_checkpoint += interval * (1 + (self.step - self.next_checkpoint) // interval)
        begun = time.perf_counter()
        with self.pause():
            self._check_parameters()
            self.checkpoints.save_latest(self.checkpoint_tree(replay=self.config.replay_in_checkpoint))
            if keep_step:
                self.checkpoints.save_step(self.step, self.checkpoint_tree(replay=False))
        self._last_save = self._resumed_at
        self._save_seconds = self._last_save - begun

    def checkpoint_tree(self, *, replay: bool) -> dict[str, Any]:
        """Everything that resuming, evaluating and predicting need."""
        session = self.session
        source = session.source.state_dict()
        if not replay:
            source.pop("replay", None)
        return {
            "schema": SCHEMA,
            "config": self.config.model_dump(mode="json"),
            "spaces": session.spaces.to_dict(),
            "algorithm": dict(session.algorithm.state_dict()),
            "source": source,
            "run": self._state(),
        }

    def _state(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in RunState.model_fields}
        return state | {"episodes": [list(e) for e in self.episodes], "latest": read_metrics(self.latest)}

    def _restore(self, state: RunState) -> None:
        for name in RunState.model_fields:
            setattr(self, name, getattr(state, name))
        self.episodes = deque(state.episodes, maxlen=100)
        if self.params.eval_interval:  # the interval may have changed with the budget
            self.next_evaluation = max(self.next_evaluation, self.params.eval_interval)

    def _check_parameters(self) -> None:
        bad = self.session.algorithm.first_bad_tensor()
        if bad is not None:
            self._fail(bad)

    def _fail(self, name: str) -> None:
        bad = self.session.algorithm.first_bad_tensor()
        where = f"the metric {name!r}" if bad is None else f"the tensor {bad!r}"
        raise TrainingFailure(
            f"{where} is not finite at step {self.step} (update {self.updates}); the last good checkpoint is "
            f"{self.checkpoints.latest}. A smaller learning_rate or max_grad_norm often helps."
        )

    def _tell(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None and method(self, *arguments) is False and self.stop_reason is None:
                self.stop_reason = "callback"

    # the end -------------------------------------------------------------------------------------------------------

    def finish(self) -> dict[str, Any]:
        """Evaluate, write the last checkpoint, and return the run's metrics."""
        with self.pause():
            pass
        if self.latest and self._logged_update != self.updates:
            self.log_row(last=True)
        interrupted = self.stop_reason in ("SIGINT", "SIGTERM")
        if not interrupted and self._evaluated_step != self.step:
            self.evaluate(last=True)
        self.save_checkpoint(keep_step=bool(self.config.checkpoint_interval))
        self._tell("on_end")
        return {
            "global_step": self.step,
            **self.progress_metrics(),
            **self.last_evaluation,
            **self.collected_metrics,
            **read_metrics(self.latest),
            **self.scheduled_values(),  # over what the last update says of one, such as SAC's alpha
            "train_seconds": self.train_seconds,
            "stop_reason": self.stop_reason,
        }

    def close(self) -> None:
        """Close files and environments."""
        self.logger.close()
        self.evaluator.close()
        self.session.source.close()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask the run to stop after the current update; a second one stops it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, frame: Any) -> None:
            if self._signal is not None:
                raise KeyboardInterrupt
            self._signal = number
            self.logger.message("stopping after this update; a checkpoint will be written (again to stop at once)")

        previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
