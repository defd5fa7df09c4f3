"""Networks of TD3: DDPG's actor with twin critics."""

from __future__ import annotations

from rl_training.models.mlp_ddpg import MLPDDPGModel


class MLPTD3Model(MLPDDPGModel):
    """Like DDPG's, but `ensemble_values(obs, actions)` is [2, B]."""

    num_critics = 2
