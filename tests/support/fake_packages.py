"""Environments of the shapes of other packages, around the simulator for tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor
from torch.utils._pytree import tree_map

from fake_simulator import BlindPoints, Points, SavedPoints, as_groups


class Managed:
    """Of Isaac Lab's shape: groups of observations, and a reset in every step before they are read."""

    def __init__(self, num_envs: int = 4) -> None:
        self.points, self.num_envs, self.device, self.max_episode_length = SavedPoints(num_envs), num_envs, "cpu", 10
        self.cfg, self.extras = SimpleNamespace(), {"log": {}}
        self.single_observation_space = gs.Dict(
            {"policy": gs.Box(-np.inf, np.inf, (2,)), "critic": gs.Box(-np.inf, np.inf, (3,))}
        )
        self.single_action_space = gs.Box(-np.inf, np.inf, (1,))
        self.observation_manager: Any = SimpleNamespace(compute=self.compute)
        self.unwrapped = self

    @property
    def episode_length_buf(self) -> Tensor:
        return self.points.episode_length_buf

    def compute(self, update_history: bool = False) -> dict[str, Tensor]:
        groups = as_groups(self.points.observe())
        return {"critic": groups["critic"], "policy": groups["actor"]}

    def _reset_idx(self, rows: Tensor) -> None:
        self.points.begin(torch.zeros(self.num_envs, dtype=torch.bool).index_fill(0, rows, True))
        self.extras["log"] = {"Episode/ended": torch.tensor(float(len(rows)))}

    def reset(self, *, env_ids: Tensor | None = None) -> Any:
        self._reset_idx(torch.arange(self.num_envs) if env_ids is None else env_ids)
        return self.compute(update_history=True), self.extras

    def step(self, actions: Tensor) -> Any:
        terminated, truncated = self.points.move(actions)
        rows = (terminated | truncated).nonzero().squeeze(-1)
        if len(rows) and getattr(self.cfg, "auto_reset", True):
            self._reset_idx(rows)
        return self.compute(update_history=True), self.points.rewards, terminated, truncated, self.extras

    def close(self) -> None:
        self.points.close()


class ManagedByHand(Managed):
    """Of mjlab's shape: ended episodes can stay as they are."""

    def __init__(self, num_envs: int = 4) -> None:
        super().__init__(num_envs)
        self.cfg.auto_reset = True


class Cached(Managed):
    """Of mjlab's shape without its `auto_reset`: between steps, `compute` gives what it has computed last."""

    cache: dict[str, Tensor] | None = None

    def compute(self, update_history: bool = False) -> dict[str, Tensor]:
        if update_history or self.cache is None:
            self.cache = super().compute()
        return self.cache

    def _reset_idx(self, rows: Tensor) -> None:
        self.cache = None
        super()._reset_idx(rows)


class Remembering(Managed):
    """The policy's observations contain a history, which grows in a step only."""

    def __init__(self, num_envs: int = 4) -> None:
        super().__init__(num_envs)
        self.observation_manager._group_obs_term_history_buffer = {"policy": {"place": object()}, "critic": {}}


class Direct(Managed):
    """Without a manager of observations."""

    def __init__(self, num_envs: int = 4) -> None:
        super().__init__(num_envs)
        del self.observation_manager


class Vector(gym.vector.VectorEnv):  # type: ignore[type-arg]
    """Of ManiSkill's shape."""

    def __init__(self, num_envs: int = 4, kind: type[Points] = Points) -> None:
        self.points, self.num_envs, self.device, self.max_episode_steps = kind(num_envs), num_envs, "cpu", 10
        self.single_observation_space, self.single_action_space = kind.observation_space, kind.action_space

    @property
    def _elapsed_steps(self) -> Tensor:
        return self.points.episode_length_buf

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        rows = torch.arange(self.num_envs) if options is None else options["env_idx"]
        return tree_map(torch.clone, self.points.reset(rows)), {}

    def step(self, actions: Tensor) -> Any:
        obs, rewards, terminated, truncated, final_obs, _ = self.points.step(actions)
        done, infos = terminated | truncated, {}
        if done.any():
            infos = {"final_observation": final_obs, "_final_observation": done, "_final_info": done}
            infos["final_info"] = {"episode": {"success_once": truncated}}
        return obs, rewards, terminated, truncated, infos


class VecEnv:
    """Of rsl_rl's shape."""

    def __init__(self, num_envs: int = 4, grouped: bool = True) -> None:
        self.points, self.num_envs, self.num_actions, self.device = BlindPoints(num_envs), num_envs, 1, "cpu"
        self.max_episode_length, self.grouped = 10, grouped
        self.reset()

    @property
    def episode_length_buf(self) -> Tensor:
        return self.points.episode_length_buf

    def get_observations(self) -> Any:
        groups = as_groups(self.points.observe())
        obs, critic = groups["actor"], groups["critic"]
        return {"policy": obs, "critic": critic} if self.grouped else (obs, {"observations": {"critic": critic}})

    def reset(self) -> Any:
        self.points.reset(torch.arange(self.num_envs))
        return self.get_observations(), {}

    def step(self, actions: Tensor) -> Any:
        _, rewards, terminated, truncated, _, log = self.points.step(actions)
        extras = {"time_outs": truncated, "log": {"/distance": log["distance"]}}
        obs = self.get_observations()
        if not self.grouped:
            obs, extras = obs[0], extras | obs[1]
        return obs, rewards, (terminated | truncated).long(), extras
