"""Environments as people write them at first; `Walk` is right, and each of the others has one mistake."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces

SETTINGS = {"size": 5}


class Walk(gym.Env):
    """Two numbers, two actions, ten steps."""

    observation_space: spaces.Space = spaces.Box(-1, 1, (2,), np.float32)
    action_space: spaces.Space = spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def observe(self):
        return np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action):
        self.time += 1
        return self.observe(), 1.0, False, self.time == 10, {}


class OldReset(Walk):
    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.observe()


class OldestReset(Walk):
    def reset(self):
        self.time = 0
        return self.observe(), {}


class OldStep(Walk):
    def step(self, action):
        self.time += 1
        return self.observe(), 1.0, self.time == 10, {}


class WrongShape(Walk):
    def observe(self):
        return np.zeros(3, np.float32)


class FloatsForInts(Walk):
    observation_space = spaces.Box(0, 9, (2,), np.int64)

    def observe(self):
        return np.array([0.5, 1.5])


class NotANumber(Walk):
    def observe(self):
        return np.full(2, np.nan, np.float32)


class NoReward(Walk):
    def step(self, action):
        return self.observe(), None, False, False, {}


class Divides(Walk):
    def step(self, action):
        return self.observe(), 1 / 0, False, False, {}


class NoSpaces(gym.Env):
    def reset(self, *, seed=None, options=None):
        return np.zeros(2), {}


class SwappedSpaces(Walk):
    action_space = {"left": 0, "right": 1}


class NeedsSize(Walk):
    def __init__(self, size):
        self.size = size


class NotAnEnv:
    pass


class Masked(Walk):
    def action_masks(self):
        return np.array([True, False])


class FloatImage(Walk):
    observation_space = spaces.Box(0, 1, (16, 16, 3), np.float32)

    def observe(self):
        return np.zeros((16, 16, 3), np.float32)


class Words(Walk):
    observation_space = spaces.Text(5)

    def observe(self):
        return "hello"


class Endless(Walk):
    def step(self, action):
        return self.observe(), 1.0, False, False, {}


class Unbounded(Walk):
    action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)


class Sampling(Walk):
    """Forgets `seed`, and draws from the global generator."""

    def observe(self):
        return np.random.uniform(-1, 1, 2).astype(np.float32)


gym.register("Walk-v0", entry_point=Walk)


class Solved(Walk):
    """Says of each episode that it succeeded."""

    def step(self, action):
        return *super().step(action)[:4], {"is_success": True}
