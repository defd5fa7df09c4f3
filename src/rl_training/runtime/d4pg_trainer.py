"""D4PG in the registry: hyper-parameters, build, spec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from rl_training.algorithms.d4pg import D4PG
from rl_training.envs.spaces import EnvSpaces
from rl_training.models.mlp_d4pg import MLPD4PGModel
from rl_training.runtime.run import Callback
from rl_training.runtime.spec import AlgorithmSpec
from rl_training.runtime.workflows import TrainResult, train_as
from rl_training.stores.replay import ActorCriticRates, ReplayStore
from rl_training.stores.rollouts import make_input
from rl_training.stores.support import SupportParams


class D4PGParams(SupportParams, ActorCriticRates):
    """Hyper-parameters of D4PG."""

    learning_rate: float = Field(3e-4, ge=0, le=10, description="Step size of actor and critic.")
    tau: float = Field(0.005, gt=0, le=1, description="Share of the way that the targets move per update.")
    target_update_interval: int = Field(
        1, ge=1, description="Updates between the targets' moves; with tau 1 the paper's copies, of 100 updates."
    )
    exploration_noise: float = Field(0.3, ge=0, le=10, description="Deviation of the noise on actions in [-1, 1].")
    action_gradient_clip: float | None = Field(
        None, gt=0, description="Largest norm of dQ/da in the actor's step; null does not clip."
    )
    n_step: int = Field(5, ge=1, le=1_000, description="Steps of reward before bootstrapping.")


def build(params: D4PGParams, spaces: EnvSpaces) -> D4PG:
    """The learner with fresh networks."""
    model = MLPD4PGModel(
        obs_dim=spaces.obs_dim, action_dim=spaces.action_dim, hidden_sizes=params.hidden_sizes,
        activation=params.activation, observation_input=make_input(spaces), **params.support,
    )  # fmt: skip
    return D4PG(model=model, **params.arguments_of(D4PG))


SPECS = [
    AlgorithmSpec(
        name="d4pg", class_name="D4PG", year=2018, lane="replay",
        paper="Barth-Maron et al. 2018, Distributed Distributional Deterministic Policy Gradients (arXiv:1804.08617)",
        scope="Categorical critic, n-step targets, optional prioritized replay; one process collects; vectors.",
        params=D4PGParams, learner=D4PG, build=build, store=ReplayStore,
        action_kinds=("continuous",), observation_kinds=("vector",),
        defaults={"log_interval": 1_000, "total_timesteps": 20_000},
    )
]  # fmt: skip


def train_d4pg(
    config: Any, *, run_suffix: str | None = None, callbacks: Iterable[Callback] | None = None
) -> TrainResult:
    """Train D4PG as the config says."""
    return train_as(["d4pg"], config, run_suffix, callbacks)
