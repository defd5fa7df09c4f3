"""Build the parts of a run from a config: everything is checked and every `auto` resolved before a file is written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
import torch

from rl_training.algorithms.base import Algorithm, defines_explore, overrides
from rl_training.algorithms.reward_scale import RunningReturns
from rl_training.collect.device import DeviceCollector, DeviceStepCollector, SimulatorCollector
from rl_training.collect.local import Behaviour, Collector, LocalCollector
from rl_training.collect.worker_collector import FirstComers, WorkerCollector
from rl_training.collect.worker_process import FIRST, SharedMemory, WorkerPlan
from rl_training.config.choices import ACCELERATED, choose_device, resolve
from rl_training.config.networks import resolve_network
from rl_training.config.params import Params, check_schedules, read_params
from rl_training.config.settings import find_unused
from rl_training.config.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.config.train_config import TrainConfig
from rl_training.data.replay_store import DeviceReplayStore, ReplayStore, SequenceReplayStore
from rl_training.data.store import Experience, ExperienceLayout, Request, Store, StoreContext
from rl_training.envs.engines import make_engine
from rl_training.envs.factory import GIVE_ONE, EnvRecipe, MadeEnvironment, UserEnv, read_recipe
from rl_training.envs.native import is_cartpole
from rl_training.envs.probe import HIDDEN, probe
from rl_training.envs.spaces import EnvSpaces
from rl_training.envs.stepper import Engine, Stepper
from rl_training.envs.workers import pickle_registrations
from rl_training.errors import UserError, install
from rl_training.run import evaluation
from rl_training.run.learner import build_algorithm, check_same_spaces, count_numbers
from rl_training.run.ranks import Ranks

LANES_OF_RANKS = ("rollout", "replay")
ANY_ORDER = (
    "worker_order is first: learning depends on the speed of the workers, so this run is not reproducible from its "
    "seed, and a resume is not exact"
)
UNSAVED = "{}: a resume starts new episodes and is not exact"


@dataclass
class Plan:
    """A run that was checked, before anything of it is built.

    After `resolve_plan`, its config has no `auto` left and names every hyper-parameter.
    """

    spec: AlgorithmSpec
    config: TrainConfig
    params: Params
    recipe: EnvRecipe
    spaces: EnvSpaces
    ranks: Ranks
    stored: Mapping[str, Any] | None  # the learner's state in the checkpoint of a resume
    notes: tuple[str, ...]  # about decisions, shown when a run starts

    @property
    def steps_environments(self) -> bool:
        """Whether a run with these settings does."""
        return self.spec.steps_environments and self.params.facts.steps_environments

    @property
    def make_algorithm(self) -> Callable[..., Algorithm]:
        """Builds the learner; arguments replace those of the plan."""
        config = self.config
        return partial(build_algorithm, self.spec, self.params, self.spaces, seed=config.seed, device=config.device)


@dataclass
class Session(Plan):
    """The parts of one run."""

    algorithm: Algorithm
    behaviour: Behaviour
    collector: Collector
    store: Store

    @cached_property
    def collect(self) -> Callable[[Request], Experience]:
        """Collects from the environments; with several ranks, with the episodes of all of them."""
        return self.ranks.settled(partial(self.collector.collect, self.behaviour))

    def source_state(self) -> dict[str, Any]:
        """The state of the collector and the stored experience, for a checkpoint."""
        return self.collector.state_dict() | self.store.state_dict()

    def load_source(self, state: dict[str, Any]) -> list[str]:
        """The inverse of `source_state`; return one sentence for each thing that was not restored exactly."""
        sentences = self.collector.load_state_dict(state)
        if not self.collector.started or (self.config.has_workers and sentences):  # new episodes start
            self.forget_returns()
        return sentences + self.store.load_state_dict(state)

    @property
    def engine(self) -> Engine | None:
        """What steps the environments in this process."""
        return self.collector.stepper.engine if isinstance(self.collector, LocalCollector) else None

    def start_over(self) -> None:
        """Begin new episodes: something else has stepped the environments."""
        self.collector.abandon()
        self.forget_returns()

    def forget_returns(self) -> None:
        """Drop the learner's running return of each environment."""
        for part in self.algorithm.modules():
            if isinstance(part, RunningReturns):
                part.forget_episodes()

    def close(self) -> None:
        """Close environments and files."""
        with closing(self.store):
            self.collector.close()


def open_session(
    config: TrainConfig, *, env: UserEnv | None = None, restored: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
) -> Session:  # fmt: skip
    """Check the config against algorithm and environment, resolve every `auto`, and build the parts of the run.

    `restored` is the checkpoint of a resume.
    """
    return build(resolve_plan(check(config, env, restored, ranks or Ranks())))


def check(config: TrainConfig, env: UserEnv | None, restored: Mapping[str, Any] | None, ranks: Ranks) -> Plan:
    """Read the parameters, look at the environment, and refuse what does not fit together."""
    spec = get_algorithm_spec(config.algo)
    if ranks.count > 1:
        config = fit_ranks(config, spec.lane)
    names = (*config.named, *(env if isinstance(env, tuple) else ()))
    params = resolve_network(read_params(spec.params, config.algo_kwargs), names)
    if ranks.count > 1 and not params.facts.steps_environments:
        raise UserError("offline_updates is null; with several learners (torchrun) it must be a number.")
    recipe = read_recipe(config.env_id, config.env_kwargs, names if env is None or isinstance(env, tuple) else env)
    check_settings(config, spec, params, recipe)
    spaces, problems, _ = probe(recipe, config.vectorization)
    recipe.check_simulator(config.vectorization)
    spec.check_support(spaces)
    spaces = spaces.with_critic_obs(params.facts.critic_obs)
    if recipe.made:
        recipe.made[0].check_critic(spaces.critic_obs)
        config = fit_simulator(config, spec, recipe.made[0], ranks, is_new=restored is None)
    if restored is None:
        if params.early_stopping is not None and not config.eval_episodes:
            raise UserError("eval_episodes is 0; early_stopping looks at evaluations, so it must be at least 1.")
        params.check_new_run()
    else:
        problems = [problem for problem in problems if problem.name != HIDDEN]  # its episodes are compared
        check_same_spaces(EnvSpaces.from_dict(restored["spaces"]), spaces)
    params = params.settle(recipe, spaces, config.seed)
    stored = None if restored is None else restored["algorithm"]
    notes = tuple(f"warning: {problem.sentence()}" for problem in problems)
    return Plan(spec, config, params, recipe, spaces, ranks, stored, notes)


def resolve_plan(plan: Plan) -> Plan:
    """The plan with every `auto` of its config decided."""
    asked, params, ranks, is_new = plan.config, plan.params, plan.ranks, plan.stored is None
    device, why = choose_device(asked, params, plan.spaces)
    if is_new and device == "cpu" and params.facts.replay_on_device:
        raise UserError("replay_memory is 'device', but device is 'cpu'; there it must be auto or host.")
    local_rank = ranks.local_rank if ranks.count > 1 else None
    config = resolve(asked.model_copy(update={"device": device}), params, plan.recipe, plan.spaces, local_rank)
    samples = config.vectorization == "device" and plan.spec.lane == "rollout"
    if samples and overrides(plan.spec.learner, "act") and not overrides(plan.spec.learner, "sample"):
        what = f"{plan.spec.name} defines act, but with vectorization 'device' rollouts call sample"
        raise UserError(f"{what}; define sample(obs, noise) too, or set vectorization to sync.")
    notes = [why] if why else []
    if copied := stays_on_host(config, plan.spec, params, plan.recipe):
        notes.append(f"every transition is copied from the device to the host: {copied}")
    if config.accelerate != "none":
        eager = plan.spec.learner.eager_part
        auto, left_out = " auto is" if asked.accelerate == "auto" else "", f", but not {eager}" if eager else ""
        notes.append(f"accelerate{auto} {config.accelerate}: {ACCELERATED[config.accelerate]}{left_out}")
    notes += [f"warning: {text}" for text in find_unused(config, params, plan.spaces)]
    return replace(plan, config=config, notes=(*plan.notes, *notes))


def build(plan: Plan) -> Session:
    """Build learner, environments, store and collector."""
    config, params, spaces, ranks = plan.config, plan.params, plan.spaces, plan.ranks
    torch.set_num_threads(int(config.threads))
    if config.device.startswith("cuda"):
        torch.set_float32_matmul_precision(config.matmul_precision)
        torch.backends.cudnn.deterministic = True  # otherwise gradients of convolutions differ from run to run
    keep_freed_memory()
    algorithm = plan.make_algorithm(held=None if plan.stored is None else count_numbers(plan.stored))
    ranks.join(algorithm)
    if config.accelerate != "none":
        algorithm.accelerate(config.accelerate)
    seed = ranks.seed(config.seed)
    if ranks.rank:
        algorithm.seed(seed)
    stepper = None
    if plan.steps_environments and not config.has_workers:
        where = config.num_envs, seed, config.vectorization, config.worker_timeout
        engine = make_engine(plan.recipe.for_training, spaces, *where, device=config.device)
        stepper = Stepper(engine, spaces, config.num_envs)
    with closed_on_error(stepper), experience_fits(config):
        rng = np.random.default_rng(np.random.SeedSequence([seed, 1]))
        behaviour = Behaviour(algorithm, spaces, config.num_envs, rng)
        resets = config.vectorization == "native" if stepper is None else stepper.resets_next_step
        store = find_store(plan)(
            StoreContext(params, spaces, config.num_envs, seed, config.device, plan.recipe, rng, evaluation, resets)
        )
        check_schedules(plan.spec.name, params, algorithm)
        collector = open_collector(plan, behaviour, store, stepper)
    notes = [] if stepper is None else stepper.engine.notes()
    if stepper is not None and stepper.engine.inexact:
        notes.append(f"warning: {config.env_id}: {stepper.engine.inexact}")
    if stepper is not None and not stepper.engine.state_format:
        why = stepper.engine.unsaved or f"{config.env_id} is stepped by EnvPool, whose state cannot be saved"
        notes.append(f"warning: {UNSAVED.format(why)}")
    if config.has_workers and config.worker_order == FIRST:
        notes.append(f"warning: {ANY_ORDER}")
    known = vars(replace(plan, stored=None, notes=(*plan.notes, *notes)))
    return Session(**known, algorithm=algorithm, behaviour=behaviour, collector=collector, store=store)


def stays_on_host(config: TrainConfig, spec: AlgorithmSpec, params: Any, recipe: EnvRecipe) -> str:
    """Why transitions of environments on the device are kept on the host; empty if they are not."""
    if config.vectorization != "device" or spec.lane == "rollout":
        return ""
    if spec.store is not ReplayStore:
        return f"{spec.name} keeps what it learns from there"
    reasons = {
        "a simulator keeps its own state": bool(recipe.made),
        "a policy with memory learns from sequences": bool(params.facts.state_size),
        "prioritized is true": params.prioritized,
        "replay_memory is 'host'": params.replay_memory == "host",
        "replay_folder is given": params.replay_folder is not None, "her_ratio is above 0": params.relabels,
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), "")


def find_store(plan: Plan) -> Callable[[StoreContext], Store]:
    """What makes the store: that of the algorithm, or in place of transitions on the host, sequences or the device."""
    spec, on_device = plan.spec, plan.config.vectorization == "device"
    if spec.store is not ReplayStore:
        return spec.store
    if plan.params.facts.state_size:
        return SequenceReplayStore
    is_kept = on_device and not stays_on_host(plan.config, spec, plan.params, plan.recipe)
    return DeviceReplayStore if is_kept else spec.store


def open_collector(plan: Plan, behaviour: Behaviour, store: Store, stepper: Stepper | None) -> Collector:
    """Where the behaviour acts: in workers, in this process, or nowhere."""
    config, params = plan.config, plan.params
    if not plan.steps_environments:
        return Collector()
    if config.has_workers:
        return open_workers(plan, behaviour, store.layout)
    assert stepper is not None
    actor = behaviour
    if params.lag:  # a lagging policy acts with a second learner
        actor = Behaviour(plan.make_algorithm(), plan.spaces, config.num_envs, behaviour.rng)
    if config.vectorization == "device" and plan.spec.lane == "rollout":
        kind = SimulatorCollector if plan.recipe.made else DeviceCollector
        return kind(actor, stepper, store.layout, params.lag, config.accelerate)
    if isinstance(store, ReplayStore) and store.on_device:
        return DeviceStepCollector(actor, stepper, store.layout, params.lag, config.accelerate)
    return LocalCollector(actor, stepper, Experience(store.layout), params.lag)


def open_workers(plan: Plan, behaviour: Behaviour, layout: ExperienceLayout) -> Collector:
    """Open workers, each with its own learner on the CPU, of which only the acting part is used."""
    config, params = plan.config, plan.params
    if config.vectorization == "native" and not is_cartpole(plan.recipe):
        raise UserError(
            f"vectorization is 'native', but workers cannot restore {config.env_id} then; with workers it must be sync."
        )
    workers = WorkerPlan(
        partial(plan.make_algorithm, device="cpu"), plan.recipe, plan.spaces.to_dict(), pickle_registrations(),
        config.seed, config.vectorization, layout, len(behaviour.pack()), int(config.num_workers), params.ladder,
        config.worker_order,
    )  # fmt: skip
    told = workers, config.env_id, config.worker_timeout
    if config.execution_backend == "ray":
        from rl_training.collect.ray_workers import ObjectStore  # an extra; the import takes half a second

        transport: SharedMemory = ObjectStore(*told, config.ray.needs())
    else:
        transport = SharedMemory(*told)
    collector = FirstComers if config.worker_order == FIRST else WorkerCollector
    return collector(
        workers, plan.spaces, transport, lag=params.lag, timeout=config.worker_timeout,
        max_restarts=config.max_worker_restarts, max_lag=config.max_policy_lag,
    )  # fmt: skip


def fit_simulator(config: TrainConfig, spec: AlgorithmSpec, view: Any, ranks: Ranks, *, is_new: bool) -> TrainConfig:
    """The config for a `Simulator`, which decides the number of rows and the device; refuse what it cannot do."""
    simulator = view.simulator
    if ranks.count > 1:
        raise UserError(f"env is the Simulator {config.env_id}; with several learners (torchrun) it must be another.")
    for name, known in {"execution_backend": ("local_sync",), "vectorization": ("device", "auto")}.items():
        if (value := getattr(config, name)) not in known:
            raise UserError(f"{name} is {value!r}; with the Simulator {config.env_id} it must be {' or '.join(known)}.")
    if not simulator.has_final_obs and spec.lane not in LANES_OF_RANKS:
        what = f"algo is {config.algo!r}, which learns from final observations, but {config.env_id} gives none"
        raise UserError(f"{what}; take an algorithm of the {' or '.join(LANES_OF_RANKS)} lane.")
    held, count = view.held_out(config.eval_episodes), simulator.num_envs
    if not is_new and 0 < config.num_envs <= count:
        held = count - config.num_envs
    if config.num_envs not in (count, count - held) and (not is_new or "num_envs" in config.given):
        what = f"num_envs is {config.num_envs}, but the Simulator {config.env_id}"
        raise UserError(f"{what} has {count} rows; leave it out.")
    device = torch.device(simulator.device)
    asked = device if config.device == "auto" else torch.device(config.device)
    if (asked.type, asked.index or 0) != (device.type, device.index or 0):
        what = f"device is {config.device!r}, but the Simulator {config.env_id}"
        raise UserError(f"{what} is on {str(device)!r}; use that or auto.")
    return config.model_copy(update={"num_envs": count - held, "device": str(device), "vectorization": "device"})


def check_settings(config: TrainConfig, spec: AlgorithmSpec, params: Params, recipe: EnvRecipe) -> None:
    """Refuse settings that do not fit each other, the environment or this machine."""
    if isinstance(recipe.maker, MadeEnvironment):
        for name, fits in {"num_envs": 1, "execution_backend": "local_sync", "vectorization": "sync"}.items():
            if (value := getattr(config, name)) not in (fits, "auto"):
                raise UserError(f"env is a single environment instance, but {name} is {value!r}; {GIVE_ONE}.")
    if defines_explore(spec.learner) and spec.lane != "replay":
        raise UserError(f"{spec.name} defines explore, which only learners from replay may; override act instead.")
    for name in config.loggers:  # one that fails later does not end a run
        if name != "tensorboard" and find_spec(name) is None:  # tensorboard is always installed
            raise UserError(f"loggers names {name!r}, which is not installed: {install(name)}.")
    backend, most = config.execution_backend, config.max_policy_lag
    if not config.has_workers:
        if params.ladder:
            raise UserError("epsilon_ladder needs workers; set it to 0, or execution_backend to local_async or ray.")
        return
    if not spec.steps_environments:
        raise UserError(f"execution_backend is {backend!r}, but {spec.name} steps no environments; use local_sync.")
    if backend == "ray" and find_spec("ray") is None:
        raise UserError(f"execution_backend is 'ray', which needs Ray: {install('distributed')}.")
    if most is not None and params.lag is not None and params.lag > most:
        dropped = f"with policy_lag {params.lag} all experience would be dropped"
        raise UserError(f"max_policy_lag is {most}; {dropped}, so it must be at least {params.lag}.")


@contextmanager
def closed_on_error(opened: Any) -> Iterator[None]:
    """Close the opened objects if the block fails; raise the first error, not an error in closing."""
    try:
        yield
    except BaseException:
        with suppress(Exception, SystemExit):
            opened.close()
        raise


@contextmanager
def experience_fits(config: TrainConfig) -> Iterator[None]:
    """Refuse more experience than there is memory for."""
    try:
        yield
    except MemoryError as error:
        what = "the experience to store does not fit here"
        raise UserError(f"num_envs is {config.num_envs}; {what}: {error}.") from None


def describe_machine(config: TrainConfig) -> dict[str, str]:
    """Versions and hardware on which the arithmetic of a run depends, besides its config."""
    return {
        **{package.__name__: str(package.__version__) for package in (torch, np, gymnasium)},
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(config.device) if config.device.startswith("cuda") else "cpu",
        "threads": str(torch.get_num_threads()),
    }


def fit_ranks(config: TrainConfig, lane: str) -> TrainConfig:
    """The config for several learners, which need equal numbers of rows; refuse what they cannot run."""
    several = "with several learners (torchrun) it must be"
    if lane not in LANES_OF_RANKS:
        lanes = " or ".join(LANES_OF_RANKS)
        raise UserError(f"algo is {config.algo!r}, an algorithm of the {lane} lane; {several} of the {lanes} lane.")
    refused = (  # the reset rows of native engines are not transitions, and their number differs between ranks
        ("execution_backend", config.has_workers, "local_sync"),
        ("vectorization", config.vectorization == "native", "auto, sync or async"),
        ("accelerate", config.accelerate not in ("auto", "none"), "auto or none"),
    )
    for name, is_refused, known in refused:
        if is_refused:
            raise UserError(f"{name} is {getattr(config, name)!r}; {several} {known}.")
    vectorization = "sync" if config.vectorization == "auto" else config.vectorization
    return config.model_copy(update={"vectorization": vectorization, "accelerate": "none"})


@cache
def keep_freed_memory() -> None:
    """Tell glibc to reuse freed blocks instead of returning them to the system.

    Otherwise, an update's temporaries of a megabyte or more are mapped and unmapped every time; their page faults take
    half the time of an IQN or FQF update. Other C libraries have no `mallopt` and do not need it.
    """
    mmap_threshold, trim_threshold = -3, -1
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, 2**31 - 1)
    except (OSError, AttributeError, TypeError):
        return
