"""Hyper-parameters of SAC on rollouts through a learned model, and its learner (MBPO, MOPO)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import Field, model_validator

from rl_training.algorithms.mbpo import MBPO
from rl_training.config.networks import make_network
from rl_training.config.params import Facts, Params, Widths
from rl_training.config.replay import DIVIDED_ONCE, TemperatureParams
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.models.mlp_sac import MLPSACModel

Learner = TypeVar("Learner", bound=MBPO)



class ModelParams(TemperatureParams):
    """Hyper-parameters of SAC on rollouts through a learned model; a part of `Params`."""

    synonyms: ClassVar[Mapping[str, str]] = {"learning_rate": "policy_learning_rate"}

    policy_learning_rate: float = Field(
        3e-4, ge=0, le=10, description="Learning rate of actor, critics and temperature; the same as learning_rate."
    )
    tau: float = Field(0.005, gt=0, le=1, description="Polyak factor of the target networks per update.")
    model_learning_rate: float = Field(1e-3, ge=0, le=10, description="Learning rate of the model's Adam.")
    model_weight_decay: float = Field(
        0.0, ge=0, description="L2 penalty of the model, as a multiple of the published one (2.5e-5 to 1e-4 by layer)."
    )
    model_hidden_sizes: Widths = Field(
        (200, 200, 200, 200), description="Widths of the hidden layers of each member of the model."
    )
    num_ensembles: int = Field(7, ge=1, le=100, description="Number of members of the model.")
    num_elites: int | None = Field(
        None, ge=1, description="Members with the smallest held-out error, used for rollouts; null: all but two."
    )
    model_batch_size: int = Field(256, ge=1, le=10**6, description="Rows per gradient step of each member.")
    model_updates: int = Field(
        2_000, ge=1, description="Maximum gradient steps per fit; the held-out error usually stops it earlier."
    )
    rollout_batch_size: int = Field(10_000, ge=1, le=10**7, description="Real states from which rollouts start.")
    rollout_horizon: float = Field(1.0, ge=1, le=1_000, description="Steps per rollout, rounded down.")
    rollout_refresh_interval: int = Field(
        1_000, ge=1, description="Policy updates between rounds of rollouts, checked once per training turn."
    )
    synthetic_buffer_capacity: int = Field(
        100_000, ge=1, le=10**9, description="Imagined transitions kept, at least one round; the oldest are dropped."
    )
    synthetic_batch_ratio: float = Field(0.95, ge=0, le=1, description="Share of every policy batch that is imagined.")

    @model_validator(mode="after")
    def _model_fits(self) -> ModelParams:
        if self.num_elites is not None and self.num_elites > self.num_ensembles:
            raise ValueError(
                f"num_elites is {self.num_elites}; it must be at most num_ensembles ({self.num_ensembles})"
            )
        return self

    @property
    def facts(self) -> Facts:
        """As the base class, plus the members of the model, which is fitted once."""
        inherited: Facts = super().facts  # type: ignore[misc]  # of the Params that this is a part of
        return inherited._replace(members=self.num_ensembles, fits_every=math.inf)

    def fixed_numbers(self) -> dict[str, str]:
        """As the base class, plus the settings that divide a batch."""
        return super().fixed_numbers() | {"synthetic_batch_ratio": DIVIDED_ONCE}

    def check_new_run(self) -> None:
        """Refuse a buffer of imagined transitions that is too small for one round of rollouts."""
        assert isinstance(self, Params)
        schedule = self.schedules.get("rollout_horizon")
        longest = self.rollout_horizon if schedule is None else max(schedule.value(0.0), schedule.value(1.0))
        horizon = int(longest)
        if self.synthetic_batch_ratio and self.synthetic_buffer_capacity < self.rollout_batch_size * horizon:
            raise UserError(
                f"algo_kwargs: synthetic_buffer_capacity is {self.synthetic_buffer_capacity}; it must be at least "
                f"rollout_batch_size times the longest rollout_horizon ({self.rollout_batch_size} x {horizon}), "
                "or it keeps only the ends of rollouts."
            )



def build_learner(learner: type[Learner], params: Any, spaces: EnvSpaces) -> Learner:
    """The learner with fresh networks."""
    policy_model = make_network(MLPSACModel, params, spaces)
    dynamics_model = MLPMOPOEnsembleModel(
        obs_dim=spaces.obs_dim, action_dim=spaces.action_dim, hidden_sizes=params.model_hidden_sizes,
        num_ensembles=params.num_ensembles,
    )  # fmt: skip
    arguments = params.arguments_of(learner)
    arguments.pop("learning_rate")  # the same as policy_learning_rate
    return learner(policy_model=policy_model, dynamics_model=dynamics_model, **arguments)
