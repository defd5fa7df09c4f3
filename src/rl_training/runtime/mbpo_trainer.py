"""MBPO in the registry: hyper-parameters and entry."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from pydantic import Field

from rl_training.algorithms.mbpo import MBPO
from rl_training.config.model_based import ModelParams, build_learner
from rl_training.config.params import Facts
from rl_training.config.replay import ReplayParams
from rl_training.config.spec import AlgorithmSpec
from rl_training.data.model_store import ModelReplayStore
from rl_training.run.workflows import train_function


class MBPOParams(ModelParams, ReplayParams):
    """Hyper-parameters of MBPO."""

    one_step_with: ClassVar[str] = "a model"

    gradient_updates_per_step: int = Field(20, ge=1, le=10_000, description="Policy updates per training turn.")
    model_train_frequency: int = Field(
        250, ge=1, description="Environment steps, summed over environments, between fits of the model."
    )

    @property
    def facts(self) -> Facts:
        """As the base class, with the steps between fits."""
        return super().facts._replace(fits_every=self.model_train_frequency)


SPECS = [
    AlgorithmSpec(
        name="mbpo", class_name="MBPO", year=2019, lane="model rollouts",
        paper="Janner et al. 2019, When to Trust Your Model: Model-Based Policy Optimization (arXiv:1906.08253)",
        scope="SAC on short rollouts through an ensemble of probabilistic networks, from real states; vectors.",
        params=MBPOParams, learner=MBPO, build=partial(build_learner, MBPO), store=ModelReplayStore,
        action_kinds=("continuous",), observation_kinds=("vector",),
        defaults={"log_interval": 1_000, "total_timesteps": 5_000},
    )
]  # fmt: skip

train_mbpo = train_function(__name__, SPECS)
