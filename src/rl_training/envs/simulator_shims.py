"""Simulators of other packages as `Simulator`s; none of those packages is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from rl_training.envs.simulator import Simulator, Stepped
from rl_training.errors import UserError

GROUPS = "policy", "actor"  # names of the observations that a policy sees, in Isaac Lab and mjlab


def choose_group(obs: Any, group: str | None) -> str:
    """The name of the group of observations that is used."""
    known = list(obs.keys())  # a TensorDict is no mapping of its own
    name = group or next((name for name in GROUPS if name in known), None)
    if name is None or name not in known:
        raise UserError(f"group is {group!r}; the simulator's groups of observations are {', '.join(known)}.")
    return name


def as_box(space: Any) -> gs.Box:
    """A space with `shape`, `low` and `high`, which are numbers or arrays, as Gymnasium's Box of float32."""
    if not hasattr(space, "low"):
        raise UserError(f"a space of the simulator is {space}; it must be a Box (one tensor: concatenate the terms).")
    low, high = (np.broadcast_to(bound, space.shape).astype(np.float32) for bound in (space.low, space.high))
    return gs.Box(low, high, dtype=np.float32)


class ManagerSimulator(Simulator):
    """A manager-style environment of Isaac Lab or mjlab, whose observations are groups; the policy's is used.

    The final observation is real. If the environment can leave ended episodes as they are (mjlab's `auto_reset`), they
    are reset here; otherwise the observations are read just before its `_reset_idx`. Without either, there are none.
    """

    def __init__(self, env: Any, group: str | None = None) -> None:
        self.env, self.plain = env, env.unwrapped
        self.num_envs, self.device = int(self.plain.num_envs), self.plain.device
        self.group = choose_group(self.plain.single_observation_space.spaces, group)
        self.observation_space = as_box(self.plain.single_observation_space.spaces[self.group])
        self.action_space = as_box(self.plain.single_action_space)
        self.max_episode_steps = int(self.plain.max_episode_length)
        self.resets_here = hasattr(self.plain.cfg, "auto_reset")
        self.has_final_obs = self.resets_here or hasattr(self.plain, "observation_manager")
        self._final: Tensor | None = None
        if self.resets_here:
            self.plain.cfg.auto_reset = False
        elif self.has_final_obs:
            self._reset_idx, self.plain._reset_idx = self.plain._reset_idx, self._before_reset

    @property
    def episode_length_buf(self) -> Any:
        """The environment's own step counts."""
        return self.plain.episode_length_buf

    def _before_reset(self, rows: Any) -> None:
        self._final = self.plain.observation_manager.compute()[self.group].clone()
        self._reset_idx(rows)

    def reset(self, rows: Tensor) -> Tensor:
        """Begin new episodes in these rows; a wrapper's `reset` knows all rows only."""
        groups, _ = self.env.reset() if len(rows) == self.num_envs else self.plain.reset(env_ids=rows)
        obs: Tensor = groups[self.group]
        return obs

    def step(self, actions: Tensor) -> Stepped:
        """Step every row."""
        self._final = None
        groups, rewards, terminated, truncated, extras = self.env.step(actions)
        obs = groups[self.group]
        final = self._final if self._final is not None else obs
        if self.resets_here and len(rows := (terminated | truncated).nonzero().squeeze(-1)):
            final, terminated, truncated = obs.clone(), terminated.clone(), truncated.clone()
            begun = self.plain.reset(env_ids=rows)[0][self.group]
            obs = final.index_copy(0, rows, begun[rows])  # the others keep what they have seen
        if getattr(self.plain.cfg, "is_finite_horizon", False):  # the time limit is part of the task
            terminated, truncated = terminated | truncated, torch.zeros_like(truncated)
        log = extras.get("log", {})
        return obs, rewards, terminated, truncated, final if self.has_final_obs else None, log

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


class VectorSimulator(Simulator):
    """A Gymnasium vector environment on torch tensors that resets in the same step, such as ManiSkillVectorEnv."""

    def __init__(self, env: Any) -> None:
        mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
        if mode not in (None, gym.vector.AutoresetMode.SAME_STEP):
            raise UserError(f"the vector environment has autoreset_mode {mode}; it must be SAME_STEP.")
        self.env, self.num_envs, self.device = env, int(env.num_envs), env.device
        if not isinstance(env.single_observation_space, gs.Box):
            raise UserError(f"single_observation_space is {env.single_observation_space}; it must be a Box.")
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        registered = getattr(getattr(env, "spec", None), "max_episode_steps", None)
        self.max_episode_steps = getattr(env, "max_episode_steps", None) or registered
        self.episode_length_buf = getattr(env.unwrapped, "_elapsed_steps", None)  # of ManiSkill

    def reset(self, rows: Tensor) -> Tensor:
        """Begin new episodes in these rows; `env_idx` is ManiSkill's option."""
        options = None if len(rows) == self.num_envs else {"env_idx": rows}
        obs: Tensor = self.env.reset(options=options)[0]
        self.episode_length_buf = getattr(self.env.unwrapped, "_elapsed_steps", None)
        return obs

    def step(self, actions: Tensor) -> Stepped:
        """Step every row; `infos` has final observations only if a row has ended."""
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        final = infos.get("final_observation", infos.get("final_obs"))
        log = dict(infos.get("log", {}))
        episode = infos.get("final_info", {}).get("episode", {})  # metrics of all rows; the ended ones count
        ended = infos.get("_final_info")
        log |= {name: value[ended].float().mean() for name, value in episode.items() if ended is not None}
        return obs, rewards, terminated, truncated, obs if final is None else final, log

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


class RslRlSimulator(Simulator):
    """A `VecEnv` of rsl_rl; it gives no final observations, so time-outs bootstrap from V(s_t), as in rsl_rl."""

    has_final_obs = False

    def __init__(self, env: Any, group: str | None = None, action_limit: float = np.inf) -> None:
        if not callable(getattr(env, "reset", None)):
            raise UserError("the VecEnv has no reset(), which begins new episodes in all rows; add one.")
        self.env, self.group, self.num_envs, self.device = env, group, int(env.num_envs), env.device
        shape = tuple(self._read(env.get_observations()).shape[1:])
        self.observation_space = gs.Box(-np.inf, np.inf, shape, np.float32)
        self.action_space = gs.Box(-action_limit, action_limit, (int(env.num_actions),), np.float32)
        limit = env.max_episode_length
        self.max_episode_steps = int(limit.max() if isinstance(limit, Tensor) else limit)

    @property
    def episode_length_buf(self) -> Any:
        """The environment's own step counts."""
        return self.env.episode_length_buf

    def _read(self, given: Any) -> Tensor:
        """The policy's observations in what a VecEnv of any version gives: a tensor, groups, or a pair with extras."""
        obs: Any = given[0] if isinstance(given, tuple) else given
        return obs if isinstance(obs, Tensor) else obs[choose_group(obs, self.group)]

    def reset(self, rows: Tensor) -> Tensor:
        """Begin new episodes in all rows: a VecEnv cannot reset some of them."""
        if len(rows) != self.num_envs:
            raise UserError(f"rows are {len(rows)} of {self.num_envs}; a VecEnv resets all of them.")
        self.env.reset()
        return self._read(self.env.get_observations())

    def step(self, actions: Tensor) -> Stepped:
        """Step every row; what ended without being in `time_outs` has terminated."""
        obs, rewards, dones, extras = self.env.step(actions)
        ended = dones.bool()
        truncated = extras["time_outs"].bool() & ended if "time_outs" in extras else torch.zeros_like(ended)
        log: Mapping[str, Any] = extras.get("log", extras.get("episode", {}))
        return self._read(obs), rewards, ended & ~truncated, truncated, None, log
