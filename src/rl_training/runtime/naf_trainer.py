"""NAF in the registry: hyper-parameters, build, spec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from rl_training.algorithms.naf import NAF
from rl_training.envs.spaces import EnvSpaces
from rl_training.models.mlp_naf import MLPNAFModel
from rl_training.runtime.run import Callback
from rl_training.runtime.spec import AlgorithmSpec
from rl_training.runtime.workflows import TrainResult, train_as
from rl_training.stores.replay import ReplayParams, ReplayStore
from rl_training.stores.rollouts import make_input


class NAFParams(ReplayParams):
    """Hyper-parameters of NAF."""

    learning_rate: float = Field(1e-3, ge=0, le=10, description="Step size of the optimizer.")
    tau: float = Field(0.005, gt=0, le=1, description="Share of the way that the targets move per update.")
    exploration_noise: float = Field(0.1, ge=0, le=10, description="Deviation of the noise on actions in [-1, 1].")


def build(params: NAFParams, spaces: EnvSpaces) -> NAF:
    """The learner with fresh networks."""
    model = MLPNAFModel(
        obs_dim=spaces.obs_dim, action_dim=spaces.action_dim, hidden_sizes=params.hidden_sizes,
        activation=params.activation, observation_input=make_input(spaces),
    )  # fmt: skip
    return NAF(model=model, **params.arguments_of(NAF))


SPECS = [
    AlgorithmSpec(
        name="naf", class_name="NAF", year=2016, lane="replay",
        paper="Gu et al. 2016, Continuous Deep Q-Learning with Model-based Acceleration (arXiv:1603.00748)",
        scope="Quadratic advantage with one shared torso, Gaussian noise; no imagination rollouts; vectors.",
        params=NAFParams, learner=NAF, build=build, store=ReplayStore,
        action_kinds=("continuous",), observation_kinds=("vector",),
        defaults={"log_interval": 1_000, "total_timesteps": 20_000},
    )
]  # fmt: skip


def train_naf(
    config: Any, *, run_suffix: str | None = None, callbacks: Iterable[Callback] | None = None
) -> TrainResult:
    """Train NAF as the config says."""
    return train_as(["naf"], config, run_suffix, callbacks)
