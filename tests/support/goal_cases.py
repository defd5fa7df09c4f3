"""Environments with goals, one peculiarity each; reached as `goal_cases:ClassName` or as a callable."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces as gs


class Corridor(gym.Env[Any, Any]):
    """Walks along the integers; reward 0 at the goal and -1 elsewhere; five steps, then a truncation."""

    goal_space: gs.Space[Any] = gs.Box(-10.0, 10.0, (1,), np.float64)
    action_space: gs.Space[Any] = gs.Discrete(2)

    def __init__(self, length: int = 5, action: str = "discrete") -> None:
        self.length = length
        if action == "continuous":
            self.action_space = gs.Box(-1.0, 1.0, (1,), np.float32)
        self.observation_space = gs.Dict(
            observation=gs.Box(0.0, 99.0, (2,)), achieved_goal=self.goal_space, desired_goal=self.goal_space
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.place, self.aim = 0, 0, int(self.np_random.integers(1, 4))
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.place += 1 if np.sum(action) > 0 else 0
        seen = self.observe()
        pair = seen["achieved_goal"], seen["desired_goal"]
        ends = hasattr(self, "compute_terminated") and bool(self.compute_terminated(*pair, {}))
        return seen, float(self.compute_reward(*pair, {})), ends, not ends and self.t >= self.length, {}

    def observe(self) -> dict[str, Any]:
        goals = {"achieved_goal": self.as_goal(self.place), "desired_goal": self.as_goal(self.aim)}
        return {"observation": np.array([self.t, self.place], np.float32), **goals}

    def as_goal(self, place: int) -> Any:
        return np.array([place], np.float64)

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        assert achieved_goal.dtype == np.float64
        return -(np.abs(achieved_goal - desired_goal)[..., 0] > 0.5).astype(np.float64)


class EndsThere(Corridor):
    """The goal ends the episode, and the environment says so of any goal."""

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return np.abs(achieved_goal - desired_goal)[..., 0] <= 0.5


class OneByOne(EndsThere):
    """Its functions take one pair of goals; of a batch, one answer is wrong and the other an error."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return 0.0 if achieved_goal == desired_goal else -1.0

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return bool(np.linalg.norm(achieved_goal - desired_goal) <= 0.5)


class NeverEnds(Corridor):
    """Answers with one False for any number of goals, as Fetch does."""

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return False


class DiscreteGoal(EndsThere):
    """Its goals are the numbers 3, 4, ... of a Discrete space."""

    goal_space = gs.Discrete(6, start=3)

    def as_goal(self, place: int) -> Any:
        return np.int64(3 + place)

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        assert np.min(achieved_goal) >= 3
        return -(np.not_equal(achieved_goal, desired_goal)).astype(np.float64)

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return np.equal(achieved_goal, desired_goal)


class WithCamera(Corridor):
    """Sees an image too."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = gs.Dict({**self.observation_space.spaces, "camera": gs.Box(0, 255, (4, 4), np.uint8)})

    def observe(self) -> dict[str, Any]:
        return {**super().observe(), "camera": np.full((4, 4), self.t, np.uint8)}


class ReadsInfo(Corridor):
    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return super().compute_reward(achieved_goal, desired_goal, info) - info.get("cost", 0.0)


class PaysMore(Corridor):
    """Its step pays something that is not a function of the goals."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seen, reward, ends, cut, info = super().step(action)
        return seen, reward - 0.5, ends, cut, info


class NoReward(Corridor):
    compute_reward = None  # type: ignore[assignment]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.observe(), 0.0, False, self.t >= self.length, {}


class OtherGoals(Corridor):
    def __init__(self) -> None:
        super().__init__()
        wide = gs.Box(-10.0, 10.0, (2,), np.float64)
        self.observation_space = gs.Dict({**self.observation_space.spaces, "desired_goal": wide})

    def observe(self) -> dict[str, Any]:
        return {**super().observe(), "desired_goal": np.zeros(2)}


class ImageGoals(Corridor):
    goal_space = gs.Box(0, 255, (4, 4), np.uint8)

    def as_goal(self, place: int) -> Any:
        return np.full((4, 4), place, np.uint8)

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return 0.0
