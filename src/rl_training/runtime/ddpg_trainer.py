"""DDPG in the registry: hyper-parameters and entry."""

from __future__ import annotations

from pydantic import Field

from rl_training.algorithms.ddpg import DDPG
from rl_training.config.replay_params import SmoothedTargetParams, continuous_spec
from rl_training.models.mlp_ddpg import MLPDDPGModel
from rl_training.run.workflows import train_function


class DDPGParams(SmoothedTargetParams):
    """Hyper-parameters of DDPG."""

    learning_rate: float = Field(1e-3, ge=0, le=10, description="Learning rate of actor and critic.")


SPECS = [
    continuous_spec(
        DDPG, MLPDDPGModel, name="ddpg", class_name="DDPG", year=2015, params=DDPGParams,
        paper="Lillicrap et al. 2015, Continuous control with deep reinforcement learning (arXiv:1509.02971)",
        scope="Deterministic actor and critic, target networks, Gaussian noise instead of the paper's OU noise; "
        "the axes of TD3 and DrQ-v2; vectors and images.",
    )
]  # fmt: skip

train_ddpg = train_function(__name__, SPECS)
