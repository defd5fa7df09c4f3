"""RLPD in the registry: hyper-parameters and entry."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from rl_training.algorithms.rlpd import RLPD
from rl_training.config.params import Facts
from rl_training.config.recorded_data import PriorDataParams
from rl_training.config.replay import DIVIDED_ONCE, ActorCriticParams, TemperatureParams, continuous_spec
from rl_training.data.recorded_store import PriorReplayStore
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.run.workflows import train_function


class RLPDParams(TemperatureParams, ActorCriticParams, PriorDataParams):
    """Hyper-parameters of RLPD."""

    target_entropy: float | None = Field(
        None, description="Target entropy of alpha auto; null: minus half the number of action dimensions."
    )
    initial_alpha: float = Field(1.0, gt=0, description="Initial temperature of alpha auto.")
    backup_entropy: bool = Field(True, description="Include the entropy in the critics' targets, as SAC does.")
    num_critics: int = Field(10, ge=1, le=1_000, description="Critics in the ensemble.")
    critic_subset_size: int = Field(
        2, ge=1, description="Number of critics, drawn anew per update, whose minimum is the target."
    )
    critic_layer_norm: bool = Field(True, description="LayerNorm after each hidden layer of the critics.")
    gradient_updates_per_step: int = Field(20, ge=1, le=10_000, description="Updates per training turn.")
    actor_update_interval: int | None = Field(
        None, ge=1, description="Critic steps per actor and temperature step; null: one actor step per training turn."
    )

    @model_validator(mode="after")
    def _subset_fits(self) -> RLPDParams:
        if self.critic_subset_size > self.num_critics:
            raise ValueError(
                f"critic_subset_size is {self.critic_subset_size}; it must be at most num_critics ({self.num_critics})"
            )
        return self

    @property
    def facts(self) -> Facts:
        """As the base class, plus the critics."""
        return super().facts._replace(members=self.num_critics)

    def fixed_numbers(self) -> dict[str, str]:
        """As the base class, plus the settings that divide a batch and the initial temperature."""
        start = {"initial_alpha": "it is where the tuned temperature starts"}
        return super().fixed_numbers() | start | {"offline_batch_ratio": DIVIDED_ONCE}

    def arguments_of(self, owner: type) -> dict[str, Any]:
        """The arguments; the default of `actor_update_interval` is `gradient_updates_per_step`."""
        interval = self.actor_update_interval or self.gradient_updates_per_step
        return super().arguments_of(owner) | ({"actor_update_interval": interval} if owner is RLPD else {})


SPECS = [
    continuous_spec(
        RLPD, MLPSACModel, name="rlpd", class_name="RLPD", year=2023, params=RLPDParams,
        store=PriorReplayStore,
        paper="Ball et al. 2023, Efficient Online Reinforcement Learning with Offline Data (arXiv:2302.02948)",
        scope="SAC with prior data in every batch, an ensemble of LayerNorm critics, many updates per step; "
        "vectors and images.",
    )
]  # fmt: skip

train_rlpd = train_function(__name__, SPECS)
