"""The rollout family: hyper-parameters and registry entries of A2C, PPO, TRPO, IMPALA and APPO."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from pydantic import Field

from rl_training.algorithms.base import Algorithm
from rl_training.config.networks import LINEAR_HEADS, build_on_policy
from rl_training.config.params import Params, Unused
from rl_training.config.spec import AlgorithmSpec
from rl_training.data.rollout_store import RolloutStore

ACTION_KINDS = ("discrete", "continuous", "multi_discrete", "multi_binary")


NORMALIZED = {"wrappers": {"normalize_observation": "auto", "normalize_reward": True}}  # env_kwargs, by default



class RolloutParams(Params):
    """Hyper-parameters of algorithms that learn from rollouts."""

    unused: ClassVar[tuple[Unused, ...]] = (LINEAR_HEADS,)

    num_steps: int = Field(128, ge=1, le=1_000_000, description="Steps of each environment per rollout.")
    ent_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    vf_coef: float = Field(0.5, ge=0, description="Weight of the value loss.")
    policy_lag: int = Field(0, ge=0, le=1000, description="Act with the policy from this many updates ago.")

    @property
    def lag(self) -> int:
        """`policy_lag`."""
        return self.policy_lag



def rollout_spec(learner: type[Algorithm], **entry: Any) -> AlgorithmSpec:
    """The registry entry of a rollout learner that supports every kind of action and observation."""
    return AlgorithmSpec(
        lane="rollout", learner=learner, build=partial(build_on_policy, learner), store=RolloutStore,
        action_kinds=ACTION_KINDS, normalizes_rewards=True, **entry,
    )  # fmt: skip
