"""`Run`: counting, logging, evaluation and checkpoints of one run; `interruption.py` handles ending it early.

`Callback` is the base class for user code that a run calls.
"""

from __future__ import annotations

import errno
import inspect
import math
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from rl_training.algorithms.base import UpdateResult, read_metrics
from rl_training.envs.factory import read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.envs.stepper import Episode, Step
from rl_training.errors import EnvironmentFailure, TrainingFailure, UserError, did_you_mean, sb3_hints
from rl_training.record.checkpoints import CheckpointFolder
from rl_training.run.build import Session, describe_machine
from rl_training.run.evaluation import EvaluationResult, Evaluator
from rl_training.run.folder import keep_lock, write_run_files
from rl_training.run.interruption import Interruption, StopRequest, can_save_after
from rl_training.run.learner import SCHEMA, TrainedPolicy, check_same_spaces
from rl_training.run.loop import Cadence, Recorder, RunState, first_state, name_taken
from rl_training.run.ranks import resume_command

FEW = 5  # maximum episodes of evaluations that were not asked for, except the last
LAST_EPISODES = 100  # of which the log has the mean
# Why a run stops; if ranks differ, the last of these applies to all
HEADS = {"step", "kind", "time", "last", "steps_per_second", "global_step", "train_seconds", "stop_reason"}
REASONS = (None, "total_timesteps", "max_updates", "max_seconds", "early_stopping", "callback", "SIGINT", "SIGTERM")


class Callback:
    """Base class of callbacks: override the methods you need; return False from any of them to stop the run.

    `run` has `step`, `updates`, `config`, `run_dir`, `metrics`, the newest value of every logged metric, `envs`,
    `predict`, and `log`, `save_checkpoint` and `evaluate_in` to call.
    """

    def __getattr__(self, name: str) -> NoReturn:
        hint = f"; {remark}" if (remark := sb3_hints()["remarks"].get(name)) else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    def on_start(self, run: Run) -> bool | None:
        """Called before the first step."""

    def on_step(self, run: Run, step: Step, infos: list[Any]) -> bool | None:
        """Called after each step of the N training environments, which must be in this process (see `Run.envs`).

        `step` has `rewards`, `terminated` and `truncated` [N], and `obs` as the policy sees them; where an episode
        ended, the info is its last one. `run.step` changes, and the run stops, at the end of the turn.
        """

    def on_update(self, run: Run) -> bool | None:
        """Called after each turn of the loop."""

    def on_evaluation(self, run: Run, metrics: dict[str, Any]) -> bool | None:
        """Called after each evaluation."""

    def on_end(self, run: Run) -> bool | None:
        """Called after the last step."""


def read_callbacks(callbacks: Iterable[Callback] | Callback | None) -> list[Callback]:
    """The callbacks as a list, checked: each must have at least one method to call. One alone may be given as it is."""
    told = list(callbacks) if isinstance(callbacks, Iterable) else [] if callbacks is None else [callbacks]
    events = [name for name in vars(Callback) if name.startswith("on_")]
    for callback in told:
        if isinstance(callback, type):
            name = callback.__name__
            raise UserError(f"callbacks has the class {name}; give an object of it, which {name}() makes.")
        if inspect.isroutine(callback):
            what = f"callbacks has the function {callback.__name__}"
            raise UserError(f"{what}; give an object of a class with a method such as on_update(self, run).")
        if theirs := [name for name in dir(callback) if name.startswith("_on_") and name in sb3_hints()["names"]]:
            (ours,) = sb3_hints()["names"][theirs[0]]
            form = f"{ours}({', '.join(inspect.signature(getattr(Callback, ours)).parameters)})"
            raise UserError(f"the callback {type(callback).__name__} has {theirs[0]}, which is {form} here.")
        if not any(callable(getattr(callback, name, None)) for name in events):
            raise UserError(f"{callback!r} is not a callback; it needs one of the methods {', '.join(events)}.")
    return told


class Metrics(dict[str, float]):
    """Metrics to read; changing them would log nothing, so it is an error."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError("run.metrics is for reading; run.log(name, value) logs a metric of your own.")

    __setitem__ = update = setdefault = __ior__ = _refuse


class NotSaved(TrainingFailure):
    """A checkpoint could not be written: `what` says so, and `advice` is what to do if the run ends with it."""

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(what + advice)
        self.what = what


def first_not_finite(metrics: Mapping[str, float]) -> str | None:
    """The first metric that is a NaN or an infinity."""
    return next((name for name, value in metrics.items() if not math.isfinite(value)), None)


class Run:
    """One run: `state` has its counters, `cadence` says what is due, and `recorder` logs.

    `stop` is set by signals; `phase` tells them what they would interrupt.
    """

    def __init__(
        self, session: Session, run_dir: Path, *, callbacks: Iterable[Callback] = (), console: bool = False,
        restored: RunState | None = None, messages: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.session, self.run_dir, self.ranks = session, run_dir, session.ranks
        self.config, self.params = session.config, session.params
        self.callbacks, self.messages = list(callbacks), list(messages)
        self._policy = TrainedPolicy(session.algorithm, session.spaces, self.config)
        self.state = first_state(self.config, self.params) if restored is None else restored
        self.cadence = Cadence(self.config, self.params, self.state)
        self.checkpoints = CheckpointFolder(run_dir / "checkpoints", keep=self.config.checkpoint_keep)
        self.recorder = Recorder(session, self.cadence, run_dir, console=console, append=restored is not None)
        self.clock, self.logger, self.shows_progress = self.cadence.clock, self.recorder.logger, console
        self.evaluator = Evaluator(
            session.recipe, session.spaces, self.config.seed, max_steps=self.config.eval_max_steps,
            check=self._look_up, warn=self.logger.message, engine=session.engine,
        )  # fmt: skip
        self.machine = describe_machine(self.config)
        self.stop = StopRequest()
        self.stop_reason: str | None = None
        self.phase: Literal["between turns", "turn", "evaluation", "closing"] = "between turns"
        self.saved: tuple[float, ...] | None = None
        self._checks_every_update = self.config.device == "cpu"

    @property
    def step(self) -> int:
        """Steps of all environments since the start of the run."""
        return self.state.step

    @property
    def updates(self) -> int:
        """Updates since the start of the run."""
        return self.state.updates

    # for callbacks -------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of every logged metric, as floats."""
        return Metrics(self.recorder.metrics())

    def log(self, name: str, value: Any) -> None:
        """Log a number of your own; every row of metrics from now on has its newest value."""
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"run.log({name!r}, ...) got a {type(value).__name__}; it takes one number.") from None
        if not isinstance(name, str) or name in HEADS or name.startswith("eval_"):
            raise name_taken(name)
        self.state.logged[name] = number

    @property
    def _watches_steps(self) -> bool:
        """Whether a callback has an `on_step`."""
        told = (getattr(callback, "on_step", Callback.on_step) for callback in self.callbacks)
        return any(getattr(method, "__func__", method) is not Callback.on_step for method in told)

    @property
    def envs(self) -> list[Any]:
        """The training environments, without wrappers; they must be in this process and steppable one by one."""
        found = self.session.collector.envs
        if not found:
            where = f"execution_backend {self.config.execution_backend}, vectorization {self.config.vectorization}"
            raise UserError(
                f"on_step and run.envs need environments in this process, but they are elsewhere ({where}); set "
                "execution_backend='local_sync' and vectorization='sync'."
            )
        return [env.unwrapped for env in found]

    def predict(self, obs: Any, deterministic: bool = True, *, action_mask: Any = None) -> Any:
        """The action of the present policy, as `predict` of a trained one."""
        return self._policy.predict(obs, deterministic, action_mask=action_mask)

    def evaluate_in(self, env: Any, episodes: int = 5, *, deterministic: bool = True) -> dict[str, Any]:
        """Play whole episodes in another environment (an id, a class, a function or an instance) with the same spaces.

        The seeds of the episodes are always the same. Nothing is logged: `log` what you need of the result.
        """
        wrappers = {name: value for name, value in self.config.env_kwargs.items() if name == "wrappers"}
        recipe = read_recipe(self.config.env_id, wrappers, env)
        with self.clock.pause("evaluate"):
            check_same_spaces(self.session.spaces, probe_spaces(recipe))
            evaluator = Evaluator(recipe, self.session.spaces, self.config.seed, max_steps=self.config.eval_max_steps)
            return evaluator.evaluate(self.session.algorithm, episodes, deterministic=deterministic).metrics()

    # called by the loop ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Write the first checkpoint, so that one exists whenever the run is killed."""
        for message in self.messages:
            self.logger.message(message)
        if self._watches_steps and self.envs:
            self.session.collector.watch_steps(partial(self._tell, "on_step"))
        self.ranks.first(self._write_run_files)
        self.save_checkpoint()
        self._tell("on_start")
        if self.cadence.evaluation_due():  # a signal had ended the run during this evaluation
            self.evaluate()
        self.clock.start()

    def finished(self) -> bool:
        """Whether a budget is used up or a stop was requested."""
        if self.stop_reason is None:
            self.stop_reason = self.cadence.spent_budget()
            if self.stop.signal is not None and self.stop_reason in (None, "max_seconds"):
                self.stop_reason = self.stop.name
        if self.ranks.count > 1:
            known = self.stop_reason if self.stop_reason in REASONS else "callback"  # a callback may return anything
            self.stop_reason = REASONS[int(self.ranks.largest(REASONS.index(known)))]
        return self.stop_reason is not None

    @property
    def own_step(self) -> int:
        """Steps of this rank's environments."""
        return self.step // self.ranks.count

    def apply_schedules(self) -> None:
        """Set every scheduled number to its value at this step, in every part that reads it."""
        self.phase = "turn"
        algorithm, store = self.session.algorithm, self.session.store
        for name, value in self.cadence.scheduled_values().items():
            if algorithm.scheduled(name):
                algorithm.set_number(name, value)
            if name in self.cadence.store_numbers:  # a replay buffer, for example, has the learner's discount too
                setattr(store, name, value)

    def count_steps(self, steps: int, episodes: Iterable[Episode]) -> None:
        """Count real transitions (every rank has the same number) and finished episodes."""
        state = self.state
        state.step += steps * self.ranks.count
        for episode_return, length, success in episodes:
            state.episodes.append((episode_return, length))
            state.successes += [] if success is None else [success]
        del state.episodes[:-LAST_EPISODES], state.successes[:-LAST_EPISODES]
        state.collected_metrics = self.session.store.metrics

    def count_update(self, result: UpdateResult) -> None:
        """Count an update; on the CPU, where the check is cheap, stop at the first NaN or infinity."""
        self.state.updates += 1
        self.state.latest = result.metrics
        if self._checks_every_update:
            value = float(result.metrics.get(result.watch, 0.0))
            if not math.isfinite(value if self.ranks.count == 1 else self.ranks.average([value])[0]):
                self._fail(result.watch)
        if self.stop.interruption is not None:
            raise self.stop.interruption

    def tick(self) -> None:
        """Log, evaluate, checkpoint and stop early, each when it is due."""
        self.phase, self.state.abandoned = "between turns", False
        self.clock.tick()
        if self.cadence.takes_log():
            self.log_row()
        elif self.shows_progress and self.logger.progress_due:
            self.recorder.show_progress()
        if self.cadence.evaluation_due():
            self.evaluate()
        due = self.cadence.checkpoint_due()
        if due if self.ranks.count == 1 else self.ranks.largest(due):
            try:
                self.save_checkpoint(keep_step=bool(self.config.checkpoint_interval))
            except NotSaved as error:
                self.logger.message(f"warning: {error.what}; the next checkpoint will be tried as usual")
        if self.callbacks:
            self._tell("on_update")

    # what is due -------------------------------------------------------------------------------------------------

    def log_row(self, *, last: bool = False) -> None:
        """Log one row of metrics, after checking for NaN; `last` means that it is logged only because the run ends."""
        latest = self.recorder.read_latest()
        if bad := first_not_finite(latest):
            self._fail(bad)
        self.recorder.log_row(latest, last=last)
        self.recorder.show_progress()

    def evaluate(self, *, last: bool = False) -> dict[str, Any]:
        """Evaluate now; keep the best checkpoint and, unless `last` (as in `log_row`), check for early stopping.

        A signal ends the evaluation at once; then nothing is logged, and the result is empty.
        """
        if not self.config.eval_episodes:
            self.cadence.evaluated()
            return {}
        self.phase = "evaluation"
        try:
            with self.clock.pause("evaluate"):
                result = self.ranks.first(partial(self._play_evaluation, last=last))
        except Interruption:
            return {}
        finally:
            self.phase = "between turns"
        self.cadence.evaluated()
        with self.clock.pause("evaluate"):
            self.state.last_evaluation = metrics = result.metrics()
            self.recorder.log_evaluation(metrics, result.returns, last=last)
            if not last:
                self._watch_early_stopping(self.metrics | metrics)
            if metrics["eval_return_mean"] > self.state.best_return:
                self._save_best(metrics["eval_return_mean"])
        self._tell("on_evaluation", metrics)
        return metrics

    def _play_evaluation(self, *, last: bool) -> EvaluationResult:
        self._look_up()
        unasked = self.params.eval_interval is None and not last and self.step < self.config.total_timesteps
        episodes = min(self.config.eval_episodes, FEW) if unasked else self.config.eval_episodes
        is_best = self.config.eval_deterministic
        try:
            return self.evaluator.evaluate(self.session.algorithm, episodes, deterministic=is_best)
        finally:
            if self.evaluator.has_moved:
                self.session.start_over()

    def _look_up(self) -> None:
        """Called between the steps of an evaluation: end it after a signal, and update the progress line."""
        if self.stop.signal is not None:
            raise Interruption
        self.recorder.show_progress(evaluates=True)

    def _save_best(self, best_return: float) -> None:
        self._check_parameters()
        before, self.state.best_return = self.state.best_return, best_return
        try:
            self._write_checkpoint("best")
        except OSError as error:
            self.state.best_return = before
            self.logger.message(f"warning: {self.checkpoints.best} could not be written ({error.strerror or error})")

    def _watch_early_stopping(self, metrics: dict[str, Any]) -> None:
        rule = self.params.early_stopping
        if rule is None:
            return
        if rule.metric not in metrics:
            hint = did_you_mean(rule.metric, metrics)
            self.logger.message(f"warning: early_stopping watches {rule.metric!r}, which is not a metric here; {hint}")
        good = metrics.get(rule.metric, -math.inf) >= rule.threshold
        self.state.good_evaluations = self.state.good_evaluations + 1 if good else 0
        if self.state.good_evaluations >= rule.patience:
            self.stop_reason = "early_stopping"

    def save_checkpoint(self, *, keep_step: bool = False) -> None:
        """Write `latest` and, on request, `step_<n>`."""
        if self.phase == "turn":
            raise UserError("a checkpoint is written between turns; call run.save_checkpoint in on_update.")
        try:
            with self.cadence.saving():
                self._check_parameters()
                self._write_checkpoint("latest", replay=self.config.replay_in_checkpoint)
                self.saved = self.counts()
                if keep_step:
                    self._write_checkpoint(f"step_{self.step}")
        except OSError as error:
            newest = f"the newest is of step {self.saved[0]:.0f}" if self.saved else "there is none yet"
            where = f"{self.checkpoints.folder} ({error.strerror or error})"
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            command = f"{resume_command(self.ranks.count)} --checkpoint {self.checkpoints.latest}"
            then = command + self.config.named_options if self.saved else "start again"
            advice = f"; free space, then {then}" if is_full else ""
            what = f"a checkpoint of step {self.step} cannot be written to {where}; {newest}"
            raise NotSaved(what, advice) from error

    def _write_checkpoint(self, name: str, *, replay: bool = False) -> None:
        source = self._source_state()
        if not replay:
            source.pop("replay", None)
        state, algorithm = self.state, dict(self.session.algorithm.state_dict())
        state.abandoned = bool(self.ranks.largest(state.abandoned))
        counters = {**dict(state), "train_seconds": self.clock.seconds, "latest": self.recorder.read_latest()}
        others = self.ranks.gather(algorithm, source)
        tree = {
            "schema": SCHEMA,
            "config": self.config.model_dump(mode="json"),
            "spaces": self.session.spaces.to_dict(),
            "algorithm": algorithm,
            "source": source,
            "run": counters,
            "machine": self.machine,
            **({"ranks": others} if others else {}),
        }

        def write() -> None:
            keep_lock(self.run_dir)
            if not (self.run_dir / "config.yaml").is_file():  # the folder was deleted
                self._write_run_files()
            self.checkpoints.save(name, tree)

        self.ranks.first(write)

    def _write_run_files(self) -> None:
        write_run_files(self.run_dir, self.config, self.machine, self.messages)

    def _source_state(self) -> dict[str, Any]:
        try:
            return self.session.source_state()
        except Exception as error:  # because an environment is gone, for example
            if self.state.abandoned or not self.session.collector.started or not can_save_after(error):
                raise
            self.logger.message(f"warning: {error}")
            self.abandon_turn()
            return self.session.source_state()

    def counts(self) -> tuple[float, ...]:
        """Counters of the run; a new checkpoint is worth writing if one of them has changed since the last."""
        return self.step, self.updates, self.state.best_return

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
            bad = bad or first_not_finite(read_metrics(self.state.latest))
        if bad is not None:
            self._fail(bad, error)

    def _tell(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None and method(self, *arguments) is False and self.stop_reason is None:
                self.stop_reason = "callback"

    def abandon_turn(self) -> None:
        """Discard the experience of the current turn that is not stored yet, and the environments' episodes."""
        self.phase, self.state.abandoned = "between turns", True
        self.session.collector.abandon()
        self.session.forget_returns()
        self.logger.message(
            "warning: stopped in the middle of a turn: an unfinished rollout is discarded, episodes start over, "
            "and a resume from here is not exact"
        )

    def leave_turn(self, error: BaseException) -> None:
        """Abandon the turn that this error interrupted after a signal, which is why the run stops."""
        self.abandon_turn()
        if not isinstance(error, Interruption):
            self.logger.message(f"warning: after the signal there was {type(error).__name__}: {error}")
        self.stop_reason = self.stop.name

    # the end -------------------------------------------------------------------------------------------------------

    def finish(self) -> dict[str, Any]:
        """Write the last checkpoint, evaluate, save the result, and return the run's metrics."""
        self.clock.stop()
        if self.state.latest and self.recorder.logged_update != self.updates:
            self.log_row(last=True)
        self.save_checkpoint(keep_step=bool(self.config.checkpoint_interval))
        known = self.state.last_evaluation.get("eval_episodes", 0) if self.recorder.evaluated_step == self.step else 0
        due = self.stop_reason not in ("SIGINT", "SIGTERM") and known < self.config.eval_episodes
        evaluated = due and bool(self.evaluate(last=True))
        if evaluated:
            self.save_checkpoint()
        number = int(self.ranks.largest(self.stop.signal or 0))  # which another rank may have got
        if number and due and not evaluated:
            self.stop_reason = signal.Signals(number).name
        logged = dict(self.state.logged)
        self._tell("on_end")
        if self.state.logged != logged:
            self.log_row(last=True)
        if self.shows_progress:
            self.recorder.show_progress(last=True)
        return {
            "global_step": self.step,
            **self.recorder.progress_metrics(),
            **self.state.last_evaluation,
            **self.metrics,
            "train_seconds": self.clock.seconds,
            "stop_reason": self.stop_reason,
        }

    def close(self) -> None:
        """Close environments and files; everything is saved, so an exception in an environment is only a warning."""
        self.phase = "closing"
        try:
            self.session.close()
        except Interruption:
            self.logger.message(f"warning: the environment {self.config.env_id} took too long to close")
        except Exception as error:
            if not isinstance(error, EnvironmentFailure):
                error = EnvironmentFailure.from_error(self.config.env_id, error)
            self.logger.message(f"warning: while closing, {error}")
        finally:
            self.phase = "between turns"
        self.logger.close()
