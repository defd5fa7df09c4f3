"""Two small tasks with goals and sparse rewards, which replay solves with hindsight and not without (docs/goals.md)."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces as gs

from rl_training.envs.spaces import Array


class GoalTask(gym.Env[Any, Any]):
    """Every step costs 1 until the goal is reached; `info["is_success"]` says whether it is.

    A subclass sets `goal` and defines `achieved`, `compute_reward` and `move`.
    """

    goal: Array
    steps: int
    max_steps: int

    def achieved(self) -> Array:
        """The goal that the current state would reach."""
        raise NotImplementedError

    def observe(self) -> dict[str, Array]:
        """What the agent sees."""
        return {"observation": self.achieved(), "achieved_goal": self.achieved(), "desired_goal": self.goal.copy()}

    def compute_reward(self, achieved_goal: Array, desired_goal: Array, info: Any) -> Array:
        """0 where a goal [..., G] is reached, -1 elsewhere."""
        raise NotImplementedError

    def compute_terminated(self, achieved_goal: Array, desired_goal: Array, info: Any) -> Array:
        """Whether the episode ends there; here never."""
        return np.zeros(np.shape(achieved_goal)[:-1], dtype=bool)

    def move(self, action: Any) -> None:
        """Change the state."""
        raise NotImplementedError

    def step(self, action: Any) -> tuple[dict[str, Array], float, bool, bool, dict[str, Any]]:
        """Move; the episode is cut after `max_steps`."""
        self.move(action)
        self.steps += 1
        pair = self.achieved(), self.goal
        reward = float(self.compute_reward(*pair, {}))
        ends = bool(self.compute_terminated(*pair, {}))
        return self.observe(), reward, ends, not ends and self.steps >= self.max_steps, {"is_success": reward == 0.0}


class BitFlip(GoalTask):
    """Flip bits of a random word, one per step, until it is another random word; the episode ends there, or after as
    many steps as there are bits (Andrychowicz et al. 2017, section 3.1)."""

    def __init__(self, bits: int = 15) -> None:
        self.max_steps = bits
        self.action_space = gs.Discrete(bits)
        word = gs.MultiBinary(bits)
        self.observation_space = gs.Dict(observation=word, achieved_goal=word, desired_goal=word)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Draw two different words."""
        super().reset(seed=seed)
        self.steps = 0
        self.word, self.goal = self.np_random.integers(0, 2, (2, self.max_steps), dtype=np.int8)
        if (self.word == self.goal).all():
            self.goal[0] ^= 1
        return self.observe(), {}

    def achieved(self) -> Array:
        """The word."""
        return np.array(self.word)

    def move(self, action: Any) -> None:
        """Flip that bit."""
        self.word[action] ^= 1

    def compute_reward(self, achieved_goal: Array, desired_goal: Array, info: Any) -> Array:
        """0 for the same word, -1 for any other."""
        return np.where((achieved_goal == desired_goal).all(axis=-1), 0.0, -1.0)

    def compute_terminated(self, achieved_goal: Array, desired_goal: Array, info: Any) -> Array:
        """Whether the words are the same."""
        ends: Array = (achieved_goal == desired_goal).all(axis=-1)
        return ends


class PointReach(GoalTask):
    """Bring a point with inertia to a random place in the cube [-1, 1]^3 and keep it there; 50 steps."""

    max_steps = 50
    reach = 0.1  # how near the goal is near enough

    def __init__(self) -> None:
        self.action_space = gs.Box(-1.0, 1.0, (3,), np.float32)
        place = gs.Box(-1.0, 1.0, (3,), np.float32)
        state = gs.Box(-1.0, 1.0, (6,), np.float32)
        self.observation_space = gs.Dict(observation=state, achieved_goal=place, desired_goal=place)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Draw place and goal; the point rests."""
        super().reset(seed=seed)
        self.steps = 0
        self.place, self.goal = self.np_random.uniform(-1.0, 1.0, (2, 3)).astype(np.float32)
        self.speed = np.zeros(3, dtype=np.float32)
        return self.observe(), {}

    def observe(self) -> dict[str, Array]:
        """Place and speed, and the goals."""
        return {**super().observe(), "observation": np.concatenate([self.place, self.speed])}

    def achieved(self) -> Array:
        """The place."""
        return np.array(self.place)

    def move(self, action: Any) -> None:
        """Accelerate; a wall stops the point."""
        self.speed = (0.8 * self.speed + 0.05 * np.asarray(action, np.float32)).clip(-1.0, 1.0)
        moved = self.place + self.speed
        self.place = moved.clip(-1.0, 1.0)
        self.speed[self.place != moved] = 0.0

    def compute_reward(self, achieved_goal: Array, desired_goal: Array, info: Any) -> Array:
        """0 near the goal, -1 elsewhere."""
        return np.where(np.linalg.norm(achieved_goal - desired_goal, axis=-1) <= self.reach, 0.0, -1.0)
