"""SAC in the registry: hyper-parameters, build, spec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from rl_training.algorithms.sac import SAC
from rl_training.envs.spaces import EnvSpaces
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.runtime.run import Callback
from rl_training.runtime.spec import AlgorithmSpec
from rl_training.runtime.workflows import TrainResult, train_as
from rl_training.stores.replay import ActorCriticRates, ReplayStore, TemperatureParams
from rl_training.stores.rollouts import make_input


class SACParams(TemperatureParams, ActorCriticRates):
    """Hyper-parameters of SAC."""

    tau: float = Field(0.005, gt=0, le=1, description="Share of the way that the targets move per update.")


def build(params: SACParams, spaces: EnvSpaces) -> SAC:
    """The learner with fresh networks."""
    model = MLPSACModel(
        obs_dim=spaces.obs_dim, action_dim=spaces.action_dim, hidden_sizes=params.hidden_sizes,
        activation=params.activation, observation_input=make_input(spaces),
    )  # fmt: skip
    return SAC(model=model, **params.arguments_of(SAC))


SPECS = [
    AlgorithmSpec(
        name="sac", class_name="SAC", year=2018, lane="replay",
        paper="Haarnoja et al. 2018, Soft Actor-Critic Algorithms and Applications (arXiv:1812.05905)",
        scope="Tanh-squashed Gaussian actor, twin critics as one batched network, fixed or tuned temperature; vectors.",
        params=SACParams, learner=SAC, build=build, store=ReplayStore,
        action_kinds=("continuous",), observation_kinds=("vector",),
        defaults={"log_interval": 1_000, "total_timesteps": 20_000},
    )
]  # fmt: skip


def train_sac(
    config: Any, *, run_suffix: str | None = None, callbacks: Iterable[Callback] | None = None
) -> TrainResult:
    """Train SAC as the config says."""
    return train_as(["sac"], config, run_suffix, callbacks)
