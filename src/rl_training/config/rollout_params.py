"""The rollout family: hyper-parameters and registry entries of A2C, PPO, TRPO, IMPALA and APPO; in part PQN's."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from pydantic import Field, model_validator

from rl_training.algorithms.base import Algorithm
from rl_training.config.networks import build_on_policy
from rl_training.config.params import LINEAR_HEADS, CriticWidths, Facts, MemoryParams, Params, Reason, Reasons
from rl_training.config.spec import AlgorithmSpec
from rl_training.data.rollout_store import RolloutStore
from rl_training.validation import StrictModel

ACTION_KINDS = ("discrete", "continuous", "multi_discrete", "multi_binary")
# env_kwargs, by default
NORMALIZED_OBSERVATIONS = {"wrappers": {"normalize_observation": "auto"}}
NORMALIZED = {"wrappers": {"normalize_observation": "auto", "normalize_reward": True}}


class LaggedParams(Params):
    """Hyper-parameters of rollouts."""

    num_steps: int = Field(128, ge=1, le=1_000_000, description="Steps of each environment per rollout.")
    policy_lag: int = Field(0, ge=0, le=1000, description="Act with the policy from this many updates ago.")

    @property
    def lag(self) -> int:
        """`policy_lag`."""
        return self.policy_lag


class RolloutParams(CriticWidths, LaggedParams):
    """Hyper-parameters of actors and critics that learn from rollouts."""

    unused: ClassVar[Reasons] = (
        LINEAR_HEADS,
        LINEAR_HEADS._replace(names=("critic_hidden_sizes",)),
        Reason(
            ("initial_log_std",), "only continuous actions have a deviation",
            where=lambda spaces: spaces.action_kind != "continuous",
        ),
    )  # fmt: skip
    fixed: ClassVar[Reasons] = (Reason(("initial_log_std",), "the deviation is learned from there"),)

    ent_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    vf_coef: float = Field(0.5, ge=0, description="Weight of the value loss.")
    initial_log_std: float = Field(
        0.0, ge=-10, le=2, description="Log of the first deviation of continuous actions, the same in every state."
    )
    critic_obs: tuple[str, ...] = Field((), description="Keys of a Dict observation that only the critic sees.")

    @property
    def facts(self) -> Facts:
        """As the base class, plus what only the critic sees."""
        return super().facts._replace(critic_obs=self.critic_obs)


class RecurrentParams(MemoryParams, RolloutParams):
    """Rollouts of a policy that may have a memory, from which it learns in whole sequences."""

    unused: ClassVar[Reasons] = (
        Reason(("sequence_length", "refresh_memory"), "memory is none", lambda p: p.memory == "none"),
        Reason(
            ("refresh_memory",), "a sequence is a whole rollout, before which there is nothing to read",
            lambda p: p.sequence_length in (None, p.num_steps),
        ),
    )  # fmt: skip

    sequence_length: int | None = Field(
        None, ge=1, description="Steps through which the memory learns; divides num_steps; null: the whole rollout."
    )
    refresh_memory: bool = Field(
        False, description="Compute the state before each sequence anew for every epoch but the first."
    )

    @model_validator(mode="after")
    def _memory_fits(self) -> RecurrentParams:
        if self.memory == "none":
            return self
        if self.critic_obs:
            raise ValueError(f"critic_obs is {list(self.critic_obs)}; with a memory it must be left out")
        if self.sequence_length is not None and self.num_steps % self.sequence_length:
            raise ValueError(f"sequence_length is {self.sequence_length}; it must divide num_steps ({self.num_steps})")
        return self


class VTraceParams(RecurrentParams):
    """V-trace targets, which correct for the lag of the acting policy."""

    rho_clip: float = Field(1.0, gt=0, description="Maximum ratio in the temporal difference.")
    c_clip: float = Field(1.0, gt=0, description="Maximum ratio in the trace.")
    pg_rho_clip: float = Field(1.0, gt=0, description="Maximum ratio in the policy gradient.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Decay of the V-trace traces; IMPALA's paper uses 1.")
    importance_correction: bool = Field(True, description="False sets every ratio to 1: a control, not a way to train.")

    @model_validator(mode="after")
    def _reads_whole_rollouts(self) -> VTraceParams:
        if self.memory != "none" and self.sequence_length not in (None, self.num_steps):
            why = f"V-trace needs whole rollouts, so it must be left out, or be num_steps ({self.num_steps})"
            raise ValueError(f"sequence_length is {self.sequence_length}; {why}")
        return self


class EpochParams(StrictModel):
    """Epochs of minibatches on a rollout; a part of `Params`."""

    update_epochs: int = Field(10, ge=1, le=10_000, description="Passes over each rollout.")
    minibatch_size: int | None = Field(64, ge=1, description="Rows per gradient step; null: the whole rollout.")

    @property
    def facts(self) -> Facts:
        """As the base class, plus the rows of a minibatch."""
        inherited: Facts = super().facts  # type: ignore[misc]  # of the Params that this is a part of
        return inherited._replace(rows=self.minibatch_size or 0)


class ClippedParams(EpochParams, RecurrentParams):
    """Epochs of minibatches on a rollout, with a clipped probability ratio."""

    clip_coef: float = Field(0.2, gt=0, le=10, description="How far the probability ratio may be from 1.")
    normalize_advantages: bool = Field(True, description="Normalize advantages to mean 0 and deviation 1.")


def rollout_spec(learner: type[Algorithm], **entry: Any) -> AlgorithmSpec:
    """The registry entry of a rollout learner that supports every kind of action and observation."""
    return AlgorithmSpec(
        lane="rollout", learner=learner, build=partial(build_on_policy, learner), store=RolloutStore,
        action_kinds=ACTION_KINDS, normalizes_rewards=True, **entry,
    )  # fmt: skip
