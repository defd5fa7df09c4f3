"""TD3 in the registry: hyper-parameters and entry."""

from __future__ import annotations

from pydantic import Field

from rl_training.algorithms.td3 import TD3
from rl_training.config.replay_params import SmoothedTargetParams, continuous_spec
from rl_training.models.mlp_td3 import MLPTD3Model
from rl_training.run.workflows import train_function


class TD3Params(SmoothedTargetParams):
    """Hyper-parameters of TD3."""

    learning_rate: float = Field(3e-4, ge=0, le=10, description="Learning rate of actor and critics.")
    num_critics: int = Field(2, ge=1, le=100, description="Number of critics; the target is the smallest of them.")
    policy_noise: float | None = Field(
        0.2, ge=0, le=10, description="Standard deviation of the noise on the target's action; null: no noise."
    )
    policy_delay: int = Field(2, ge=1, le=1_000, description="Critic steps per actor step and target update.")


SPECS = [
    continuous_spec(
        TD3, MLPTD3Model, name="td3", class_name="TD3", year=2018, params=TD3Params,
        paper="Fujimoto et al. 2018, Addressing Function Approximation Error in Actor-Critics (arXiv:1802.09477)",
        scope="Twin critics as one batched network, target smoothing, delayed actor and targets; vectors and images.",
    )
]  # fmt: skip

train_td3 = train_function(__name__, SPECS)
