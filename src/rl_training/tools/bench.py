"""Measure where the time of a short run goes, how far it is from its floor, and which settings are faster."""

from __future__ import annotations

import math
import os
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rl_training.collect.local import LocalCollector
from rl_training.config.choices import MOST_THREADS
from rl_training.config.params import read_params
from rl_training.config.spec import get_algorithm_spec
from rl_training.config.train_config import TrainConfig
from rl_training.data.rollout_store import RolloutStore
from rl_training.errors import UserError
from rl_training.run.build import Session, closed_on_error, open_session
from rl_training.run.cadence import first_state
from rl_training.run.interruption import stop_error, stop_on_signals
from rl_training.run.loop import Turns, run_loop
from rl_training.run.run import Run
from rl_training.tools.floor import Floor, measure_floor
from rl_training.tools.stopwatch import Stopwatch
from rl_training.tools.worker_cost import WorkerCost, measure_workers

PARTS = (  # of a turn (run/loop.py, collect/local.py), and what pauses the clock of a run
    "environment", "act", "rollout on the device", "wait for workers", "store", "learn", "evaluate", "checkpoint",
)  # fmt: skip
REST = "rest"
WORDS = {  # how to describe a part as the bottleneck, and its floor
    "environment": ("the environment", "its own steps alone"),
    "act": ("choosing actions", "matrix products alone"),
    "rollout on the device": ("rollouts on the device", "environment and matrix products alone"),
    "wait for workers": ("waiting for workers", ""),
    "store": ("storing and sampling", ""),
    "learn": ("learning", "matrix products alone"),
    REST: ("the loop around all parts", ""),
}
FLOORS = {
    "environment": ("environment",), "act": ("act",), "rollout on the device": ("environment", "act"),
    "learn": ("learn",),
}  # fmt: skip
MOST_RANDOM = 1_000  # maximum random steps before a measurement learns, whatever learning_starts is
WORKER_SECONDS = 0.5  # for each measurement of the cost of workers
MOST_WAITING = 10_000  # maximum steps that a measurement waits for an update
PACE_SECONDS, ROUNDS = 0.3, 3  # for measuring steps/s; the best round counts
TURN_SECONDS = 1.0  # if a turn takes longer, trials use shorter rollouts
LONG_START = 10.0  # if the first update comes later than this, in seconds, no other setting is tried
MUCH = 0.25  # share of the time from which a part is worth trying other settings
MANY_TIMES = 4  # multiple of the environments that is tried
GAIN = 1.1  # a smaller gain may be noise


class Trial(NamedTuple):
    """A setting that was tried, its steps/s as a multiple of the run's, and the seconds that compiling took."""

    setting: str
    gain: float
    compiling: float = 0.0

    def describe(self, of: str = "") -> str:
        """The gain, and the one-time cost of compiling."""
        once = f", after {self.compiling:.0f} s of compiling" if self.compiling else ""
        return f"{self.setting}: {self.gain:.2f} times{of}{once}"


@dataclass
class Breakdown:
    """Seconds of a run by part; each excludes the parts called inside it."""

    config: TrainConfig
    steps: int = 0
    updates: int = 0
    total_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    workers: WorkerCost | None = None
    floor: Floor | None = None  # None for a run with workers
    pace: float = 0.0  # steps/s of turns alone, the best of several rounds, measured like the floor and the trials
    trials: tuple[Trial, ...] = ()

    @property
    def steps_per_second(self) -> float:
        """Environment steps per second of training, without evaluations and checkpoints, as a run counts them."""
        aside = self.seconds.get("evaluate", 0.0) + self.seconds.get("checkpoint", 0.0)
        return self.steps / max(self.total_seconds - aside, 1e-9)

    def share(self, *parts: str) -> float:
        """The share of a part in the time of the run."""
        return sum(self.seconds.get(part, 0.0) for part in parts) / max(self.total_seconds, 1e-9)

    def describe_floor(self) -> str:
        """The floor in microseconds per step, and the share of its speed that the run reaches at its best."""
        assert self.floor is not None
        environment, act, learn = (1e6 * seconds for seconds in self.floor)
        alone = f"environment alone {environment:,.1f} + " if environment else ""
        of = f"acting {act:,.1f}, learning {learn:,.1f}" if act else "learning"
        graph = " as a CUDA graph" if self.config.device.startswith("cuda") else ""
        total = 1e6 * self.floor.total
        return (
            f"{alone}matrix products{graph} {act + learn:,.1f} ({of}) = {total:,.1f} µs per step; "
            f"the run's best round, {self.pace:,.0f} steps/s, is {self.floor.total * self.pace:.0%} of that speed"
        )

    def describe_bottleneck(self) -> str:
        """The part that takes longest, and the share of its time that its floor would take."""
        part = max(WORDS, key=self.share)
        name, alone = WORDS[part]
        said = f"{name}, {self.share(part):.0%} of the time"
        if self.floor is None or part not in FLOORS:
            return said
        least = sum(getattr(self.floor, parts) for parts in FLOORS[part])
        return f"{said}; {alone} would take {min(1.0, least * self.steps / self.seconds[part]):.0%} of that"

    def describe_trials(self) -> str:
        """The settings that were tried, the best first."""
        said = [self.trials[0].describe(" the steps/s"), *(trial.describe() for trial in self.trials[1:])]
        return "; ".join(said) if self.trials[0].gain >= GAIN else f"nothing that was tried ({'; '.join(said)})"


def benchmark(config: TrainConfig) -> Breakdown:
    """Run the config in a temporary folder and measure where the time of its loop goes; nothing is left behind.

    The measurement starts when the run learns: the random steps before that would make it look faster.
    """
    begun, floor = time.perf_counter(), None
    session = open_measured(config)
    with closed_on_error(session):
        first = warm_up(session)
        tries = time.perf_counter() - begun < LONG_START and not session.config.has_workers
        if not session.config.has_workers:
            floor = measure_floor(session, first, PACE_SECONDS)
        pace = measure_pace(session, first)
        workers = measure_workers(session, WORKER_SECONDS) if session.spec.steps_environments else None
    with tempfile.TemporaryDirectory(prefix="rl-training-bench-") as folder:
        result = _run_timed(session, first, Path(folder))
    result = replace(result, workers=workers, floor=floor, pace=pace)
    return replace(result, trials=try_settings(result) if tries else ())


def warm_up(session: Session) -> int:
    """Take steps until learning is at full speed, because first calls are slow; return their number."""
    first = play_at_random(session)
    return first + begin_learning(session, first)[0]


def begin_learning(session: Session, step: int) -> tuple[int, float]:
    """Learn from `step` on until learning is at full speed; return steps and seconds."""
    steps, seconds = time_turns(session, step, 0.0)
    if session.config.accelerate == "none":
        return steps, seconds
    more, longer = time_turns(session, step + steps, PACE_SECONDS)  # the first steps of a learner are not captured
    return steps + more, seconds + longer


def measure_pace(session: Session, step: int) -> float:
    """Steps per second from `step` on: the best of several rounds, because other programs may use the machine."""
    best = 0.0
    for _ in range(ROUNDS):
        steps, seconds = time_turns(session, step, PACE_SECONDS)
        best = max(best, steps / seconds)
        if seconds > TURN_SECONDS:  # one turn is long enough
            break
    return best


def settings_to_try(result: Breakdown) -> dict[str, dict[str, Any]]:
    """Settings that may speed up the slow parts, as changes of the config."""
    config, spec = result.config, get_algorithm_spec(result.config.algo)
    cores, on_gpu = os.cpu_count() or 1, config.device.startswith("cuda")
    tried: dict[str, dict[str, Any]] = {}
    if on_gpu and config.accelerate == "none" and spec.learner.steps:
        tried["accelerate=graph"] = {"accelerate": "graph"}
    if torch.cuda.is_available():
        device = "cpu" if on_gpu else "cuda"
        tried[f"device={device}"] = {"device": device, "accelerate": "auto", "threads": "auto"}
    if not on_gpu and cores > 1 and result.share("learn", "act") >= MUCH:
        threads = 1 if int(config.threads) > 1 else min(cores, MOST_THREADS)
        tried[f"threads={threads}"] = {"threads": threads}
    if spec.steps_environments and result.share("environment", "act", "rollout on the device") >= MUCH:
        more = MANY_TIMES * config.num_envs
        tried[f"num_envs={more}{' (other batches)' * (spec.lane == 'rollout')}"] = {"num_envs": more}
        others = {"sync": ("device", "async"), "device": ("auto",)}.get(config.vectorization, ("device",))
        tried |= {f"vectorization={name}": {"vectorization": name} for name in others}
    if not on_gpu and compiles_fast(config) and result.share("learn", "rollout on the device") >= MUCH:
        tried["accelerate=compile"] = {"accelerate": "compile"}  # last, because its compiler processes keep running
    return tried


def compiles_fast(config: TrainConfig) -> bool:
    """Whether compiling the learner's steps is not on yet and does not take minutes.

    It does with a world model, and with native environments, whose rollouts differ in length.
    """
    spec = get_algorithm_spec(config.algo)
    same_shapes = spec.lane == "replay" or (spec.lane == "rollout" and config.vectorization != "native")
    return config.accelerate == "none" and bool(spec.learner.steps) and same_shapes


def try_settings(result: Breakdown) -> tuple[Trial, ...]:
    """Try each setting and return the results, the best first; settings that are impossible here are left out."""
    trials, config = [], shorten_rollouts(result.config, result.pace)
    wanted = settings_to_try(result)
    pace = result.pace if config is result.config or not wanted else pace_of(config)[0]
    for setting, change in wanted.items():
        with suppress(UserError, RuntimeError):  # refused (as `compile` without a compiler), or too large for the GPU
            reached, start = pace_of(config.model_copy(update=change))
            trials.append(Trial(setting, reached / pace, start if "compile" in change.values() else 0.0))
    return tuple(sorted(trials, key=lambda trial: -trial.gain))


def pace_of(config: TrainConfig) -> tuple[float, float]:
    """The steps/s of a config in a separate session, and how many extra seconds its first steps took."""
    with closing(open_session(config)) as session:
        first = play_at_random(session)
        steps, seconds = begin_learning(session, first)
        pace = measure_pace(session, first + steps)
    return pace, max(0.0, seconds - steps / pace)


def shorten_rollouts(config: TrainConfig, pace: float) -> TrainConfig:
    """The config with turns of about `TURN_SECONDS`, if rollouts are divided into minibatches.

    The number of minibatches per step stays the same, so the steps/s stay about the same.
    """
    spec = get_algorithm_spec(config.algo)
    params: Any = read_params(spec.params, config.algo_kwargs)
    if spec.lane != "rollout" or not params.facts.rows:
        return config
    steps = math.ceil(max(params.facts.rows, TURN_SECONDS * pace) / config.num_envs)
    if steps >= params.num_steps:
        return config
    return config.model_copy(update={"algo_kwargs": {**config.algo_kwargs, "num_steps": steps}})


def open_measured(config: TrainConfig) -> Session:
    """Open a session of the config that learns after at most `MOST_RANDOM` steps."""
    params = read_params(get_algorithm_spec(config.algo).params, config.algo_kwargs)
    if params.facts.random_steps > MOST_RANDOM:
        config = config.model_copy(update={"algo_kwargs": {**config.algo_kwargs, "learning_starts": MOST_RANDOM}})
    return open_session(config)


def play_at_random(session: Session) -> int:
    """Take turns until learning starts; return the number of their steps."""
    starts = session.params.facts.random_steps
    turns = Turns(0, lambda turns: turns.step >= starts or turns.learned)  # some learn before, in a pretraining
    run_loop(session, turns)
    return turns.step


def time_turns(session: Session, step: int, seconds: float) -> tuple[int, float]:
    """Take turns from `step` on until `seconds` have passed and the last turn learned; return steps and seconds.

    They end with an update because some algorithms take many steps per update.
    """
    begun = time.perf_counter()

    def enough(turns: Turns) -> bool:
        _synchronize(session)
        return time.perf_counter() - begun >= seconds and (turns.learned or turns.taken >= MOST_WAITING)

    run_loop(session, turns := Turns(step, enough))
    return turns.taken, time.perf_counter() - begun


def _run_timed(session: Session, first: int, folder: Path) -> Breakdown:
    watch = Stopwatch(lambda: _synchronize(session))
    total_timesteps = session.config.total_timesteps + first
    session.config = session.config.model_copy(update={"total_timesteps": total_timesteps})
    run = Run(session, folder, restored=first_state(session.config, session.params, first))
    with closing(run):
        for part in (session.collector, session.store):
            if isinstance(part, (LocalCollector, RolloutStore)):
                part.watch(watch.wrap)
        with stop_on_signals(run):
            begun = time.perf_counter()
            run_loop(session, run, watch.wrap)
            total = time.perf_counter() - begun
    if run.stop.signal is not None:
        raise stop_error(run.stop.signal)
    spent = watch.seconds | run.clock.paused
    seconds = {part: spent.get(part, 0.0) for part in PARTS}
    seconds[REST] = max(0.0, total - sum(seconds.values()))
    return Breakdown(session.config, run.step - first, run.updates, total, seconds)


def _synchronize(session: Session) -> None:
    """Wait for a GPU, which may still be busy after a call has returned."""
    if session.config.device.startswith("cuda"):
        torch.cuda.synchronize(session.config.device)


def estimate_seconds(session: Session, seconds: float) -> float:
    """Seconds of collecting and learning that the session's budget will take, measured over a short time."""
    total, params = session.config.total_timesteps, session.params
    step = play_at_random(session)
    first_steps, first_spent = time_turns(session, step, 0.0)
    fits = hasattr(params, "model_updates")
    if first_spent > 3 * seconds and not fits:  # it ran long enough that slow first calls hardly matter
        return total * first_spent / first_steps
    steps, spent = time_turns(session, step + first_steps, seconds)
    per_step = spent / steps
    # with a dynamics model, the first turn fits it; a run does so once, or every `model_train_frequency` steps
    num_fits = math.ceil(total / getattr(params, "model_train_frequency", total)) if fits else 0
    return total * per_step + num_fits * max(0.0, first_spent - first_steps * per_step)


def storage_bytes(session: Session) -> int:
    """Bytes of the experience that the session keeps, imagined and recorded rows included."""
    store = session.store
    kept = [getattr(store, name, None) for name in ("buffer", "imagined")]
    kept.append(getattr(session.collector, "experience", None))
    recorded = [getattr(store, name, None) for name in ("dataset", "expert")]
    rows = sum(array.nbytes for data in recorded if data is not None for array in data.arrays().values())
    return rows + sum(int(part.nbytes) for part in kept if part is not None)
