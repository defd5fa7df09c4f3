"""SAC in the registry: hyper-parameters and entry."""

from __future__ import annotations

from rl_training.algorithms.sac import SAC
from rl_training.config.replay_params import SACParams, continuous_spec
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.run.workflows import train_function

SPECS = [
    continuous_spec(
        SAC, MLPSACModel, name="sac", class_name="SAC", year=2018, params=SACParams,
        paper="Haarnoja et al. 2018, Soft Actor-Critic Algorithms and Applications (arXiv:1812.05905)",
        scope="Tanh-squashed Gaussian actor, twin critics as one batched network, fixed or tuned temperature; axes for "
        "more critics, subsets, quantiles, dropout and LayerNorm; vectors and images.",
    )
]  # fmt: skip

train_sac = train_function(__name__, SPECS)
