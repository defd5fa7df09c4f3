"""Your own simulator, which keeps its state: hundreds of carts that train and are evaluated on one device.

    python examples/simulator.py
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from rl_training import PPO
from rl_training.envs.simulator import Simulator, Stepped


class Carts(Simulator):
    """Carts on a line, which should come to rest in the middle; a cart that leaves the line is lost."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    max_episode_steps = 50

    def __init__(self, num_envs: int = 256, device: str = "cpu", seed: int = 0) -> None:
        self.num_envs, self.device = num_envs, device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.state = torch.zeros(num_envs, 2, device=device)  # position and velocity
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.int64, device=device)

    def reset(self, rows: Tensor) -> Tensor:
        """Begin new episodes in these rows; return the observations of all rows."""
        chosen = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self._begin(chosen.index_fill(0, rows, True))
        return self.state

    def _begin(self, chosen: Tensor) -> None:
        position = 2.0 * torch.rand(self.num_envs, generator=self.generator, device=self.device) - 1.0
        start = torch.stack([position, torch.zeros_like(position)], -1)
        self.state = torch.where(chosen[:, None], start, self.state)
        self.episode_length_buf.masked_fill_(chosen, 0)

    def step(self, actions: Tensor) -> Stepped:
        """Push every cart; begin a new episode in every row whose episode ends."""
        velocity = 0.95 * self.state[:, 1] + 0.1 * actions[:, 0]
        position = self.state[:, 0] + 0.2 * velocity
        self.state = torch.stack([position, velocity], -1)
        self.episode_length_buf += 1
        lost, late = position.abs() > 2.0, self.episode_length_buf >= self.max_episode_steps
        rewards, final_obs = 1.0 - position.abs() - 10.0 * lost, self.state
        log = {"speed": velocity.abs().mean(), "lost": lost.float().mean()}
        self._begin(lost | late)
        return self.state, rewards, lost, late, final_obs, log

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, so that a resumed run continues exactly."""
        return {"state": self.state, "ages": self.episode_length_buf, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; the tensors come back on the CPU."""
        self.state = state["state"].to(self.device)
        self.episode_length_buf.copy_(state["ages"])
        self.generator.set_state(state["generator"])


def main(total_timesteps: int = 400_000, num_envs: int = 256) -> float:
    """Train, and evaluate in the rows that training does not see."""
    settings = {"action_limit": 1.0, "random_ages": True, "eval_rows": num_envs // 16}
    ppo = PPO(
        Carts(num_envs), vectorization="device", env_kwargs={"simulator": settings}, eval_episodes=num_envs // 16,
        num_steps=32, minibatch_size=num_envs * 8,
    )  # fmt: skip
    metrics = ppo.learn(total_timesteps).metrics
    mean: float = metrics["eval_return_mean"]
    print(f"return {mean:.1f}, mean speed {metrics['sim/speed']:.2f}; carts that are not pushed score about 25")
    return mean


if __name__ == "__main__":
    main()
