"""IMPALA in the registry: hyper-parameters, build, spec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from rl_training.algorithms.impala import IMPALA
from rl_training.envs.spaces import EnvSpaces
from rl_training.runtime.run import Callback
from rl_training.runtime.spec import AlgorithmSpec
from rl_training.runtime.workflows import TrainResult, train_as
from rl_training.stores.rollouts import ACTION_KINDS, NORMALIZED, RolloutParams, RolloutStore, make_policy


class IMPALAParams(RolloutParams):
    """Hyper-parameters of IMPALA."""

    num_steps: int = Field(8, ge=1, le=1_000_000, description="Steps per environment and rollout.")
    learning_rate: float = Field(7e-4, ge=0, le=10, description="Step size of the optimizer.")
    rho_clip: float = Field(1.0, gt=0, description="Largest ratio in the temporal difference.")
    c_clip: float = Field(1.0, gt=0, description="Largest ratio in the trace.")
    pg_rho_clip: float = Field(1.0, gt=0, description="Largest ratio in the policy gradient.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Decay of the V-trace traces; 1 is the paper.")
    importance_correction: bool = Field(True, description="Off forces every ratio to 1: a control, not a way to train.")


def build(params: IMPALAParams, spaces: EnvSpaces) -> IMPALA:
    """The learner with a fresh policy."""
    policy = make_policy(params, spaces)
    return IMPALA(policy=policy, normalize_rewards=spaces.normalize_rewards, **params.arguments_of(IMPALA))


SPECS = [
    AlgorithmSpec(
        name="impala", class_name="IMPALA", year=2018, lane="rollout",
        paper="Espeholt et al. 2018, IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner "
        "Architectures (arXiv:1802.01561)",
        scope="Narrow synchronous v1: V-trace on rollouts of one process, behaviour lag by policy_lag; "
        "every action kind, vectors and images.",
        params=IMPALAParams, learner=IMPALA, build=build, store=RolloutStore, action_kinds=ACTION_KINDS,
        normalizes_rewards=True,
        defaults={"num_envs": 4, "log_interval": 100, "total_timesteps": 500_000, "env_kwargs": NORMALIZED},
    )
]  # fmt: skip


def train_impala(
    config: Any, *, run_suffix: str | None = None, callbacks: Iterable[Callback] | None = None
) -> TrainResult:
    """Train IMPALA as the config says."""
    return train_as(["impala"], config, run_suffix, callbacks)
