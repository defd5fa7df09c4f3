"""The whole training loop: collect, store, update with each batch that is due, then log, evaluate and save.

Also what happens when (`RunState`, `Cadence`, `TrainingClock`), and what a run tells (`Recorder`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field

from rl_training.algorithms.base import UpdateResult, read_metrics
from rl_training.config.params import Params, Schedule
from rl_training.config.train_config import TrainConfig
from rl_training.data.store import Timed, untimed
from rl_training.envs.stepper import Episode
from rl_training.errors import UserError
from rl_training.record.logger import RunLogger, SilentLogger
from rl_training.validation import StrictModel

if TYPE_CHECKING:
    from rl_training.run.build import Session
    from rl_training.run.run import Run

RECENT_SECONDS = 30.0
CHECKPOINT_SECONDS = 60.0
MOST_SAVING = 19  # minimum seconds of training per second of writing checkpoints
EVALUATIONS = 10  # default number of evaluations
AnyFloat = Annotated[float, Field(allow_inf_nan=True)]


def run_loop(session: Session, run: Run | Turns, timed: Timed = untimed) -> None:
    """Train until the run is finished; `timed` may replace the calls that make up a turn, to measure them."""
    algorithm, store, collect = session.algorithm, session.store, timed(session.collect, session.collector.part)
    add, batches, feedback = timed(store.add, "store"), timed(store.batches, "store"), timed(store.feedback, "store")
    update = timed(algorithm.update, "learn")
    while not run.finished():
        run.apply_schedules()
        experience = collect(store.request(run.own_step))
        run.count_steps(add(experience, run.own_step), experience.episodes)
        for phase, batch in batches(algorithm, run.own_step):
            result = update(batch, phase=phase, global_step=run.step, sync=False)
            run.count_update(result)
            feedback(batch, result)
        run.tick()


class Turns:
    """Takes the place of a `Run` to measure a session: it only counts, until `enough` turns are taken."""

    def __init__(self, step: int, enough: Callable[[Turns], bool]) -> None:
        self.step, self._first, self._enough = step, step, enough
        self.updates, self.learned = 0, False  # in the last turn

    @property
    def own_step(self) -> int:
        """A measurement has one process."""
        return self.step

    @property
    def taken(self) -> int:
        """The number of steps; a turn without any counts as one."""
        return self.step - self._first

    def finished(self) -> bool:
        """Whether these turns are enough."""
        return self._enough(self)

    def apply_schedules(self) -> None:
        """Begin a turn; a measurement is too short for schedules."""
        self.learned = False

    def count_steps(self, steps: int, episodes: Iterable[Episode]) -> None:
        """Count real transitions."""
        self.step += steps or 1

    def count_update(self, result: UpdateResult) -> None:
        """Count an update."""
        self.updates, self.learned = self.updates + 1, True

    def tick(self) -> None:
        """Nothing else is due."""


class RunState(StrictModel):
    """The counters of a run, as a checkpoint stores them. `Run` counts in it, its `Cadence` sets what is next."""

    model_config = ConfigDict(frozen=False)

    step: int = Field(ge=0)
    updates: int = Field(ge=0)
    train_seconds: float = Field(ge=0)
    best_return: float = Field(lt=math.inf, allow_inf_nan=True)  # minus infinity before the first evaluation
    good_evaluations: int = Field(ge=0)
    next_log: int = Field(ge=1)
    next_evaluation: int = Field(ge=0)
    next_checkpoint: int = Field(ge=0)
    episodes: list[tuple[float, int]]
    latest: dict[str, AnyFloat]  # metrics of the last update; tensors until somebody reads them
    collected_metrics: dict[str, AnyFloat]
    last_evaluation: dict[str, int | AnyFloat]
    successes: list[bool] = []  # of the last episodes that said so
    logged: dict[str, AnyFloat] = {}  # what callbacks have logged
    abandoned: bool = False  # saved in the middle of a turn, so without the environments' episodes


def summarize_episodes(state: RunState) -> dict[str, float]:
    """Mean return, length and success of the last training episodes, if there are any."""
    found = {}
    if state.episodes:
        returns, lengths = zip(*state.episodes, strict=True)
        found = {"episode_return_mean": sum(returns) / len(returns), "episode_length_mean": sum(lengths) / len(lengths)}
    return found | ({"success_rate": sum(state.successes) / len(state.successes)} if state.successes else {})


def evaluation_interval(config: TrainConfig, params: Params) -> int:
    """Steps between evaluations; 0: there are none before the end."""
    return -(-config.total_timesteps // EVALUATIONS) if params.eval_interval is None else params.eval_interval


def first_evaluation(config: TrainConfig, params: Params) -> int:
    """Steps until the first evaluation; 0 where learning before the first step is evaluated there."""
    return 0 if params.facts.pretrain_updates else evaluation_interval(config, params)


def first_state(config: TrainConfig, params: Params, step: int = 0) -> RunState:
    """The state of a run that begins at `step`."""
    return RunState(
        step=step, updates=0, train_seconds=0.0, best_return=-math.inf, good_evaluations=0,
        next_log=config.log_interval, next_evaluation=step + first_evaluation(config, params),
        next_checkpoint=step + config.checkpoint_interval, episodes=[], latest={}, collected_metrics={},
        last_evaluation={},
    )  # fmt: skip


class Cadence:
    """What is due at the present step of a run, and the value of every schedule there."""

    def __init__(self, config: TrainConfig, params: Params, state: RunState) -> None:
        self.config, self.state = config, state
        self.schedules: dict[str, Schedule] = {**params.built_in_schedules(), **params.schedules}
        limits = {
            "total_timesteps": config.total_timesteps, "max_updates": params.max_updates,
            "max_seconds": config.max_seconds,
        }  # fmt: skip
        self.budgets = {name: math.inf if limit is None else limit for name, limit in limits.items()}
        self.store_numbers = params.facts.store_numbers  # of which the store has its own value
        self.eval_interval = evaluation_interval(config, params)
        self.first_update = params.facts.pretrain_updates  # from which on evaluations are due
        if self.eval_interval:  # it may have changed with the budget
            state.next_evaluation = max(state.next_evaluation, first_evaluation(config, params))
        self.clock = TrainingClock(state)
        self._last_save, self._save_seconds = time.perf_counter(), 0.0

    def scheduled_values(self) -> dict[str, float]:
        """The value of every schedule at this step."""
        progress = min(1.0, self.state.step / self.config.total_timesteps)
        return {name: schedule.value(progress) for name, schedule in self.schedules.items()}

    def _spent(self) -> tuple[float, ...]:
        """What is used up of each budget."""
        return self.state.step, self.state.updates, self.clock.seconds

    def spent_budget(self) -> str | None:
        """The setting of a budget that is used up."""
        spent = zip(self.budgets.items(), self._spent(), strict=True)
        return next((name for (name, budget), used in spent if used >= budget), None)

    def pace(self) -> tuple[float, float]:
        """Recent steps per second, and the seconds left until the first budget is spent.

        The seconds are infinite as long as nothing is known about the speed of learning.
        """
        *counts, seconds = spent = self._spent()
        speeds = self.clock.recent.update(seconds, *counts)
        *amounts, left = (budget - used for budget, used in zip(self.budgets.values(), spent, strict=True))
        if min(amounts) <= 0:
            return speeds[0], 0.0
        if not self.clock.before_learning:
            needed = [amount / speed for amount, speed in zip(amounts, speeds, strict=True) if speed > 0]
            left = min([left, *needed])
        return speeds[0], max(0.0, left)

    def takes_log(self) -> bool:
        """Whether a row of metrics is due; if so, the next one is set."""
        state, interval = self.state, self.config.log_interval
        if state.updates < state.next_log:
            return False
        state.next_log = state.updates - state.updates % interval + interval
        return True

    def evaluation_due(self) -> bool:
        """Whether an evaluation is due; one that was not completed stays due."""
        is_due = self.state.step >= self.state.next_evaluation and self.state.updates >= self.first_update
        return bool(self.eval_interval) and is_due

    def evaluated(self) -> None:
        """An evaluation is complete: if it was due, the next one is an interval later."""
        if self.evaluation_due():
            passed = (self.state.step - self.state.next_evaluation) // self.eval_interval
            self.state.next_evaluation += self.eval_interval * (1 + passed)

    def checkpoint_due(self) -> bool:
        """Whether a checkpoint is due: by steps if the config has an interval, otherwise by the clock."""
        if self.config.checkpoint_interval:
            return self.state.step >= self.state.next_checkpoint
        # a large buffer must not stall training for long
        return time.perf_counter() - self._last_save >= max(CHECKPOINT_SECONDS, MOST_SAVING * self._save_seconds)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A checkpoint is written in this block; the next one is due an interval later."""
        state, interval = self.state, self.config.checkpoint_interval
        if interval and state.step >= state.next_checkpoint:
            state.next_checkpoint += interval * (1 + (state.step - state.next_checkpoint) // interval)
        begun = time.perf_counter()
        try:
            with self.clock.pause("checkpoint"):
                yield
        finally:
            self._last_save = time.perf_counter()
            self._save_seconds = self._last_save - begun


class RecentSpeeds:
    """How fast counts have grown over the last half minute of training, or since this was made."""

    def __init__(self, seconds: float, *counts: float) -> None:
        self._seen = deque([(seconds, *counts)])

    def update(self, seconds: float, *counts: float) -> list[float]:
        """The growth per second of each count, now that these are reached after these seconds of training."""
        while len(self._seen) > 1 and seconds - self._seen[1][0] >= RECENT_SECONDS:
            self._seen.popleft()
        first_second, *first_counts = self._seen[0]
        self._seen.append((seconds, *counts))
        passed = max(seconds - first_second, 1e-9)
        return [(count - first) / passed for count, first in zip(counts, first_counts, strict=True)]


class TrainingClock:
    """Seconds of training, without pauses and summed over resumes, and how fast steps and updates come in them."""

    def __init__(self, state: RunState) -> None:
        self._state, self._seconds, self._is_stopped = state, state.train_seconds, False
        self.paused: dict[str, float] = {}  # seconds in this process, by what they were spent on
        self.start()

    def start(self) -> None:
        """Count from here on: the time since the clock was made does not count."""
        self._resumed_at = time.perf_counter()
        self._first = self._seconds, self._state.step, self._state.updates
        self.before_learning = self.has_restarted = False
        self.recent = RecentSpeeds(*self._first)

    def stop(self) -> None:
        """Count no more."""
        self._seconds, self._is_stopped = self.seconds, True

    @property
    def seconds(self) -> float:
        """Seconds of training up to now."""
        return self._seconds if self._is_stopped else self._seconds + time.perf_counter() - self._resumed_at

    @contextmanager
    def pause(self, part: str) -> Iterator[None]:
        """Do not count the time of this block as training, but as `part`."""
        was_stopped, begun = self._is_stopped, time.perf_counter()
        self.stop()
        try:
            yield
        finally:
            self._resumed_at, self._is_stopped = time.perf_counter(), was_stopped
            self.paused[part] = self.paused.get(part, 0.0) + self._resumed_at - begun

    def steps_per_second(self) -> float:
        """The mean since the start of this process."""
        second, step, _ = self._first
        return (self._state.step - step) / max(self.seconds - second, 1e-9)

    def tick(self) -> None:
        """Note a turn, and measure speeds anew after the first one with an update.

        Steps before it are taken many times as fast and say nothing about the time that the others will take.
        """
        was_before, self.before_learning = self.before_learning, self._state.updates == self._first[2]
        self.has_restarted = was_before and not self.before_learning
        if self.has_restarted:
            self.recent = RecentSpeeds(self.seconds, self._state.step, self._state.updates)


def name_taken(name: str) -> UserError:
    """The error about a metric of a user's own with the name of one of ours."""
    return UserError(f"run.log({name!r}, ...): every run has that; call yours my/{name}, for example.")


class Recorder:
    """Collects the metrics of a run from all its parts, and logs them."""

    def __init__(self, session: Session, cadence: Cadence, run_dir: Path, *, console: bool, append: bool) -> None:
        self.session, self.cadence, self.state, config = session, cadence, cadence.state, session.config
        self.logger = SilentLogger() if session.ranks.rank else RunLogger(
            run_dir, console=console, total_steps=config.total_timesteps, append=append, resume_step=self.state.step,
            loggers=config.loggers, config=config.model_dump(mode="json"),
        )  # fmt: skip
        self.logged_update = self.evaluated_step = -1

    def progress_metrics(self) -> dict[str, float]:
        """Counters, episode statistics and scheduled values."""
        episodes = summarize_episodes(self.state)
        return {"updates": self.state.updates} | episodes | self.cadence.scheduled_values()

    def read_latest(self) -> dict[str, float]:
        """Metrics of the last update, over all ranks."""
        metrics = read_metrics(self.state.latest)
        return dict(zip(metrics, self.session.ranks.average(list(metrics.values())), strict=True))

    def metrics(self, latest: Mapping[str, float] | None = None, *, last: bool = True) -> dict[str, Any]:
        """The newest value of every metric; `latest` are those of the last update, if they were read already.

        `last` is as in `Collector.metrics`.
        """
        collected = self.state.collected_metrics | self.session.collector.metrics(last=last)
        latest = self.read_latest() if latest is None else latest
        # schedules go over what the last update says of one, such as SAC's alpha
        own = {**self.progress_metrics(), **collected, **latest, **self.cadence.scheduled_values()}
        if taken := own.keys() & self.state.logged.keys():
            raise name_taken(min(taken))
        return own | self.state.logged

    def log_row(self, latest: Mapping[str, float], *, last: bool) -> None:
        """Log one row of metrics; `last` means that it is logged only because the run ends."""
        row = self.metrics(latest, last=last)
        row["steps_per_second"] = self.cadence.clock.steps_per_second()
        self.logger.log(self.state.step, row, last=last)
        self.logged_update = self.state.updates

    def log_evaluation(self, metrics: Mapping[str, Any], returns: list[float], *, last: bool) -> None:
        """Log the result of an evaluation."""
        self.logger.log(self.state.step, {**metrics, "eval_returns": returns}, kind="eval", last=last)
        self.evaluated_step = self.state.step

    def show_progress(self, *, evaluates: bool = False, last: bool = False) -> None:
        """Show the progress line if it is due, or in any case if it is the `last` of the run."""
        clock = self.cadence.clock
        if not (last or self.logger.progress_due) or (clock.has_restarted and not evaluates):
            return  # after a restart no speed is known yet; the next turn shows it
        collected = self.session.collector.metrics(last=True)
        mean = (self.progress_metrics() | collected).get("episode_return_mean")
        losses = {name: value for name, value in read_metrics(self.state.latest).items() if name.endswith("loss")}
        doing = "evaluating" if evaluates else "not learning yet" if clock.before_learning else ""
        self.logger.progress(self.state.step, *self.cadence.pace(), mean, losses, doing, last=last)
