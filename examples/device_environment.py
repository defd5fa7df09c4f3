"""Your own environment as functions of tensors: thousands of drifting boats that step and train on one device.

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
    """Steer a boat to the middle of the harbor against a random wind; the state [N, 4] is position and velocity."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    max_episode_steps = 100
    reset_noise, step_noise = 2, 2  # random numbers per boat for reset and step

    def __init__(self, wind: float = 0.1) -> None:
        self.wind = wind

    def reset(self, noise: Tensor) -> Tensor:
        """Start anywhere, at rest."""
        return torch.cat([2.0 * noise - 1.0, torch.zeros_like(noise)], -1)

    def step(self, state: Tensor, actions: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next state, the rewards, and which boats are lost at sea."""
        position, velocity = state[:, :2], state[:, 2:]
        velocity = 0.9 * velocity + 0.1 * actions + self.wind * (noise - 0.5)
        position = position + 0.1 * velocity
        distance = position.norm(dim=-1)
        lost = distance > 2.0
        return torch.cat([position, velocity], -1), -distance - 10.0 * lost, lost

    def observe(self, state: Tensor) -> Tensor:
        """Return the whole state."""
        return state


def main(total_timesteps: int = 500_000, num_envs: int = 256) -> float:
    """Train, then evaluate one boat at a time."""
    ppo = PPO(Harbor, vectorization="device", num_envs=num_envs, num_steps=32, minibatch_size=num_envs * 8)
    ppo.learn(total_timesteps)
    mean: float = ppo.evaluate(20)["eval_return_mean"]
    print(f"return {mean:.1f}; a boat that does nothing scores about -80")
    return mean


if __name__ == "__main__":
    main()
