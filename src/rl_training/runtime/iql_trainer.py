"""IQL in the registry: hyper-parameters and entry."""

from __future__ import annotations

from pydantic import Field

from rl_training.algorithms.iql import IQL
from rl_training.config.offline_params import AdvantageWeightedParams, offline_spec
from rl_training.models.mlp_awac import MLPIQLModel
from rl_training.run.workflows import train_function


class IQLParams(AdvantageWeightedParams):
    """Hyper-parameters of IQL."""

    expectile: float = Field(
        0.7, gt=0, lt=1, description="Tau: 0.5 is the mean over recorded actions, near 1 the best of them."
    )
    beta: float = Field(3.0, ge=0, description="Recorded actions have the weight exp(beta * advantage); 0: imitation.")


SPECS = [
    offline_spec(
        IQL, MLPIQLModel, name="iql", class_name="IQL", year=2021, params=IQLParams,
        paper="Kostrikov et al. 2021, Offline Reinforcement Learning with Implicit Q-Learning (arXiv:2110.06169)",
        scope="Expectile regression of state values, weighted imitation; from recorded data and then online; "
        "vectors and images.",
    )
]  # fmt: skip

train_iql = train_function(__name__, SPECS)
