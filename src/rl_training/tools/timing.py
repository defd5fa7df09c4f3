"""What an environment step costs: each part of a turn, and at least (the floor)."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer

from rl_training.data.transfer import torch_dtype
from rl_training.envs.device import DeviceEngine, advance
from rl_training.envs.random_play import draw, make_stepper
from rl_training.run.build import Session
from rl_training.run.learner import build_algorithm
from rl_training.run.loop import Turns, run_loop

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "mlp_forward", "mlp_backward")
ENOUGH_UPDATES, MOST_SECONDS = 20, 0.5  # how many updates, or for how long, products are counted
CALL_SECONDS, GRAPHED = 0.015, 20  # for which one product is timed; calls in one CUDA graph


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
    if not session.spec.steps_environments:
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
