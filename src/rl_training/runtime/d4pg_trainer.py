"""D4PG in the registry: hyper-parameters and entry."""

from __future__ import annotations

from pydantic import Field

from rl_training.algorithms.d4pg import D4PG
from rl_training.config.replay_params import SmoothedTargetParams, SupportParams, continuous_spec
from rl_training.models.mlp_d4pg import MLPD4PGModel
from rl_training.run.workflows import train_function


class D4PGParams(SupportParams, SmoothedTargetParams):
    """Hyper-parameters of D4PG."""

    learning_rate: float = Field(3e-4, ge=0, le=10, description="Learning rate of actor and critic.")
    target_update_interval: int = Field(1, ge=1, description="Updates between target updates; the paper: 100, tau 1.")
    exploration_noise: float = Field(0.3, ge=0, le=10, description="Deviation of the noise on actions in [-1, 1].")
    n_step: int = Field(5, ge=1, le=1_000, description="Number of rewards in a return before bootstrapping.")


SPECS = [
    continuous_spec(
        D4PG, MLPD4PGModel, name="d4pg", class_name="D4PG", year=2018, params=D4PGParams,
        paper="Barth-Maron et al. 2018, Distributed Distributional Deterministic Policy Gradients (arXiv:1804.08617)",
        scope="Categorical critics, n-step targets, optional prioritized replay; the axes of TD3, with which it is "
        "FastTD3; vectors and images.",
    )
]  # fmt: skip

train_d4pg = train_function(__name__, SPECS)
