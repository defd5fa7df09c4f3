"""A small deterministic simulator for tests: point masses that are pushed to the middle of a line."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from rl_training.envs.simulator import Simulator, Stepped


class Points(Simulator):
    """The state is the place of a point; it is lost beyond 2, and an episode has at most `max_episode_steps` steps.

    As real simulators do, it returns the same tensors at every step, with new contents.
    """

    observation_space = gs.Box(-np.inf, np.inf, (2,), np.float32)
    action_space: Any = gs.Box(-1.0, 1.0, (1,), np.float32)
    max_episode_steps = 10

    def __init__(self, num_envs: int = 16, seed: int = 0) -> None:
        self.num_envs = num_envs
        self.generator = torch.Generator().manual_seed(seed)
        self.place, self.obs, self.rewards = torch.zeros(num_envs), torch.zeros(num_envs, 2), torch.zeros(num_envs)
        self.final_obs = torch.zeros(num_envs, 2)
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.int64)
        self.actions: list[Tensor] = []
        self.resets = self.closed = 0

    def observe(self) -> Tensor:
        return torch.stack([self.place, self.episode_length_buf / 10.0], -1)

    def begin(self, rows: Tensor) -> None:
        """New episodes in the rows of a mask."""
        places = torch.rand(self.num_envs, generator=self.generator) * 2 - 1
        self.place = torch.where(rows, places, self.place)
        self.episode_length_buf.masked_fill_(rows, 0)

    def reset(self, rows: Tensor) -> Tensor:
        self.resets += 1
        self.begin(torch.zeros(self.num_envs, dtype=torch.bool).index_fill(0, rows, True))
        return self.obs.copy_(self.observe())

    def move(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Everything but the resets."""
        self.actions.append(actions.clone())
        self.place = self.place + 0.5 * actions[:, 0]
        self.episode_length_buf += 1
        self.rewards.copy_(1.0 - self.place.abs())
        return self.place.abs() > 2.0, self.episode_length_buf >= self.max_episode_steps

    def step(self, actions: Tensor) -> Stepped:
        terminated, truncated = self.move(actions)
        self.final_obs.copy_(self.observe())
        self.begin(terminated | truncated)
        log = {"distance": self.place.abs().mean(), "steps": 1}
        finals = self.final_obs if self.has_final_obs else None
        return self.obs.copy_(self.observe()), self.rewards, terminated, truncated, finals, log

    def close(self) -> None:
        self.closed += 1


class SavedPoints(Points):
    """The same, with a state that can be saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "ages": self.episode_length_buf, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"].clone()
        self.episode_length_buf.copy_(state["ages"])
        self.generator.set_state(state["generator"])


class BlindPoints(Points):
    """The same without final observations."""

    has_final_obs = False


class GroupedPoints(SavedPoints):
    """The same, whose observations are groups: of the actor, and what the critic sees as well, which is above 50."""

    observation_space: Any = gs.Dict(
        [("critic", gs.Box(-np.inf, np.inf, (3,), np.float32)), ("actor", gs.Box(-np.inf, np.inf, (2,), np.float32))]
    )

    def reset(self, rows: Tensor) -> Any:
        return as_groups(super().reset(rows))

    def step(self, actions: Tensor) -> Any:
        obs, rewards, terminated, truncated, final_obs, log = super().step(actions)
        finals = None if final_obs is None else as_groups(final_obs)
        return as_groups(obs), rewards, terminated, truncated, finals, log


def as_groups(obs: Any) -> dict[str, Tensor]:
    """The groups that belong to observations of points; in another order than in their space."""
    return {"actor": obs, "critic": torch.cat([100.0 + obs, 100.0 + obs.sum(-1, keepdim=True)], -1)}


class BlindGroupedPoints(GroupedPoints):
    """The same without final observations."""

    has_final_obs = False


class TenPoints(SavedPoints):
    """Ten rows."""

    def __init__(self) -> None:
        super().__init__(10)


class TenGrouped(GroupedPoints):
    """Ten rows."""

    def __init__(self) -> None:
        super().__init__(10)


def make(count: int) -> Points:
    """So many rows."""
    return Points(count)
