"""An environment of your own as functions of tensors: thousands of drifting boats, stepped and learned on one device.

    python examples/device_environment.py
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from rl_training import PPO
from rl_training.envs.device import DeviceEnvironment


class Harbor(DeviceEnvironment):
    """Steer a boat [N, 4], place and speed, to the middle of the harbor against a current that changes by chance."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    max_episode_steps = 100
    reset_noise, step_noise = 2, 2  # numbers in [0, 1) that each boat gets

    def __init__(self, wind: float = 0.1) -> None:
        self.wind = wind

    def reset(self, noise: Tensor) -> Tensor:
        """Anywhere, at rest."""
        return torch.cat([2.0 * noise - 1.0, torch.zeros_like(noise)], -1)

    def step(self, state: Tensor, actions: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next state, the rewards, and which boats are lost at sea."""
        place, speed = state[:, :2], state[:, 2:]
        speed = 0.9 * speed + 0.1 * actions + self.wind * (noise - 0.5)
        place = place + 0.1 * speed
        distance = place.norm(dim=-1)
        lost = distance > 2.0
        return torch.cat([place, speed], -1), -distance - 10.0 * lost, lost

    def observe(self, state: Tensor) -> Tensor:
        """All of it."""
        return state


def main(total_timesteps: int = 500_000, num_envs: int = 256) -> float:
    """Train, and evaluate on one boat after another."""
    ppo = PPO(Harbor, vectorization="device", num_envs=num_envs, num_steps=32, minibatch_size=num_envs * 8)
    ppo.learn(total_timesteps)
    mean: float = ppo.evaluate(20)["eval_return_mean"]
    print(f"return {mean:.1f}; a boat that does nothing has about -80")
    return mean


if __name__ == "__main__":
    main()
