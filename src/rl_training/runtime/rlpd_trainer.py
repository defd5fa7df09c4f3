"""RLPD in the registry: hyper-parameters, build, spec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field, model_validator

from rl_training.algorithms.rlpd import RLPD
from rl_training.envs.spaces import EnvSpaces
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.runtime.run import Callback
from rl_training.runtime.spec import AlgorithmSpec
from rl_training.runtime.workflows import TrainResult, train_as
from rl_training.stores.prior_data import PriorDataParams, PriorReplayStore
from rl_training.stores.replay import DIVIDED_ONCE, ActorCriticRates, TemperatureParams
from rl_training.stores.rollouts import make_input


class RLPDParams(TemperatureParams, ActorCriticRates, PriorDataParams):
    """Hyper-parameters of RLPD."""

    tau: float = Field(0.005, gt=0, le=1, description="Share of the way that the targets move per update.")
    target_entropy: float | None = Field(
        None, description="Entropy that auto holds; null is minus half the number of action dimensions."
    )
    initial_alpha: float = Field(1.0, gt=0, description="Temperature that auto starts from.")
    backup_entropy: bool = Field(True, description="Entropy in the critics' targets, as in SAC.")
    num_critics: int = Field(10, ge=1, le=1_000, description="Critics in the ensemble.")
    critic_subset_size: int = Field(2, ge=1, description="Critics, drawn anew per update, whose minimum is the target.")
    critic_layer_norm: bool = Field(True, description="LayerNorm after each hidden layer of the critics.")
    gradient_updates_per_step: int = Field(20, ge=1, le=10_000, description="Updates per training turn.")
    actor_update_interval: int | None = Field(
        None, ge=1, description="Critic steps per actor and temperature step; null is once per training turn."
    )

    @model_validator(mode="after")
    def _subset_fits(self) -> RLPDParams:
        if self.critic_subset_size > self.num_critics:
            raise ValueError(
                f"critic_subset_size is {self.critic_subset_size}; it must be at most num_critics ({self.num_critics})"
            )
        return self

    def fixed_numbers(self) -> dict[str, str]:
        """Also how a batch is divided, and where the temperature starts."""
        start = {"initial_alpha": "it is where the tuned temperature starts"}
        return super().fixed_numbers() | start | {"offline_batch_ratio": DIVIDED_ONCE}


def build(params: RLPDParams, spaces: EnvSpaces) -> RLPD:
    """The learner with fresh networks."""
    model = MLPSACModel(
        obs_dim=spaces.obs_dim, action_dim=spaces.action_dim, hidden_sizes=params.hidden_sizes,
        activation=params.activation, observation_input=make_input(spaces),
        num_critics=params.num_critics, critic_layer_norm=params.critic_layer_norm,
    )  # fmt: skip
    interval = params.actor_update_interval or params.gradient_updates_per_step
    return RLPD(model=model, **params.arguments_of(RLPD) | {"actor_update_interval": interval})


SPECS = [
    AlgorithmSpec(
        name="rlpd", class_name="RLPD", year=2023, lane="replay",
        paper="Ball et al. 2023, Efficient Online Reinforcement Learning with Offline Data (arXiv:2302.02948)",
        scope="SAC with prior data in every batch, an ensemble of LayerNorm critics, many updates per step; vectors.",
        params=RLPDParams, learner=RLPD, build=build, store=PriorReplayStore,
        action_kinds=("continuous",), observation_kinds=("vector",),
        defaults={"log_interval": 1_000, "total_timesteps": 20_000},
    )
]  # fmt: skip


def train_rlpd(
    config: Any, *, run_suffix: str | None = None, callbacks: Iterable[Callback] | None = None
) -> TrainResult:
    """Train RLPD as the config says."""
    return train_as(["rlpd"], config, run_suffix, callbacks)
