"""Two small tasks that a policy without memory cannot solve."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces as gs
from gymnasium.envs.classic_control import CartPoleEnv

from rl_training.envs.spaces import Array


class TMaze(gym.Env[Any, Any]):
    """A sign at the start says where to turn at the end of a corridor, in which every action is a step ahead.

    The right turn earns 1, the other one 0 (after Bakker 2001, Reinforcement Learning with Long Short-Term Memory).
    """

    def __init__(self, length: int = 10) -> None:
        self.length = length
        self.observation_space = gs.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = gs.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Draw the sign."""
        super().reset(seed=seed)
        self.place, self.sign = 0, int(self.np_random.integers(2))
        return self.observe(), {}

    def observe(self) -> Array:
        """The sign, -1 or 1, or 0 where it cannot be seen; and whether this is the end of the corridor."""
        return np.array([0 if self.place else 2 * self.sign - 1, self.place == self.length], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Go on, or turn."""
        if self.place == self.length:
            return self.observe(), float(action == self.sign), True, False, {}
        self.place += 1
        return self.observe(), 0.0, False, False, {}


class CartPolePositions(gym.ObservationWrapper[Any, Any, Any]):
    """CartPole-v1 without velocities: the observation is the position of the cart and the angle of the pole."""

    def __init__(self, **options: Any) -> None:
        super().__init__(CartPoleEnv(**options))
        self.observation_space = gs.Box(-5.0, 5.0, (2,), np.float32)  # an episode ends at 2.4, and at 0.21

    def observation(self, observation: Array) -> Array:
        """Position and angle."""
        return np.asarray(observation)[[0, 2]]
