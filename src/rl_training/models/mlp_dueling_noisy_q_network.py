"""`MLPDuelingNoisyQNetwork`: a preset of `MLPQNetwork`."""

from __future__ import annotations

from typing import Any

from rl_training.models.mlp_q_network import MLPQNetwork


class MLPDuelingNoisyQNetwork(MLPQNetwork):
    """`MLPQNetwork` with a dueling head and noisy layers, as in Rainbow (Hessel et al. 2018, arXiv:1710.02298)."""

    def __init__(self, *, obs_dim: int, action_dim: int, **options: Any) -> None:
        super().__init__(obs_dim=obs_dim, action_dim=action_dim, dueling=True, noisy=True, **options)
