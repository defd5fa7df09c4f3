"""Your own environment, from the class to a trained policy: walk to the right end of a corridor.

    python examples/own_environment.py
    rl-training train --algo dqn --env own_environment:Corridor      # the same from the command line, in examples/
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from rl_training import DQN


class Corridor(gym.Env[Any, Any]):
    """Left or right, each step costs a little, the right end pays 1."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int = 10) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start somewhere in the left half; `np_random` is seeded by `super().reset`, so that runs can be repeated."""
        super().reset(seed=seed)
        self.place, self.steps = int(self.np_random.integers(self.length // 2)), 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """`terminated` is a real end; `truncated` is the time limit, after which the value still counts."""
        self.place, self.steps = max(0, self.place + (1 if action else -1)), self.steps + 1
        terminated = self.place >= self.length
        return self.observe(), 1.0 if terminated else -0.01, terminated, self.steps >= 100, {}

    def observe(self) -> Any:
        """Where we are, between 0 and 1."""
        return np.array([self.place / self.length], np.float32)


def main(total_timesteps: int = 5_000) -> float:
    """Train and evaluate."""
    dqn = DQN(Corridor, env_kwargs={"length": 12}, learning_starts=200)
    dqn.learn(total_timesteps)
    mean: float = dqn.evaluate(10)["eval_return_mean"]
    print(f"return {mean:.2f}; the best is about 0.9")
    return mean


if __name__ == "__main__":
    main()
