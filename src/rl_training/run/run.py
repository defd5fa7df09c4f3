"""`Run`: counting, logging, evaluation and checkpoints of one run; `interruption.py` handles ending it early."""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rl_training.algorithms.base import UpdateResult, read_metrics
from rl_training.config.params import Schedule
from rl_training.envs.stepper import Episode
from rl_training.errors import EnvironmentFailure, TrainingFailure, did_you_mean
from rl_training.record.checkpoints import CheckpointFolder
from rl_training.record.logger import RunLogger, SilentLogger
from rl_training.run.build import Session, describe_machine
from rl_training.run.callback import Callback
from rl_training.run.clock import TrainingClock
from rl_training.run.evaluation import EvaluationResult, Evaluator
from rl_training.run.folder import keep_lock, write_run_files
from rl_training.run.interruption import Interruption
from rl_training.run.progress import describe_workers
from rl_training.run.state import RunState, checkpoint_tree, summarize_episodes

CHECKPOINT_SECONDS = 60.0
MOST_SAVING = 19  # minimum seconds of training per second of writing checkpoints
EVALUATIONS, FEW = 10, 5  # default number of evaluations, and the maximum episodes of all but the last
# Why a run stops; if ranks differ, the last of these applies to all
REASONS = (None, "total_timesteps", "max_updates", "max_seconds", "early_stopping", "callback", "SIGINT", "SIGTERM")


class NotSaved(TrainingFailure):
    """A checkpoint could not be written."""


class Run:
    """The state of a run apart from its algorithm and experience, and everything that happens at intervals."""

    def __init__(
        self, session: Session, run_dir: Path, *, callbacks: Iterable[Callback] = (), console: bool = False,
        restored: RunState | None = None, messages: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.session, self.run_dir, self.ranks = session, run_dir, session.ranks
        self.config, self.params = session.config, session.params
        self.schedules: dict[str, Schedule] = {**session.params.built_in_schedules(), **session.params.schedules}
        self.callbacks, self.messages = list(callbacks), list(messages)
        self.step = 0
        self.updates = 0
        self.stop_reason: str | None = None
        self.episodes: deque[tuple[float, int]] = deque(maxlen=100)
        self.latest: dict[str, Any] = {}
        self.collected_metrics: dict[str, float] = {}
        self.last_evaluation: dict[str, Any] = {}
        self.best_return = -math.inf
        self.good_evaluations = 0
        self.abandoned = False
        self.next_log = self.config.log_interval
        tenth = -(-self.config.total_timesteps // EVALUATIONS)
        self.eval_interval = tenth if self.params.eval_interval is None else self.params.eval_interval
        self.next_evaluation = self.eval_interval
        self.next_checkpoint = self.config.checkpoint_interval
        if restored is not None:
            self._restore(restored)
        self.clock = TrainingClock(0.0 if restored is None else restored.train_seconds, self.step, self.updates)
        self.checkpoints = CheckpointFolder(run_dir / "checkpoints", keep=self.config.checkpoint_keep)
        self.logger = SilentLogger() if self.ranks.rank else RunLogger(
            run_dir, console=console, total_steps=self.config.total_timesteps, append=restored is not None,
            resume_step=self.step, loggers=self.config.loggers, config=self.config.model_dump(mode="json"),
        )  # fmt: skip
        self.evaluator = Evaluator(
            session.recipe, session.spaces, self.config.seed, max_steps=self.config.eval_max_steps,
            check=self._look_up, warn=self.logger.message,
        )  # fmt: skip
        self.machine = describe_machine(self.config)
        self._checks_every_update = self.config.device == "cpu"
        self.stop_signal: int | None = None
        self.interruption: Interruption | None = None  # of the current turn
        self.in_turn = self.is_evaluating = self.is_closing = self.stops_at_once = False
        self.saved: tuple[float, ...] | None = None
        self._last_save, self._save_seconds = time.perf_counter(), 0.0
        self._logged_update = self._evaluated_step = -1

    # called by the loop ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Write the first checkpoint, so that one exists whenever the run is killed."""
        for message in self.messages:
            self.logger.message(message)
        self.ranks.first(partial(write_run_files, self.run_dir, self.config, self.messages))
        self.save_checkpoint()
        self._tell("on_start")
        self._evaluate_when_due()  # a signal had ended the run during this evaluation
        self.clock.start(self.step, self.updates)

    def finished(self) -> bool:
        """Whether a budget is used up or a stop was requested."""
        if self.stop_reason is None:
            steps, updates, seconds = self.budgets()
            if self.step >= steps:
                self.stop_reason = "total_timesteps"
            elif self.updates >= updates:
                self.stop_reason = "max_updates"
            elif self.stop_signal is not None:
                self.stop_reason = signal.Signals(self.stop_signal).name
            elif self.clock.seconds >= seconds:
                self.stop_reason = "max_seconds"
        if self.ranks.count > 1:
            known = self.stop_reason if self.stop_reason in REASONS else "callback"  # a callback may return anything
            self.stop_reason = REASONS[int(self.ranks.largest(REASONS.index(known)))]
        return self.stop_reason is not None

    def budgets(self) -> tuple[float, float, float]:
        """How many steps, updates and seconds of training the run may take."""
        limits = self.config.total_timesteps, self.params.max_updates, self.config.max_seconds
        steps, updates, seconds = (math.inf if limit is None else limit for limit in limits)
        return steps, updates, seconds

    @property
    def own_step(self) -> int:
        """Steps of this rank's environments."""
        return self.step // self.ranks.count

    def scheduled_values(self) -> dict[str, float]:
        """The value of every schedule at this step."""
        progress = min(1.0, self.step / self.config.total_timesteps)
        return {name: schedule.value(progress) for name, schedule in self.schedules.items()}

    def apply_schedules(self) -> None:
        """Set every scheduled number to its value at this step, in every part that reads it."""
        self.in_turn = True
        algorithm, store = self.session.algorithm, self.session.store
        for name, value in self.scheduled_values().items():
            if algorithm.scheduled(name):
                algorithm.set_number(name, value)
            if hasattr(store, name):  # a replay buffer, for example, has the learner's discount too
                setattr(store, name, value)

    def count_steps(self, steps: int, episodes: Iterable[Episode]) -> None:
        """Count real transitions (every rank has the same number) and finished episodes."""
        self.step += steps * self.ranks.count
        self.episodes.extend(episodes)
        self.collected_metrics = self.session.store.metrics

    def count_update(self, result: UpdateResult) -> None:
        """Count an update; on the CPU, where the check is cheap, stop at the first NaN or infinity."""
        self.updates += 1
        self.latest = result.metrics
        if self._checks_every_update:
            value = result.metrics.get(result.watch, 0.0)
            value = value.item() if isinstance(value, Tensor) else value
            if not math.isfinite(value if self.ranks.count == 1 else self.ranks.average([value])[0]):
                self._fail(result.watch)
        if self.interruption is not None and self.ranks.count == 1:  # several ranks must agree first
            raise self.interruption

    def tick(self) -> None:
        """Log, evaluate, checkpoint and stop early, each when it is due."""
        self.in_turn = self.abandoned = False
        self.clock.tick(self.step, self.updates)
        if self.updates >= self.next_log:
            self.next_log = self.updates - self.updates % self.config.log_interval + self.config.log_interval
            self.log_row()
        elif self.logger.progress_due:
            self._show_progress(read_metrics(self.latest))
        self._evaluate_when_due()
        if self._checkpoint_due():
            try:
                self.save_checkpoint(keep_step=bool(self.config.checkpoint_interval))
            except NotSaved as error:
                self.logger.message(f"warning: {error}; the next checkpoint will be tried as usual")
        if self.callbacks:
            self._tell("on_update")

    # what is due -------------------------------------------------------------------------------------------------

    def progress_metrics(self) -> dict[str, float]:
        """Counters, episode statistics and scheduled values."""
        return {"updates": self.updates} | summarize_episodes(self.episodes) | self.scheduled_values()

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of every logged metric, as floats."""
        collected = self.collected_metrics | self.session.collector.metrics(last=True)
        return self.progress_metrics() | collected | self.read_latest() | self.scheduled_values()

    def log_row(self, *, last: bool = False) -> None:
        """Log one row of metrics, after checking for NaN; `last` means that it is logged only because the run ends."""
        metrics = self.read_latest()
        for name, value in metrics.items():
            if not math.isfinite(value):
                self._fail(name)
        collected = self.collected_metrics | self.session.collector.metrics(last=last)
        row = self.progress_metrics() | collected | metrics | self.scheduled_values()
        self.logger.log(self.step, row | {"steps_per_second": self.clock.steps_per_second(self.step)}, last=last)
        self._logged_update = self.updates
        if self.logger.progress_due:
            self._show_progress(metrics)

    def read_latest(self) -> dict[str, float]:
        """Metrics of the last update, over all ranks."""
        metrics = read_metrics(self.latest)
        return dict(zip(metrics, self.ranks.average(list(metrics.values())), strict=True))

    def _show_progress(self, metrics: dict[str, float]) -> None:
        if self.clock.has_restarted and not self.is_evaluating:
            return  # no speed is known yet; the next turn shows it
        collected = self.session.collector.metrics(last=True)
        mean = (self.progress_metrics() | collected).get("episode_return_mean")
        losses = {name: value for name, value in metrics.items() if name.endswith("loss")}
        workers = describe_workers(collected)
        doing = "evaluating" if self.is_evaluating else "not learning yet" if self.clock.before_learning else ""
        self.logger.progress(self.step, *self.pace(), mean, losses, workers, doing)

    def pace(self) -> tuple[float, float]:
        """Recent steps per second, and the seconds left until the first budget is spent."""
        return self.clock.pace(self.step, self.updates, self.budgets())

    def _evaluate_when_due(self) -> None:
        """Evaluate every `eval_interval` steps; an evaluation that was not completed stays due."""
        interval, due = self.eval_interval, self.next_evaluation
        if not interval or self.step < due:
            return
        self.next_evaluation += interval * (1 + (self.step - due) // interval)
        try:
            self.evaluate()
        finally:
            if self.config.eval_episodes and self._evaluated_step != self.step:
                self.next_evaluation = due

    def evaluate(self, *, last: bool = False) -> dict[str, Any]:
        """Evaluate now; keep the best checkpoint and, unless `last` (as in `log_row`), check for early stopping.

        A signal ends the evaluation at once; then nothing is logged, and the result is empty.
        """
        if not self.config.eval_episodes:
            return {}
        self.is_evaluating = True
        try:
            with self.clock.pause("evaluate"):
                result = self.ranks.first(partial(self._play_evaluation, last=last))
        except Interruption:
            return {}
        finally:
            self.is_evaluating = False
        with self.clock.pause("evaluate"):
            self.last_evaluation = metrics = result.metrics()
            self.logger.log(self.step, {**metrics, "eval_returns": result.returns}, kind="eval", last=last)
            self._evaluated_step = self.step
            if not last:
                collected = self.session.collector.metrics(last=True)
                known = {**self.progress_metrics(), **collected, **self.read_latest()}
                self._watch_early_stopping({**known, **metrics})
            if metrics["eval_return_mean"] > self.best_return:
                self._save_best(metrics["eval_return_mean"])
        self._tell("on_evaluation", metrics)
        return metrics

    def _play_evaluation(self, *, last: bool) -> EvaluationResult:
        self._look_up()
        unasked = self.params.eval_interval is None and not last and self.step < self.config.total_timesteps
        episodes = min(self.config.eval_episodes, FEW) if unasked else self.config.eval_episodes
        return self.evaluator.evaluate(self.session.algorithm, episodes, deterministic=self.config.eval_deterministic)

    def _look_up(self) -> None:
        """Called between the steps of an evaluation: end it after a signal, and update the progress line."""
        if self.stop_signal is not None:
            raise Interruption
        if self.logger.progress_due:
            self._show_progress(read_metrics(self.latest))

    def _save_best(self, best_return: float) -> None:
        self._check_parameters()
        before, self.best_return = self.best_return, best_return
        try:
            self._write_checkpoint("best")
        except OSError as error:
            self.best_return = before
            self.logger.message(f"warning: {self.checkpoints.best} could not be written ({error.strerror or error})")

    def _watch_early_stopping(self, metrics: dict[str, Any]) -> None:
        rule = self.params.early_stopping
        if rule is None:
            return
        if rule.metric not in metrics:
            hint = did_you_mean(rule.metric, metrics)
            self.logger.message(f"warning: early_stopping watches {rule.metric!r}, which is not a metric here; {hint}")
        good = metrics.get(rule.metric, -math.inf) >= rule.threshold
        self.good_evaluations = self.good_evaluations + 1 if good else 0
        if self.good_evaluations >= rule.patience:
            self.stop_reason = "early_stopping"

    def _checkpoint_due(self) -> bool:
        if self.config.checkpoint_interval:
            return self.step >= self.next_checkpoint
        due = time.perf_counter() - self._last_save >= max(
            CHECKPOINT_SECONDS, MOST_SAVING * self._save_seconds  # a large buffer must not stall training for long
        )
        return due if self.ranks.count == 1 else bool(self.ranks.largest(due))

    def save_checkpoint(self, *, keep_step: bool = False) -> None:
        """Write `latest` and, on request, `step_<n>`."""
        interval = self.config.checkpoint_interval
        if interval and self.step >= self.next_checkpoint:
            self.next_checkpoint += interval * (1 + (self.step - self.next_checkpoint) // interval)
        begun = time.perf_counter()
        try:
            with self.clock.pause("checkpoint"):
                self._check_parameters()
                self._write_checkpoint("latest", replay=self.config.replay_in_checkpoint)
                self.saved = self.counts()
                if keep_step:
                    self._write_checkpoint(f"step_{self.step}")
        except OSError as error:
            newest = f"the newest is of step {self.saved[0]:.0f}" if self.saved else "there is none yet"
            where = f"{self.checkpoints.folder} ({error.strerror or error})"
            raise NotSaved(f"a checkpoint of step {self.step} cannot be written to {where}; {newest}") from error
        finally:
            self._last_save = time.perf_counter()
            self._save_seconds = self._last_save - begun

    def _write_checkpoint(self, name: str, *, replay: bool = False) -> None:
        tree = checkpoint_tree(self, replay=replay)

        def write() -> None:
            keep_lock(self.run_dir)
            if not (self.run_dir / "config.yaml").is_file():  # the folder was deleted
                write_run_files(self.run_dir, self.config, self.messages)
            self.checkpoints.save(name, tree)

        self.ranks.first(write)

    def counts(self) -> tuple[float, ...]:
        """Counters of the run; a new checkpoint is worth writing if one of them has changed since the last."""
        return self.step, self.updates, self.best_return

    def _restore(self, state: RunState) -> None:
        for name in RunState.model_fields.keys() - {"train_seconds"}:  # which the clock has
            setattr(self, name, getattr(state, name))
        self.episodes = deque(state.episodes, maxlen=100)
        if self.eval_interval:  # it may have changed with the budget
            self.next_evaluation = max(self.next_evaluation, self.eval_interval)

    def _check_parameters(self) -> None:
        if (bad := self.session.algorithm.first_bad_tensor()) is not None:
            self._fail(bad)

    def _fail(self, name: str, cause: Exception | None = None) -> None:
        self.session.collector.metrics(last=True)  # raises if an environment on the device has returned a NaN
        bad = self.session.algorithm.first_bad_tensor()
        where = f"the metric {name!r}" if bad is None else f"the tensor {bad!r}"
        raise TrainingFailure(
            f"{where} is not finite at step {self.step} (update {self.updates}); the last good checkpoint is "
            f"{self.checkpoints.latest}. A smaller learning_rate or max_grad_norm often helps."
        ) from cause

    def find_cause(self, error: Exception) -> None:
        """Raise that the learner or its last update is not finite, if so: its actions or errors caused the error."""
        bad = None
        with suppress(RuntimeError):  # a GPU may be lost
            bad = self.session.algorithm.first_bad_tensor()
            metrics = read_metrics(self.latest)
            bad = bad or next((name for name, value in metrics.items() if not math.isfinite(value)), None)
        if bad is not None:
            self._fail(bad, error)

    def _tell(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None and method(self, *arguments) is False and self.stop_reason is None:
                self.stop_reason = "callback"

    def abandon_turn(self) -> None:
        """Discard the experience of the current turn that is not stored yet, and the environments' episodes."""
        self.in_turn, self.abandoned = False, True
        self.session.collector.abandon()
        self.session.forget_returns()
        self.logger.message(
            "warning: stopped in the middle of a turn: an unfinished rollout is discarded, episodes start over, "
            "and a resume from here is not exact"
        )

    # the end -------------------------------------------------------------------------------------------------------

    def finish(self) -> dict[str, Any]:
        """Write the last checkpoint, evaluate, save the result, and return the run's metrics."""
        self.clock.stop()
        if self.latest and self._logged_update != self.updates:
            self.log_row(last=True)
        self.save_checkpoint(keep_step=bool(self.config.checkpoint_interval))
        known = self.last_evaluation.get("eval_episodes", 0) if self._evaluated_step == self.step else 0
        due = self.stop_reason not in ("SIGINT", "SIGTERM") and known < self.config.eval_episodes
        evaluated = due and bool(self.evaluate(last=True))
        if evaluated:
            self.save_checkpoint()
        number = int(self.ranks.largest(self.stop_signal or 0))  # which another rank may have got
        if number and due and not evaluated:
            self.stop_reason = signal.Signals(number).name
        self._tell("on_end")
        return {
            "global_step": self.step,
            **self.progress_metrics(),
            **self.last_evaluation,
            **self.collected_metrics,
            **self.session.collector.metrics(last=True),
            **self.read_latest(),
            **self.scheduled_values(),  # over what the last update says of one, such as SAC's alpha
            "train_seconds": self.clock.seconds,
            "stop_reason": self.stop_reason,
        }

    def close(self) -> None:
        """Close environments and files; everything is saved, so an exception in an environment is only a warning."""
        self.is_closing = True
        try:
            self.session.close()
        except Interruption:
            self.logger.message(f"warning: the environment {self.config.env_id} took too long to close")
        except Exception as error:
            if not isinstance(error, EnvironmentFailure):
                error = EnvironmentFailure.from_error(self.config.env_id, error)
            self.logger.message(f"warning: while closing, {error}")
        finally:
            self.is_closing = False
        self.logger.close()
