"""Networks of TD3: DDPG's actor with twin critics."""

from __future__ import annotations

from typing import Any

from rl_training.models.mlp_ddpg import MLPDDPGModel


class MLPTD3Model(MLPDDPGModel):
    """Like DDPG's, but `ensemble_values(obs, actions)` is [2, B]."""

    def __init__(self, *, num_critics: int = 2, **options: Any) -> None:
        super().__init__(num_critics=num_critics, **options)
