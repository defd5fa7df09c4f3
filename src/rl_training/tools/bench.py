"""Measure where the time of a short run goes, how far it is from its floor, and which settings are faster."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer

from rl_training.collect.local import LocalCollector
from rl_training.config.choices import MOST_THREADS
from rl_training.config.params import read_params
from rl_training.config.spec import get_algorithm_spec
from rl_training.config.train_config import TrainConfig
from rl_training.data.memory import torch_dtype
from rl_training.data.rollout_store import RolloutStore
from rl_training.envs.device import DeviceEngine, advance
from rl_training.envs.probe import draw, make_stepper
from rl_training.errors import UserError
from rl_training.run.build import Session, closed_on_error, open_session
from rl_training.run.interruption import stop_error, stop_on_signals
from rl_training.run.learner import build_algorithm
from rl_training.run.loop import Turns, first_state, run_loop
from rl_training.run.run import Run

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "mlp_forward", "mlp_backward")
ENOUGH_UPDATES, MOST_SECONDS = 20, 0.5  # how many updates, or for how long, products are counted
CALL_SECONDS, GRAPHED = 0.015, 20  # for which one product is timed; calls in one CUDA graph
# Parts of a turn (run/loop.py, collect/local.py), what pauses the clock of a run, and the rest: how to describe each as
# the bottleneck, and the parts of its floor
PARTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "environment": ("the environment", "its own steps alone", ("environment",)),
    "act": ("choosing actions", "matrix products alone", ("act",)),
    "rollout on the device": (
        "rollouts on the device", "environment and matrix products alone", ("environment", "act"),
    ),
    "wait for workers": ("waiting for workers", "", ()),
    "store": ("storing and sampling", "", ()),
    "learn": ("learning", "matrix products alone", ("learn",)),
    "evaluate": ("evaluating", "", ()),
    "checkpoint": ("writing checkpoints", "", ()),
    "rest": ("the loop around all parts", "", ()),
}  # fmt: skip
MOST_RANDOM = 1_000  # maximum random steps before a measurement learns, whatever learning_starts is
MOST_WAITING = 10_000  # maximum steps that a measurement waits for an update
PACE_SECONDS, ROUNDS = 0.3, 3  # for measuring steps/s; the best round counts
TURN_SECONDS = 1.0  # a turn that takes longer is timed once
LONG_START = 10.0  # if the first update comes later than this, in seconds, no other setting is tried
MUCH = 0.25  # share of the time from which a part is worth trying other settings
MANY_TIMES = 4  # multiple of the environments that is tried
LEAST_SHARED = 8  # environments to try workers with; a single one cannot be divided among them
GAIN = 1.1  # a smaller gain may be noise


class Stopwatch:
    """Adds the time of wrapped calls to the part they belong to, minus the time of wrapped calls inside them."""

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._synchronize, self._part, self._since = synchronize, "", 0.0

    def wrap(self, call: Any, part: str) -> Any:
        """Wrap a call to measure its time, including the time that a generator takes for each value."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer = self._switch(part)
            try:
                result = call(*args, **kwargs)
            finally:
                self._switch(outer)
            if isinstance(result, Iterator):
                return iter(self.wrap(partial(next, result, None), part), None)
            return result

        return timed

    def _switch(self, part: str) -> str:
        """Begin with a part; return the one until now."""
        self._synchronize()
        now, before = time.perf_counter(), self._part
        if before:
            self.seconds[before] += now - self._since
        self._part, self._since = part, now
        return before


class Floor(NamedTuple):
    """Seconds per environment step that the environments alone and the networks' matrix products alone would take."""

    environment: float
    act: float
    learn: float

    @property
    def total(self) -> float:
        """The sum of all parts, as if they ran one after the other."""
        return sum(self)


class Products(TorchDispatchMode):
    """Counts the matrix products, convolutions and kernels of whole MLPs inside it, by their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()
        self.calls: dict[Any, Callable[[], Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` and count it if it is a product."""
        call = partial(func, *args, **(kwargs or {}))
        if func.overloadpacket.__name__ in PRODUCTS:
            key = func, _describe(args)
            self.counts[key] += 1
            self.calls.setdefault(key, call)
        return call()

    @torch.no_grad()
    def time(self, device: torch.device) -> float:
        """Seconds that all counted products take alone: as plain calls, or as a graph on a GPU."""
        return sum(count * time_call(self.calls[key], device) for key, count in self.counts.items())


def _describe(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.shape, x.stride()
    return tuple(map(_describe, x)) if isinstance(x, (tuple, list)) else str(x)


def time_call(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call among many, the best of several rounds."""
    repeats, run = 1, call
    if device.type == "cuda":
        # a user's functions that cannot be captured run as plain calls
        with suppress(RuntimeError), torch.cuda.device(device):
            repeats, run = GRAPHED, capture(call, GRAPHED)
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=CALL_SECONDS).times) / repeats


def capture(call: Callable[[], Any], repeats: int) -> Callable[[], Any]:
    """Capture `repeats` calls as one CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph.replay


def measure_floor(session: Session, step: int, seconds: float) -> Floor:
    """The floor of the turns from `step` on, counted in a second learner, whose steps are not captured."""
    config, spaces, num_envs = session.config, session.spaces, session.config.num_envs
    learner = build_algorithm(session.spec, session.params, spaces, seed=config.seed, device=config.device)
    device, learning, acting = learner.device, Products(), Products()
    end = time.perf_counter() + MOST_SECONDS

    def counted_too(call: Any, part: str) -> Any:
        def update_both(batch: Any, **options: Any) -> Any:
            with learning:
                learner.update(batch, **options)
            return call(batch, **options)

        return update_both if part == "learn" else call

    def enough(turns: Turns) -> bool:
        return turns.updates >= ENOUGH_UPDATES or (turns.updates > 0 and time.perf_counter() >= end)

    run_loop(session, turns := Turns(step, enough), counted_too)
    learn = learning.time(device) / turns.taken
    if not session.steps_environments:
        return Floor(0.0, 0.0, learn)
    obs = torch.zeros(num_envs, *spaces.obs_shape, dtype=torch_dtype(np.dtype(spaces.obs_dtype)), device=device)
    masks = torch.ones(num_envs, spaces.action_dim, dtype=torch.bool, device=device) if spaces.has_action_mask else None
    first = torch.ones(num_envs, dtype=torch.bool, device=device)
    with acting, torch.no_grad():
        learner.act(obs, learner.initial_carry(num_envs), is_first=first, action_masks=masks)
    collector: Any = session.collector
    engine = collector.stepper.engine
    if session.recipe.made:  # a simulator, of which there is but one
        actions = torch.from_numpy(spaces.map_actions(draw(spaces, np.random.default_rng(0), num_envs, None)))
        environment = time_call(partial(engine.advance, actions.to(engine.device)), engine.device) / num_envs
    else:
        is_device = isinstance(engine, DeviceEngine)
        environment = time_functions(engine) if is_device else time_environment(session, seconds)
    return Floor(environment, acting.time(device) / num_envs, learn)


@torch.no_grad()
def time_functions(engine: DeviceEngine) -> float:
    """Seconds per step of environments that are tensor functions: as plain calls, or as a graph on a GPU."""
    resets, noise = (part[0] for part in engine.draw(1))
    drawn = draw(engine.spaces, np.random.default_rng(0), engine.num_envs, None)
    actions = torch.from_numpy(engine.spaces.map_actions(drawn)).to(engine.device)

    def step() -> Any:
        return advance(engine.env, engine.limit, engine.state, engine.ages, actions, noise, engine.env.reset(resets))

    return time_call(step, engine.device) / engine.num_envs


def time_environment(session: Session, seconds: float) -> float:
    """Seconds per step of the run's environments with random actions, without any code of this package."""
    config, spaces, rng = session.config, session.spaces, np.random.default_rng(0)
    where = config.num_envs, config.vectorization, config.worker_timeout
    with closing(make_stepper(session.recipe, spaces, config.seed, *where)) as stepper:
        stepper.start()
        masks, spent, steps = stepper.masks, 0.0, 0
        while not steps or spent < seconds:
            actions = spaces.map_actions(draw(spaces, rng, config.num_envs, masks))
            begun = time.perf_counter()
            masks = stepper.engine.step(actions).masks
            spent, steps = spent + time.perf_counter() - begun, steps + config.num_envs
    return spent / steps


class Trial(NamedTuple):
    """A setting that was tried, its steps/s as a multiple of the run's, and the seconds of a slow start."""

    setting: str
    gain: float
    start: float = 0.0

    def describe(self, of: str = "") -> str:
        """The gain, and what it costs once."""
        once = f", after a start of {self.start:.0f} s" if self.start else ""
        return f"{self.setting}: {self.gain:.2f} times{of}{once}"


@dataclass(frozen=True)
class Breakdown:
    """Seconds of a run by part; each excludes the parts called inside it."""

    config: TrainConfig
    steps: int
    updates: int
    total_seconds: float
    seconds: dict[str, float]
    floor: Floor | None  # None for a run with workers
    pace: float  # steps/s of turns alone, the best of several rounds, measured like the floor and the trials
    trials: tuple[Trial, ...] = ()

    @property
    def steps_per_second(self) -> float:
        """Environment steps per second of training, without evaluations and checkpoints, as a run counts them."""
        training = self.total_seconds * (1.0 - self.share("evaluate", "checkpoint"))
        return self.steps / max(training, 1e-9)

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
        return (
            f"{alone}matrix products{graph} {act + learn:,.1f} ({of}) = {1e6 * self.floor.total:,.1f} µs per step; "
            f"the run's best round, {self.pace:,.0f} steps/s, is {self.floor.total * self.pace:.0%} of that speed"
        )

    def describe_bottleneck(self) -> str:
        """The part that takes longest, and the share of its time that its floor would take."""
        part = max(PARTS, key=self.share)
        name, alone, of_floor = PARTS[part]
        said = f"{name}, {self.share(part):.0%} of the time"
        if self.floor is None or not of_floor:
            return said
        least = sum(getattr(self.floor, one) for one in of_floor)
        return f"{said}; {alone} would take {min(1.0, least * self.steps / self.seconds[part]):.0%} of that"

    def describe_trials(self) -> str:
        """The settings that were tried, the best first."""
        said = [self.trials[0].describe(" the steps/s"), *(trial.describe() for trial in self.trials[1:])]
        return "; ".join(said) if self.trials[0].gain >= GAIN else f"nothing that was tried ({'; '.join(said)})"


def benchmark(config: TrainConfig) -> Breakdown:
    """Run the config in a temporary folder and measure where the time of its loop goes; nothing is left behind.

    The measurement starts when the run learns: the random steps before that would make it look faster.
    """
    begun = time.perf_counter()
    session = open_measured(config)
    with closed_on_error(session):
        first = warm_up(session)
        tries = time.perf_counter() - begun < LONG_START and not (session.config.has_workers or session.recipe.made)
        floor = None if session.config.has_workers else measure_floor(session, first, PACE_SECONDS)
        pace = measure_pace(session, first)
    with tempfile.TemporaryDirectory(prefix="rl-training-bench-") as folder:
        run, total, seconds = run_timed(session, first, Path(folder))
    result = Breakdown(session.config, run.step - first, run.updates, total, seconds, floor, pace)
    return replace(result, trials=try_settings(result)) if tries else result


def run_timed(session: Session, first: int, folder: Path) -> tuple[Run, float, dict[str, float]]:
    """The run from step `first` on, which closes the session; its seconds, and those of its parts."""
    watch = Stopwatch(lambda: _synchronize(session))
    session.config = session.config.model_copy(update={"total_timesteps": session.config.total_timesteps + first})
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
    return run, total, {**seconds, "rest": max(0.0, total - sum(seconds.values()))}


def warm_up(session: Session) -> int:
    """Take steps until learning is at full speed, because first calls are slow; return their number."""
    step = play_at_random(session)
    step += time_turns(session, step, 0.0)[0]
    if session.config.accelerate != "none":  # the first steps of a learner are not captured
        step += time_turns(session, step, PACE_SECONDS)[0]
    return step


def measure_pace(session: Session, step: int) -> float:
    """Steps per second from `step` on: the best of several rounds, because other programs may use the machine."""
    best = 0.0
    for _ in range(ROUNDS):
        steps, seconds = time_turns(session, step, PACE_SECONDS)
        best = max(best, steps / seconds)
        if seconds > TURN_SECONDS:
            break
    return best


def settings_to_try(result: Breakdown) -> dict[str, dict[str, Any]]:
    """Settings that may speed up the slow parts, as changes of the config."""
    config, spec = result.config, get_algorithm_spec(result.config.algo)
    cores, on_gpu = os.cpu_count() or 1, config.device.startswith("cuda")
    captures = config.accelerate == "none" and bool(spec.learner.steps)
    tried: dict[str, dict[str, Any]] = {}
    if on_gpu and captures:
        tried["accelerate=graph"] = {"accelerate": "graph"}
    if torch.cuda.is_available():
        device = "cpu" if on_gpu else "cuda"
        tried[f"device={device}"] = {"device": device, "accelerate": "auto", "threads": "auto"}
    if not on_gpu and cores > 1 and result.share("learn", "act") >= MUCH:
        threads = 1 if int(config.threads) > 1 else min(cores, MOST_THREADS)
        tried[f"threads={threads}"] = {"threads": threads}
    if spec.steps_environments and result.share("environment", "act", "rollout on the device") >= MUCH:
        tried |= ways_to_collect(config, spec.lane, cores)
    # compiling takes minutes with a world model, or with native environments, whose rollouts differ in length
    compiles_fast = spec.lane == "replay" or (spec.lane == "rollout" and config.vectorization != "native")
    if not on_gpu and captures and compiles_fast and result.share("learn", "rollout on the device") >= MUCH:
        tried["accelerate=compile"] = {"accelerate": "compile"}  # last, because its compiler processes keep running
    return tried


def ways_to_collect(config: TrainConfig, lane: str, cores: int) -> dict[str, dict[str, Any]]:
    """Settings that may speed up collecting, as changes of the config."""
    more, shared = MANY_TIMES * config.num_envs, max(LEAST_SHARED, config.num_envs)
    ways: dict[str, dict[str, Any]] = {f"num_envs={more}{' (other batches)' * (lane == 'rollout')}": {"num_envs": more}}
    others = {"sync": ("device", "async"), "device": ("auto",)}.get(config.vectorization, ("device",))
    ways |= {f"vectorization={name}": {"vectorization": name} for name in others}
    if cores > 1:
        workers = {"execution_backend": "local_async", "num_envs": shared}
        ways[f"execution_backend=local_async num_envs={shared}"] = workers
    return ways


def try_settings(result: Breakdown) -> tuple[Trial, ...]:
    """Try each setting and return the results, the best first; settings that are impossible here are left out."""
    trials = []
    for setting, change in settings_to_try(result).items():
        with suppress(UserError, RuntimeError):  # refused (as `compile` without a compiler), or too large for the GPU
            pace, start = pace_of(result.config.model_copy(update=change))
            trials.append(Trial(setting, pace / result.pace, start if "compile" in change.values() else 0.0))
    return tuple(sorted(trials, key=lambda trial: -trial.gain))


def pace_of(config: TrainConfig) -> tuple[float, float]:
    """The steps/s of a config in a separate session, and the seconds until it learns at full speed."""
    with closing(open_session(config)) as session:
        begun = time.perf_counter()
        first = warm_up(session)
        start = time.perf_counter() - begun
        return measure_pace(session, first), start


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


def _synchronize(session: Session) -> None:
    """Wait for a GPU, which may still be busy after a call has returned."""
    if session.config.device.startswith("cuda"):
        torch.cuda.synchronize(session.config.device)


def estimate_seconds(session: Session, seconds: float) -> float:
    """Seconds of collecting and learning that the session's budget will take, measured over a short time."""
    total, fits_every = session.config.total_timesteps, session.params.facts.fits_every
    step = play_at_random(session)
    first_steps, first_spent = time_turns(session, step, 0.0)
    if first_spent > 3 * seconds and not fits_every:  # it ran long enough that slow first calls hardly matter
        return total * first_spent / first_steps
    steps, spent = time_turns(session, step + first_steps, seconds)
    per_step = spent / steps
    num_fits = max(1, math.ceil(total / fits_every)) if fits_every else 0  # of a dynamics model; the first turn has one
    return total * per_step + num_fits * max(0.0, first_spent - first_steps * per_step)


def storage_bytes(session: Session) -> int:
    """Bytes of the experience that the session keeps, imagined and recorded rows included."""
    store = session.store
    kept = [getattr(store, name, None) for name in ("buffer", "imagined")]
    kept.append(getattr(session.collector, "experience", None))
    recorded = [getattr(store, name, None) for name in ("dataset", "expert")]
    rows = sum(array.nbytes for data in recorded if data is not None for array in data.arrays().values())
    return rows + sum(int(part.nbytes) for part in kept if part is not None)
