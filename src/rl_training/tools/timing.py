"""What an environment step costs: each part of a turn, at least (the floor), and with worker processes."""

from __future__ import annotations

import io
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer

from rl_training.algorithms.base import Algorithm
from rl_training.collect.behaviour import Behaviour
from rl_training.collect.local import LocalCollector
from rl_training.config.threads import torch_settings_restored
from rl_training.data.experience import Experience, Request
from rl_training.data.memory import torch_dtype
from rl_training.envs.device import DeviceEngine, advance
from rl_training.envs.engines import choose_vectorization
from rl_training.envs.random_play import draw, make_stepper
from rl_training.envs.workers import Workers
from rl_training.errors import counted
from rl_training.run.build import Session
from rl_training.run.learner import build_algorithm
from rl_training.run.loop import Turns, run_loop

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "mlp_forward", "mlp_backward")
ENOUGH_UPDATES, MOST_SECONDS = 20, 0.5  # how many updates, or for how long, products are counted
CALL_SECONDS, GRAPHED = 0.015, 20  # for which one product is timed; calls in one CUDA graph
LEAST_ENVS = 8  # a single one cannot be divided among workers
ANSWER = bytes(2048)  # about the size of a worker's answer without its experience
TRIPS = 200


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


# the floor -----------------------------------------------------------------------------------------------------------


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
    if not session.spec.steps_environments:
        return Floor(0.0, 0.0, learn)
    obs = torch.zeros(num_envs, *spaces.obs_shape, dtype=torch_dtype(np.dtype(spaces.obs_dtype)), device=device)
    masks = torch.ones(num_envs, spaces.action_dim, dtype=torch.bool, device=device) if spaces.has_action_mask else None
    first = torch.ones(num_envs, dtype=torch.bool, device=device)
    with acting, torch.no_grad():
        learner.act(obs, learner.initial_carry(num_envs), is_first=first, action_masks=masks)
    collector: Any = session.collector
    engine = collector.stepper.engine
    environment = time_functions(engine) if isinstance(engine, DeviceEngine) else time_environment(session, seconds)
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


# workers -------------------------------------------------------------------------------------------------------------


class WorkerCost(NamedTuple):
    """Seconds per environment step, and what is available for workers."""

    step: float  # the environment's own, in one process with `num_envs`
    collect: float  # with acting, in the same process
    handover: float  # what a worker adds to a step: acting for its few environments, and answering
    busy: float  # share of a worker's time in which a core works
    num_envs: int
    cores: int

    @property
    def least_workers(self) -> int:
        """The smallest number of workers that collect more than one process does."""
        return max(2, int((self.step + self.handover) / self.collect) + 1)

    @property
    def most_workers(self) -> int:
        """The largest number of workers with an environment and a core each; one core is the learner's."""
        return int(min(self.num_envs, (self.cores - 1) / max(self.busy, 1e-3)))

    @property
    def settings(self) -> str:
        """The options to give to a command."""
        workers = f"--set num_envs={self.num_envs} --set num_workers={self.most_workers}"
        return f"--set execution_backend=local_async {workers}"

    @property
    def pays(self) -> bool:
        """Whether an environment step takes longer than handing it over, and enough workers are possible."""
        return self.step > self.handover and self.least_workers <= self.most_workers

    def describe(self, env_id: str) -> str:
        """One sentence with the numbers."""
        costs = (
            f"a step of {env_id} takes {1e6 * self.step:,.0f} µs, to which a worker adds {1e6 * self.handover:,.0f} µs "
            f"for acting and handing it over; one process collects {1 / self.collect:,.0f} steps/s"
        )
        if self.pays:
            return f"{costs}: {self.least_workers} workers or more should pay"
        if self.step <= self.handover:
            return f"{costs}: workers do not pay here"
        few = f"{counted(self.num_envs, 'environment')} and {counted(self.cores, 'core')}, one for the learner"
        return f"{costs}: workers do not pay here, since it takes {self.least_workers} ({few})"


class Pace(NamedTuple):
    """Seconds per environment step of collecting, of the environment alone, and the share in which a core worked."""

    collect: float
    step: float
    busy: float


def measure_workers(session: Session, seconds: float) -> WorkerCost:
    """Collect for that long in one process, then as long with one environment and one thread, as a worker may."""
    num_envs = max(LEAST_ENVS, session.config.num_envs)
    alone = time_collecting(session, session.algorithm, num_envs, seconds)
    with torch_settings_restored():
        torch.set_num_threads(1)
        actor = build_algorithm(session.spec, session.params, session.spaces, seed=session.config.seed, device="cpu")
        worker = time_collecting(session, actor, 1, seconds)
    handover = worker.collect - worker.step + time_trip() / session.store.layout.max_steps
    return WorkerCost(alone.step, alone.collect, handover, worker.busy, num_envs, os.cpu_count() or 1)


def time_collecting(session: Session, algorithm: Algorithm, num_envs: int, seconds: float) -> Pace:
    """The best of several rounds, because other programs may use this machine too."""
    spaces, seed, watch = session.spaces, session.config.seed, Stopwatch()
    vectorization = choose_vectorization("auto", session.recipe, num_envs)
    layout = replace(session.store.layout, num_envs=num_envs, holds_resets=vectorization == "native")
    with closing(make_stepper(session.recipe, spaces, seed, num_envs, vectorization)) as stepper:
        actor = Behaviour(algorithm, spaces, num_envs, np.random.default_rng(seed))
        collector = LocalCollector(actor, stepper, experience := Experience(layout))
        collector.watch(watch.wrap)
        rounds: list[Pace] = []
        rows, end = 1, time.perf_counter() + seconds
        while len(rounds) < 2 or time.perf_counter() < end:
            watch.seconds.clear()
            begun, worked = time.perf_counter(), time.process_time()
            collector.fill(experience, Request(steps=rows))
            spent, worked = time.perf_counter() - begun, time.process_time() - worked
            taken = rows * num_envs
            rounds.append(Pace(spent / taken, watch.seconds["environment"] / taken, min(1.0, worked / spent)))
            rows = min(2 * rows, layout.max_steps) if spent < seconds / 8 else rows
        return min(rounds)


def time_trip() -> float:
    """Median seconds between a request to a process and its answer."""
    with closing(Workers([partial(io.BytesIO, ANSWER)], "a worker", 60.0)) as workers:
        times = [time.perf_counter()]
        for _ in range(TRIPS):
            workers.call("getvalue")
            times.append(time.perf_counter())
    return float(np.median(np.diff(times)))
