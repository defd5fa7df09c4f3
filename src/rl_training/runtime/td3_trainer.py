"""TD3 in the registry: hyper-parameters, build, spec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from rl_training.algorithms.td3 import TD3
from rl_training.envs.spaces import EnvSpaces
from rl_training.models.mlp_td3 import MLPTD3Model
from rl_training.runtime.run import Callback
from rl_training.runtime.spec import AlgorithmSpec
from rl_training.runtime.workflows import TrainResult, train_as
from rl_training.stores.replay import ActorCriticRates, ReplayStore
from rl_training.stores.rollouts import make_input


class TD3Params(ActorCriticRates):
    """Hyper-parameters of TD3."""

    learning_rate: float = Field(1e-3, ge=0, le=10, description="Step size of actor and critics.")
    tau: float = Field(0.005, gt=0, le=1, description="Share of the way that the targets move per update.")
    exploration_noise: float = Field(0.1, ge=0, le=10, description="Deviation of the noise on actions in [-1, 1].")
    policy_noise: float = Field(0.2, ge=0, le=10, description="Deviation of the noise on the target's action.")
    noise_clip: float = Field(0.5, ge=0, le=10, description="Largest size of that noise.")
    policy_delay: int = Field(2, ge=1, le=1_000, description="Critic steps per step of the actor and of the targets.")
    action_gradient_clip: float | None = Field(
        None, gt=0, description="Largest norm of dQ/da in the actor's step; null does not clip."
    )


def build(params: TD3Params, spaces: EnvSpaces) -> TD3:
    """The learner with fresh networks."""
    model = MLPTD3Model(
        obs_dim=spaces.obs_dim, action_dim=spaces.action_dim, hidden_sizes=params.hidden_sizes,
        activation=params.activation, observation_input=make_input(spaces),
    )  # fmt: skip
    return TD3(model=model, **params.arguments_of(TD3))


SPECS = [
    AlgorithmSpec(
        name="td3", class_name="TD3", year=2018, lane="replay",
        paper="Fujimoto et al. 2018, Addressing Function Approximation Error in Actor-Critics (arXiv:1802.09477)",
        scope="Twin critics as one batched network, target smoothing, delayed actor and targets; vectors.",
        params=TD3Params, learner=TD3, build=build, store=ReplayStore,
        action_kinds=("continuous",), observation_kinds=("vector",),
        defaults={"log_interval": 1_000, "total_timesteps": 20_000},
    )
]  # fmt: skip


def train_td3(
    config: Any, *, run_suffix: str | None = None, callbacks: Iterable[Callback] | None = None
) -> TrainResult:
    """Train TD3 as the config says."""
    return train_as(["td3"], config, run_suffix, callbacks)
