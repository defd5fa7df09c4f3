"""`MLPDuelingQNetwork`: a preset of `MLPQNetwork`."""

from __future__ import annotations

from typing import Any

from rl_training.models.mlp_q_network import MLPQNetwork


class MLPDuelingQNetwork(MLPQNetwork):
    """`MLPQNetwork` with a dueling head (Wang et al. 2016, arXiv:1511.06581)."""

    def __init__(self, *, obs_dim: int, action_dim: int, **options: Any) -> None:
        super().__init__(obs_dim=obs_dim, action_dim=action_dim, dueling=True, **options)
