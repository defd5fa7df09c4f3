"""AWAC in the registry: hyper-parameters and entry."""

from __future__ import annotations

from pydantic import Field

from rl_training.algorithms.awac import AWAC
from rl_training.config.offline_params import AdvantageWeightedParams, offline_spec
from rl_training.config.params import Widths
from rl_training.models.mlp_awac import MLPAWACModel
from rl_training.run.workflows import train_function


class AWACParams(AdvantageWeightedParams):
    """Hyper-parameters of AWAC."""

    hidden_sizes: Widths = Field((256, 256, 256), description="Widths of the hidden layers.")
    temperature: float = Field(
        0.3333, gt=0, description="Lambda: recorded actions have the weight exp(advantage / lambda)."
    )


SPECS = [
    offline_spec(
        AWAC, MLPAWACModel, name="awac", class_name="AWAC", year=2020, params=AWACParams,
        paper="Nair et al. 2020, AWAC: Accelerating Online Reinforcement Learning with Offline Datasets "
        "(arXiv:2006.09359)",
        scope="Imitation weighted by advantages of a critic of the policy, from recorded data and then online; vectors "
        "and images.",
    )
]  # fmt: skip

train_awac = train_function(__name__, SPECS)
