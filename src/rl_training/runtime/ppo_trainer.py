"""PPO in the registry: hyper-parameters, build, spec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from rl_training.algorithms.ppo import PPO
from rl_training.envs.spaces import EnvSpaces
from rl_training.runtime.run import Callback
from rl_training.runtime.spec import AlgorithmSpec
from rl_training.runtime.workflows import TrainResult, train_as
from rl_training.stores.rollouts import ACTION_KINDS, NORMALIZED, RolloutParams, RolloutStore, make_policy


class PPOParams(RolloutParams):
    """Hyper-parameters of PPO."""

    num_steps: int = Field(256, ge=1, le=1_000_000, description="Steps per environment and rollout.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Trace decay of the advantages.")
    update_epochs: int = Field(10, ge=1, le=10_000, description="Passes over each rollout.")
    minibatch_size: int = Field(64, ge=2, description="Rows per gradient step.")
    clip_coef: float = Field(0.2, gt=0, le=10, description="How far the probability ratio may move from 1.")
    normalize_advantages: bool = Field(True, description="Advantages to zero mean and unit deviation per minibatch.")
    clip_value_loss: bool = Field(False, description="Hold values within clip_coef of the old ones in their loss.")
    target_kl: float | None = Field(
        None, gt=0, description="End the epochs when the policy moved 1.5 times this far, on the mean of an epoch."
    )


def build(params: PPOParams, spaces: EnvSpaces) -> PPO:
    """The learner with a fresh policy."""
    policy = make_policy(params, spaces)
    return PPO(policy=policy, normalize_rewards=spaces.normalize_rewards, **params.arguments_of(PPO))


SPECS = [
    AlgorithmSpec(
        name="ppo", class_name="PPO", year=2017, lane="rollout",
        paper="Schulman et al. 2017, Proximal Policy Optimization Algorithms (arXiv:1707.06347)",
        scope="Clipped surrogate, GAE, minibatch epochs; every action kind, vectors and images.",
        params=PPOParams, learner=PPO, build=build, store=RolloutStore, action_kinds=ACTION_KINDS,
        normalizes_rewards=True, defaults={"num_envs": 8, "total_timesteps": 200_000, "env_kwargs": NORMALIZED},
    )
]  # fmt: skip


def train_ppo(
    config: Any, *, run_suffix: str | None = None, callbacks: Iterable[Callback] | None = None
) -> TrainResult:
    """Train PPO as the config says."""
    return train_as(["ppo"], config, run_suffix, callbacks)
