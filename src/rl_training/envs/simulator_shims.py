"""Simulators of other packages as `Simulator`s; none of those packages is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor
from torch.utils._pytree import tree_map

from rl_training.envs.device import Observed, space_of
from rl_training.envs.simulator import Simulator, Stepped
from rl_training.envs.spaces import groups_of
from rl_training.errors import UserError

GROUPS = "policy", "actor"  # names of the observations that a policy sees, in Isaac Lab and mjlab


def choose_group(obs: Any, group: str | Sequence[str] | None) -> str | list[str]:
    """The name of the group of observations that is used, by default the policy's; or the names of several."""
    known = list(obs.keys())  # a TensorDict is no mapping of its own
    chosen = next((name for name in GROUPS if name in known), "") if group is None else group
    names = [chosen] if isinstance(chosen, str) else list(chosen)
    if not names or set(names) - set(known):
        raise UserError(f"group is {group!r}; the simulator's groups of observations are {', '.join(known)}.")
    return chosen if isinstance(chosen, str) else names


def pick(obs: Any, group: str | list[str]) -> Any:
    """What belongs to that group, or a mapping of those groups."""
    return obs[group] if isinstance(group, str) else {name: obs[name] for name in group}


def as_box(space: Any) -> gs.Box:
    """A space with `shape`, `low` and `high`, which are numbers or arrays, as Gymnasium's Box of float32."""
    if not hasattr(space, "low"):
        raise UserError(f"a space of the simulator is {space}; it must be a Box (one tensor: concatenate the terms).")
    low, high = (np.broadcast_to(bound, space.shape).astype(np.float32) for bound in (space.low, space.high))
    return gs.Box(low, high, dtype=np.float32)


def computes_anew(manager: Any, group: str | list[str]) -> bool:
    """Whether a manager of observations computes these groups from the current state when it is asked between steps.

    A manager may hand out what it has computed last (mjlab's does); so that is marked, and looked for in the next
    answer. A history grows in a step only.
    """
    names = [group] if isinstance(group, str) else group
    if any(getattr(manager, "_group_obs_term_history_buffer", {}).get(name) for name in names):
        return False
    marked: Tensor = manager.compute()[names[0]]
    kept = marked.clone()
    marked.fill_(torch.nan)
    is_new = not bool(manager.compute()[names[0]].isnan().any())
    marked.copy_(kept)
    return is_new


class ManagerSimulator(Simulator):
    """A manager-style environment of Isaac Lab or mjlab, whose observations are groups; `group` names one or several.

    The final observation is real. If the environment can leave ended episodes as they are (mjlab's `auto_reset`), they
    are reset here; otherwise the observations are computed just before its `_reset_idx`. If neither is possible, there
    are none.
    """

    def __init__(self, env: Any, group: str | Sequence[str] | None = None) -> None:
        self.env, self.plain = env, env.unwrapped
        self.num_envs, self.device = int(self.plain.num_envs), self.plain.device
        spaces = self.plain.single_observation_space.spaces
        self.group = choose_group(spaces, group)
        boxes = tree_map(as_box, pick(spaces, self.group))
        self.observation_space = gs.Dict(list(boxes.items())) if isinstance(boxes, dict) else boxes
        self.action_space = as_box(self.plain.single_action_space)
        self.max_episode_steps = int(self.plain.max_episode_length)
        self.resets_here = hasattr(self.plain.cfg, "auto_reset")
        manager = getattr(self.plain, "observation_manager", None)
        self.has_final_obs = self.resets_here or (manager is not None and computes_anew(manager, self.group))
        self._final: Observed | None = None
        if self.resets_here:
            self.plain.cfg.auto_reset = False
        elif self.has_final_obs:
            self._reset_idx, self.plain._reset_idx = self.plain._reset_idx, self._before_reset

    @property
    def episode_length_buf(self) -> Any:
        """The environment's own step counts."""
        return self.plain.episode_length_buf

    def _before_reset(self, rows: Any) -> None:
        self._final = tree_map(torch.clone, pick(self.plain.observation_manager.compute(), self.group))
        self._reset_idx(rows)

    def reset(self, rows: Tensor) -> Observed:
        """Begin new episodes in these rows; a wrapper's `reset` knows all rows only."""
        groups, _ = self.env.reset() if len(rows) == self.num_envs else self.plain.reset(env_ids=rows)
        obs: Observed = pick(groups, self.group)
        return obs

    def step(self, actions: Tensor) -> Stepped:
        """Step every row."""
        self._final = None
        groups, rewards, terminated, truncated, extras = self.env.step(actions)
        obs = pick(groups, self.group)
        final = self._final if self._final is not None else obs
        if self.resets_here and len(rows := (terminated | truncated).nonzero().squeeze(-1)):
            final, terminated, truncated = tree_map(torch.clone, obs), terminated.clone(), truncated.clone()
            begun = pick(self.plain.reset(env_ids=rows)[0], self.group)
            # the others keep what they have seen
            obs = tree_map(lambda seen, new: seen.index_copy(0, rows, new[rows]), final, begun)
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
        space = env.single_observation_space
        if not all(isinstance(part, gs.Box) for part in groups_of(space).values()):
            raise UserError(f"single_observation_space is {space}; it must be a Box or a Dict of Boxes.")
        self.observation_space, self.action_space = space, env.single_action_space
        registered = getattr(getattr(env, "spec", None), "max_episode_steps", None)
        self.max_episode_steps = getattr(env, "max_episode_steps", None) or registered
        self.episode_length_buf = getattr(env.unwrapped, "_elapsed_steps", None)  # of ManiSkill

    def reset(self, rows: Tensor) -> Observed:
        """Begin new episodes in these rows; `env_idx` is ManiSkill's option."""
        options = None if len(rows) == self.num_envs else {"env_idx": rows}
        obs: Observed = self.env.reset(options=options)[0]
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


def find_groups(given: Any, extras: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """The groups in the observations of a VecEnv of any version: groups, or the policy's tensor and extras."""
    obs, extras = given if isinstance(given, tuple) else (given, extras)
    return {**extras.get("observations", {}), GROUPS[0]: obs} if isinstance(obs, Tensor) else obs


class RslRlSimulator(Simulator):
    """A `VecEnv` of rsl_rl; it gives no final observations, so time-outs bootstrap from V(s_t), as in rsl_rl."""

    has_final_obs = False

    def __init__(self, env: Any, group: str | Sequence[str] | None = None, action_limit: float = np.inf) -> None:
        if not callable(getattr(env, "reset", None)):
            raise UserError("the VecEnv has no reset(), which begins new episodes in all rows; add one.")
        self.env, self.num_envs, self.device = env, int(env.num_envs), env.device
        groups = find_groups(env.get_observations())
        self.group = choose_group(groups, group)
        self.observation_space = space_of(pick(groups, self.group))
        self.action_space = gs.Box(-action_limit, action_limit, (int(env.num_actions),), np.float32)
        limit = env.max_episode_length
        self.max_episode_steps = int(limit.max() if isinstance(limit, Tensor) else limit)

    @property
    def episode_length_buf(self) -> Any:
        """The environment's own step counts."""
        return self.env.episode_length_buf

    def reset(self, rows: Tensor) -> Observed:
        """Begin new episodes in all rows: a VecEnv cannot reset some of them."""
        if len(rows) != self.num_envs:
            raise UserError(f"rows are {len(rows)} of {self.num_envs}; a VecEnv resets all of them.")
        self.env.reset()
        obs: Observed = pick(find_groups(self.env.get_observations()), self.group)
        return obs

    def step(self, actions: Tensor) -> Stepped:
        """Step every row; what ended without being in `time_outs` has terminated."""
        obs, rewards, dones, extras = self.env.step(actions)
        ended = dones.bool()
        truncated = extras["time_outs"].bool() & ended if "time_outs" in extras else torch.zeros_like(ended)
        log: Mapping[str, Any] = extras.get("log", extras.get("episode", {}))
        return pick(find_groups(obs, extras), self.group), rewards, ended & ~truncated, truncated, None, log
