"""MBPO in the registry: hyper-parameters and entry."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rl_training.algorithms.mbpo import MBPO
from rl_training.config.params import Facts
from rl_training.config.replay_params import ModelParams, ReplayParams, model_spec
from rl_training.data.model_store import ModelReplayStore
from rl_training.run.workflows import train_function


class MBPOParams(ModelParams, ReplayParams):
    """Hyper-parameters of MBPO."""

    one_step_with: ClassVar[str] = "a model"

    gradient_updates_per_step: int = Field(20, ge=1, le=10_000, description="Policy updates per training turn.")
    model_train_frequency: int = Field(250, ge=1, description="Steps, summed over environments, between fits.")

    @property
    def facts(self) -> Facts:
        """As the base class, with the steps between fits."""
        return super().facts._replace(fits_every=self.model_train_frequency)


SPECS = [
    model_spec(
        MBPO, name="mbpo", class_name="MBPO", year=2019, params=MBPOParams, store=ModelReplayStore,
        paper="Janner et al. 2019, When to Trust Your Model: Model-Based Policy Optimization (arXiv:1906.08253)",
        scope="SAC on short rollouts through an ensemble of probabilistic networks, from real states; vectors.",
        total_timesteps=5_000,
    )
]  # fmt: skip

train_mbpo = train_function(__name__, SPECS)
