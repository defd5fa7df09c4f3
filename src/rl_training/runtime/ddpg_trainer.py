"""DDPG in the registry: hyper-parameters, build, spec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from rl_training.algorithms.ddpg import DDPG
from rl_training.envs.spaces import EnvSpaces
from rl_training.models.mlp_ddpg import MLPDDPGModel
from rl_training.runtime.run import Callback
from rl_training.runtime.spec import AlgorithmSpec
from rl_training.runtime.workflows import TrainResult, train_as
from rl_training.stores.replay import ActorCriticRates, ReplayStore
from rl_training.stores.rollouts import make_input


class DDPGParams(ActorCriticRates):
    """Hyper-parameters of DDPG."""

    learning_rate: float = Field(1e-3, ge=0, le=10, description="Step size of actor and critic.")
    tau: float = Field(0.005, gt=0, le=1, description="Share of the way that the targets move per update.")
    exploration_noise: float = Field(0.1, ge=0, le=10, description="Deviation of the noise on actions in [-1, 1].")
    action_gradient_clip: float | None = Field(
        None, gt=0, description="Largest norm of dQ/da in the actor's step; null does not clip."
    )


def build(params: DDPGParams, spaces: EnvSpaces) -> DDPG:
    """The learner with fresh networks."""
    model = MLPDDPGModel(
        obs_dim=spaces.obs_dim, action_dim=spaces.action_dim, hidden_sizes=params.hidden_sizes,
        activation=params.activation, observation_input=make_input(spaces),
    )  # fmt: skip
    return DDPG(model=model, **params.arguments_of(DDPG))


SPECS = [
    AlgorithmSpec(
        name="ddpg", class_name="DDPG", year=2015, lane="replay",
        paper="Lillicrap et al. 2015, Continuous control with deep reinforcement learning (arXiv:1509.02971)",
        scope="Deterministic actor and critic, target networks, Gaussian noise, not the paper's OU; vectors.",
        params=DDPGParams, learner=DDPG, build=build, store=ReplayStore,
        action_kinds=("continuous",), observation_kinds=("vector",),
        defaults={"log_interval": 1_000, "total_timesteps": 20_000},
    )
]  # fmt: skip


def train_ddpg(
    config: Any, *, run_suffix: str | None = None, callbacks: Iterable[Callback] | None = None
) -> TrainResult:
    """Train DDPG as the config says."""
    return train_as(["ddpg"], config, run_suffix, callbacks)
