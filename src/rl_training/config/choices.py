"""Every `auto` of a config: device, acceleration, vectorization, workers, threads.

Two more are hyper-parameters: `replay_memory` (`data.replay_store.goes_to_device` decides it with the buffer at hand)
and the ends of a categorical distribution (`derive_support` in `config/replay_params.py`).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rl_training.collect.worker_process import FIRST
from rl_training.config.params import Params, dump_params
from rl_training.config.spec import get_algorithm_spec
from rl_training.config.train_config import TrainConfig
from rl_training.envs.engines import choose_vectorization
from rl_training.envs.factory import EnvRecipe
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError

WIDEST_ON_CPU, MOST_MEMBERS_ON_CPU = 256, 2
LEAST_CAPTURED = 2**15  # rows times units of the widest layer of a captured update
ACCELERATED = {
    "graph": "each gradient step is captured once as a CUDA graph and replayed",
    "compile": "each gradient step is compiled in its first calls, which take a minute or so",
}
# Measured on an H200 and on one core of the same machine (docs/performance.md)
IMAGES = "DQN on Atari's images: 1,481 updates/s, 19 on a core"
MBPO = "MBPO of 256 x 256 units: 1,902 updates/s, 97 on a core"
SAC = "SAC of 256 x 256 units: 1,913 updates/s, 132 on a core"
PPO = "PPO of 512 x 512 units with 8 CartPoles: 7,251 steps/s, 1,887 on a core"
SMALL = "DQN of 128 x 128 units: 708 steps/s on the GPU, 925 on a core"
COMPILERS = {"darwin": "clang++", "win32": "cl"}
THREADS = ((128, 1), (256, 2))  # for layers of at most so many units; wider ones and images take MOST_THREADS
MOST_THREADS = 8


def gpu_rules(config: TrainConfig, params: Params, spaces: EnvSpaces) -> list[tuple[str, bool, str]]:
    """When a GPU is faster than a CPU, the clearest case first: (reason, whether it applies, measurement).

    On a GPU a small network spends its time on kernel launches, not arithmetic, and actions must be copied. Captured
    updates avoid the launches. Measured with `benchmarks/device.py --cpu` and `benchmarks/device_choice.py`.
    """
    captures, lane = config.accelerate != "none", get_algorithm_spec(config.algo).lane
    facts = params.facts
    rows, members, units = facts.rows, facts.members, facts.widest
    sampled = captures and lane in ("replay", "dataset")
    return [
        ("images", spaces.obs_kind != "vector", IMAGES),
        ("rollouts on the device", config.vectorization == "device" and lane == "rollout", ""),
        ("captured updates of many steps", captures and facts.captured == "update", ""),
        (f"{members} networks side by side", members > MOST_MEMBERS_ON_CPU, MBPO),
        (f"captured updates of {rows} rows and {units} units", sampled and rows * units >= LEAST_CAPTURED, SAC),
        (f"layers of {units} units", units > WIDEST_ON_CPU, PPO),
        ("captured updates", config.accelerate == "graph", ""),
    ]


def choose_device(config: TrainConfig, params: Params, spaces: EnvSpaces) -> tuple[str, str]:
    """The device of a run, and a sentence with the reason if `auto` had a choice."""
    if config.device != "auto":
        return config.device, ""
    if not torch.cuda.is_available():
        return "cpu", ""
    for reason, holds, measured in gpu_rules(config, params, spaces):
        if holds:
            shown = f"{measured}; " if measured else ""
            return "cuda", f"device auto is the GPU: {reason} are faster there ({shown}device: cpu takes the CPU)"
    small = f"networks of this size are faster there ({SMALL}; device: cuda takes the GPU)"
    return "cpu", f"device auto is the CPU: {small}"


def choose_acceleration(config: TrainConfig, params: Params, device: str) -> str:
    """Graphs on a GPU and plain calls on a CPU, unless the config says otherwise; refuse impossible settings."""
    asked, captures = config.accelerate, device.startswith("cuda")
    has_steps = bool(get_algorithm_spec(config.algo).learner.steps and params.facts.captured)
    if asked in ("auto", "none"):
        return "graph" if asked == "auto" and captures and has_steps else "none"
    if not has_steps:
        raise UserError(f"accelerate is {asked!r}, but {config.algo} has no steps for it; it must be auto or none.")
    if asked == "graph" and not captures:
        where = f"device is {device!r}" if torch.cuda.is_available() else "torch sees no GPU here"
        raise UserError(f"accelerate is 'graph', but {where}; it must be auto, none or compile.")
    compiler = os.environ.get("CXX") or COMPILERS.get(sys.platform, "g++")  # as torch chooses it
    if asked == "compile" and shutil.which(compiler) is None:
        how = "install it, name another in CXX, or use auto or none"
        raise UserError(f"accelerate is 'compile', but its C++ compiler {compiler!r} is not found; {how}.")
    return asked


def resolve(
    config: TrainConfig, params: Params, recipe: EnvRecipe, spaces: EnvSpaces | None = None,
    local_rank: int | None = None,
) -> TrainConfig:
    """The config with every `auto` resolved (some only if the spaces are known) and every default filled in."""
    device = config.device
    if device.startswith("cuda") and local_rank is not None:  # one of several learners
        device = f"cuda:{local_rank}"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device is {config.device!r}, but torch sees no GPU here; use cpu or auto.")
    if device.startswith("cuda:") and int(device[5:]) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise UserError(f"device is {device!r}, but the last GPU here is 'cuda:{last}'; use that, cpu or auto.")
    threads = config.threads if config.threads != "auto" or spaces is None else choose_threads(params, spaces)
    env_kwargs = config.env_kwargs
    if recipe.wrappers.normalize_observation == "auto" and spaces is not None:
        wrappers = {**env_kwargs["wrappers"], "normalize_observation": spaces.normalize_observations}
        env_kwargs = {**env_kwargs, "wrappers": wrappers}
    vectorization = choose_vectorization(config.vectorization, recipe, config.num_envs, config.has_workers)
    decided = {
        "device": device, "threads": threads, "vectorization": vectorization, "num_workers": choose_workers(config),
        "accelerate": config.accelerate if spaces is None else choose_acceleration(config, params, device),
    }  # fmt: skip
    return config.model_copy(update={**decided, "algo_kwargs": dump_params(params), "env_kwargs": env_kwargs})


def choose_workers(config: TrainConfig) -> int | str:
    """The number of workers: one core is left to the learner; with `first`, all have the same number of environments.

    Without workers the setting is not used and stays unchanged.
    """
    if config.num_workers != "auto" or not config.has_workers:
        return config.num_workers
    most = min(max(1, (os.cpu_count() or 1) - 1), config.num_envs)
    return most if config.worker_order != FIRST else max(n for n in range(1, most + 1) if config.num_envs % n == 0)


def choose_threads(params: Params, spaces: EnvSpaces) -> int:
    """As many threads as the networks gain from, and at most one per core (or OMP_NUM_THREADS)."""
    fitting = [threads for units, threads in THREADS if params.facts.widest <= units]
    most = fitting[0] if fitting and spaces.obs_kind == "vector" else MOST_THREADS
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(most, int(os.environ.get("OMP_NUM_THREADS") or here or 1))


@contextmanager
def torch_settings_restored() -> Iterator[None]:
    """Restore the torch settings that a run changes for the whole process."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    deterministic = torch.backends.cudnn.deterministic
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.deterministic = deterministic
