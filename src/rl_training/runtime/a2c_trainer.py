"""A2C in the registry: hyper-parameters, build, spec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from rl_training.algorithms.a2c import A2C
from rl_training.envs.spaces import EnvSpaces
from rl_training.runtime.run import Callback
from rl_training.runtime.spec import AlgorithmSpec
from rl_training.runtime.workflows import TrainResult, train_as
from rl_training.stores.rollouts import ACTION_KINDS, NORMALIZED, RolloutParams, RolloutStore, make_policy


class A2CParams(RolloutParams):
    """Hyper-parameters of A2C."""

    learning_rate: float = Field(7e-4, ge=0, le=10, description="Step size of the optimizer.")
    num_steps: int = Field(8, ge=1, le=1_000_000, description="Steps per environment and rollout.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Trace decay of the advantages; 1 is n-step returns.")
    normalize_advantages: bool = Field(False, description="Advantages to zero mean and unit deviation.")


def build(params: A2CParams, spaces: EnvSpaces) -> A2C:
    """The learner with a fresh policy."""
    policy = make_policy(params, spaces)
    return A2C(policy=policy, normalize_rewards=spaces.normalize_rewards, **params.arguments_of(A2C))


SPECS = [
    AlgorithmSpec(
        name="a2c", class_name="A2C", year=2016, lane="rollout",
        paper="Mnih et al. 2016, Asynchronous Methods for Deep Reinforcement Learning (arXiv:1602.01783)",
        scope="Synchronous v1: one process, n-step returns or GAE; every action kind, vectors and images.",
        params=A2CParams, learner=A2C, build=build, store=RolloutStore, action_kinds=ACTION_KINDS,
        normalizes_rewards=True,
        defaults={"num_envs": 4, "log_interval": 100, "total_timesteps": 500_000, "env_kwargs": NORMALIZED},
    )
]  # fmt: skip


def train_a2c(
    config: Any, *, run_suffix: str | None = None, callbacks: Iterable[Callback] | None = None
) -> TrainResult:
    """Train A2C as the config says."""
    return train_as(["a2c"], config, run_suffix, callbacks)
