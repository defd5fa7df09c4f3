"""Your own network: features of each joint's angle and speed, joined, before SAC's actor and critics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_training import SAC


class JointFeatures(nn.Module):
    """Observations [B, D] as floats -> features [B, F]; the hidden layers and heads of the algorithm stand on them."""

    def __init__(self, spaces: Any) -> None:
        """`spaces` knows the environment: `obs_shape`, `obs_dim`, `action_dim`, `observation_space` and more."""
        super().__init__()
        self.angles = nn.Linear(2, 16)
        self.speeds = nn.Linear(spaces.obs_dim - 2, 16)
        self.norm = nn.LayerNorm(32)

    def forward(self, obs: Tensor) -> Tensor:
        """Pendulum's cosine and sine, and its speed."""
        return self.norm(torch.cat([self.angles(obs[:, :2]), self.speeds(obs[:, 2:])], -1)).tanh()


def main(total_timesteps: int = 8_000, **settings: Any) -> float:
    """Train, save, and load; a file holds the weights and the network's name, so the class is given again."""
    sac = SAC("Pendulum-v1", network=JointFeatures, hidden_sizes=[64, 64], **settings)
    sac.learn(total_timesteps)
    path = sac.save("custom_network.ckpt")
    mean: float = SAC.load(path, network=JointFeatures).evaluate(10)["eval_return_mean"]
    print(f"return {mean:.0f}; at random it is about -1200")
    return mean


if __name__ == "__main__":
    main()
