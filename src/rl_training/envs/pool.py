"""EnvPool: the engine over a pool of environments, and `envpool:ID`, an environment that only EnvPool has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces as gs

from rl_training.envs.spaces import Array, EnvSpaces
from rl_training.envs.stepper import Engine, Step
from rl_training.errors import UserError, did_you_mean, install

PREFIX = "envpool:"
DECIDED = ("num_envs", "batch_size", "seed", "env_type", "render_mode")  # arguments of a pool that a run gives
SUCCESS = ("is_success", "success")  # what infos call it; the latter in Meta-World
RENDER_SECONDS = 60.0
# Some renderers end the process when they find no OpenGL, so another one tries.
RENDERS = """
import sys, envpool
pool = envpool.make(sys.argv[1], env_type="gymnasium", num_envs=1, render_mode="rgb_array")
pool.reset()
assert pool.render().ndim == 4
"""


def is_pool(env_id: str) -> bool:
    """Whether this names an environment of EnvPool's own."""
    return env_id.startswith(PREFIX)


def open_pool(env_id: str, options: Mapping[str, Any], **decided: Any) -> Any:
    """A pool of `num_envs` environments; `options` are the user's, without those that a run decides."""
    name = env_id.removeprefix(PREFIX)
    try:
        import envpool
    except ImportError:
        how = f"{install('envpool')}, with Python 3.11 or newer"
        raise UserError(f"env_id {env_id!r} needs the extra 'envpool' ({how}).") from None
    if name not in (known := envpool.list_all_envs()):
        raise UserError(f"env_id {env_id!r} is not in EnvPool; {did_you_mean(name, known)}")
    if given := [option for option in DECIDED if option in options]:
        raise UserError(f"env_kwargs.{given[0]} is decided by the run; leave it out for {env_id}.")
    pool = envpool.make(name, env_type="gymnasium", **options, **decided)
    if pool.config["max_num_players"] != 1:
        raise UserError(f"{env_id} has {pool.config['max_num_players']} players; only one is supported.")
    return pool


def read_space(space: gs.Space[Any]) -> gs.Space[Any]:
    """A pool's space with open bounds where it has the limits of its numbers (`low` is then the smallest positive)."""
    if isinstance(space, gs.Dict):
        return gs.Dict([(name, read_space(part)) for name, part in space.spaces.items()])
    if not isinstance(space, gs.Box) or space.dtype.kind != "f":
        return space
    limits = np.finfo(space.dtype)
    low = np.where((space.low == limits.tiny) | (space.low == limits.min), -np.inf, space.low)
    high = np.where(space.high == limits.max, np.inf, space.high)
    return gs.Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype.type)


def flatten_rows(space: gs.Space[Any], rows: Any) -> Array:
    """Observations of N environments as rows [N, D], with the columns of Gymnasium's `flatten`."""
    if isinstance(space, gs.Dict):
        parts = [flatten_rows(part, rows[name]) for name, part in space.spaces.items()]
        return np.concatenate(parts, axis=1)
    if isinstance(space, gs.Discrete):
        chosen: Array = np.eye(int(space.n))[np.asarray(rows).reshape(-1) - space.start]
        return chosen
    flat: Array = np.asarray(rows).reshape(len(rows), -1)
    return flat


class PoolEngine(Engine):
    """EnvPool: C++ threads, next-step autoreset; its state cannot be saved, so a resume starts new episodes."""

    resets_next_step = True

    def __init__(self, pool: Any, spaces: EnvSpaces) -> None:
        self.pool, self.spaces = pool, spaces
        self._dtype, self._is_box = pool.action_space.dtype, isinstance(spaces.observation_space, gs.Box)
        self._ended = np.zeros(0, dtype=bool)

    def _encode(self, obs: Any) -> Array:
        return self.spaces.encode(obs if self._is_box else flatten_rows(self.spaces.observation_space, obs))

    def reset(self) -> tuple[Array, Array | None]:
        """The first observations."""
        obs, info = self.pool.reset()
        self._ended = np.zeros(len(info["env_id"]), dtype=bool)
        return self._encode(obs), None

    def step(self, actions: Array) -> Step:
        """Step every environment; a row that ended in the last step resets in this one and is not valid."""
        resets = self._ended
        obs, rewards, terminated, truncated, info = self.pool.step(actions.astype(self._dtype))
        self._ended = terminated | truncated
        valid = ~resets if np.count_nonzero(resets) else None
        taken = Step(self._encode(obs), rewards.astype(np.float32), terminated, truncated, valid=valid)
        name = next((name for name in SUCCESS if name in info), None)
        if name is None or not np.count_nonzero(self._ended):
            return taken
        return taken._replace(successes=np.where(self._ended, np.asarray(info[name], dtype=np.float64), np.nan))

    def close(self) -> None:
        """End the threads."""
        self.pool.close()


class PoolEnvironment(gym.Env[Any, Any]):
    """A pool of one environment: spaces are read from it, and evaluation and `vectorization: sync` step it.

    A pool is seeded when it is made, so a reset with a seed makes a new one.
    """

    def __init__(self, env_id: str, options: Mapping[str, Any], render_mode: str | None = None) -> None:
        if render_mode is not None:
            refuse_unrendered(env_id, render_mode)
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
        self.env_id, self.options, self.render_mode = env_id, dict(options), render_mode
        self.pool = self._open(0)
        self.observation_space = read_space(self.pool.observation_space)
        self.action_space = self.pool.action_space

    def _open(self, seed: int) -> Any:
        shown = {} if self.render_mode is None else {"render_mode": self.render_mode}
        options = {"num_threads": 1, **self.options}
        return open_pool(self.env_id, options, num_envs=1, seed=seed % 2**31, **shown)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        if seed is not None:
            self.close()
            self.pool = self._open(seed)
        obs, info = self.pool.reset()
        return _only(obs), _only(info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one step."""
        actions = np.asarray(action, dtype=self.pool.action_space.dtype)[None]
        obs, reward, terminated, truncated, infos = self.pool.step(actions)
        info = _only(infos)
        for name in SUCCESS:
            if name in info:
                info["is_success"] = bool(info[name])
        return _only(obs), float(reward[0]), bool(terminated[0]), bool(truncated[0]), info

    def render(self) -> Any:
        """The present frame [H, W, 3]."""
        return self.pool.render()[0]

    def close(self) -> None:
        """End the thread."""
        self.pool.close()


def _only(rows: Any) -> Any:
    """The entry of the only environment of a pool."""
    return {name: _only(part) for name, part in rows.items()} if isinstance(rows, Mapping) else rows[0]


def refuse_unrendered(env_id: str, render_mode: str) -> None:
    """Refuse a window, and frames of an environment that cannot be drawn here."""
    if render_mode != "rgb_array":
        raise UserError(f"{env_id} is an environment of EnvPool, which is shown in no window; record videos instead.")
    if (why := find_fault(env_id.removeprefix(PREFIX))) is not None:
        raise UserError(f"{env_id} cannot be drawn here, so no video is made of it: {why}.")


@cache
def find_fault(name: str) -> str | None:
    """Why EnvPool cannot draw this environment here; None if it can."""
    command = [sys.executable, "-c", RENDERS, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RENDER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"its renderer does not answer within {RENDER_SECONDS:g} seconds"
    if not done.returncode:
        return None
    said = (done.stderr + done.stdout).strip().splitlines()
    return said[-1].rstrip(".") if said else f"its renderer ends with exit code {done.returncode}"
