"""`MLPNoisyQNetwork`: a preset of `MLPQNetwork`."""

from __future__ import annotations

from typing import Any

from rl_training.models.mlp_q_network import MLPQNetwork


class MLPNoisyQNetwork(MLPQNetwork):
    """`MLPQNetwork` with noisy layers (Fortunato et al. 2018, arXiv:1706.10295)."""

    def __init__(self, *, obs_dim: int, action_dim: int, **options: Any) -> None:
        super().__init__(obs_dim=obs_dim, action_dim=action_dim, noisy=True, **options)
