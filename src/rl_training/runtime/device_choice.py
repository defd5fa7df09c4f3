"""`device: auto` and `accelerate: auto`: one table of the cases in which a GPU measured faster."""

from __future__ import annotations

import os
import shutil
import sys
from typing import NamedTuple

import torch

from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError
from rl_training.experiment.config import TrainConfig
from rl_training.runtime.params import Params
from rl_training.runtime.spec import get_algorithm_spec

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


class Rule(NamedTuple):
    """A reason why a GPU is faster, whether it applies, and the measurement (an H200 and the CPU of its host)."""

    reason: str
    holds: bool
    measured: str


def gpu_rules(config: TrainConfig, params: Params, spaces: EnvSpaces) -> list[Rule]:
    """When a GPU is faster than a CPU, the clearest case first.

    On a GPU a small network spends its time on kernel launches, not arithmetic, and actions must be copied. Captured
    updates avoid the launches. Measured with `benchmarks/device.py --cpu` and `benchmarks/device_choice.py`.
    """
    captures, lane = config.accelerate != "none", get_algorithm_spec(config.algo).lane
    rows, units = getattr(params, "batch_size", 0), params.widest_layer
    members = max(getattr(params, name, 1) for name in ("num_critics", "num_ensembles"))
    sampled = captures and lane in ("replay", "dataset")
    return [
        Rule("images", spaces.obs_kind != "vector", IMAGES),
        Rule("rollouts on the device", config.vectorization == "device" and lane == "rollout", ""),
        Rule("captured updates of many steps", captures and getattr(params, "capture", False), ""),
        Rule(f"{members} networks side by side", members > MOST_MEMBERS_ON_CPU, MBPO),
        Rule(f"captured updates of {rows} rows and {units} units", sampled and rows * units >= LEAST_CAPTURED, SAC),
        Rule(f"layers of {units} units", units > WIDEST_ON_CPU, PPO),
        Rule("captured updates", config.accelerate == "graph", ""),
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
    has_steps = bool(get_algorithm_spec(config.algo).learner.steps) and getattr(params, "capture", True)
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
