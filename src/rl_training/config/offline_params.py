"""Learners from recorded data, alone or before and together with new experience: hyper-parameters, registry entries."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import nn

from rl_training.algorithms.base import Algorithm
from rl_training.config.networks import build_on_data
from rl_training.config.params import Facts, Reason, Reasons
from rl_training.config.replay_params import (
    DIVIDED_ONCE,
    ActorCriticParams,
    DatasetParams,
    ReplayParams,
    SmoothedTargetParams,
)
from rl_training.config.spec import AlgorithmSpec
from rl_training.data.offline_store import OfflineStore

OF_STEPS = (
    "offline_batch_ratio", "buffer_capacity", "learning_starts", "random_action_hold", "train_frequency",
    "gradient_updates_per_step", "replay_folder", "replay_memory", "exploration_noise",
    "exploration_noise_min",
)  # fmt: skip


class OfflineParams(DatasetParams, ReplayParams):
    """Hyper-parameters of learners from recorded data, which can go on with new experience."""

    one_step_with: ClassVar[str] = "recorded data"
    unused: ClassVar[Reasons] = (
        Reason(OF_STEPS, "offline_updates is null, so no environment is stepped", lambda p: p.offline_updates is None),
        Reason(
            ("normalize_states",), "images have a scale of their own", where=lambda spaces: spaces.obs_kind == "image"
        ),
        Reason(
            ("normalize_states",), "env_kwargs.wrappers has normalize_observation, which replaces it",
            where=lambda spaces: spaces.normalize_observations,
        ),
    )
    fixed: ClassVar[Reasons] = (
        Reason(("offline_batch_ratio",), DIVIDED_ONCE),
        Reason(("reward_scale", "reward_shift"), "the recorded rewards are changed once, when the run is built"),
    )

    offline_updates: int | None = Field(
        None, ge=0, description="Updates on recorded data alone before the first environment step; null: all, so that "
        "no environment is stepped and every update counts as one timestep.",
    )  # fmt: skip
    offline_batch_ratio: float = Field(
        0.5, ge=0, le=1, description="Share of every batch that is recorded data, once environments are stepped."
    )
    normalize_states: bool = Field(
        False, description="Normalize observations by the mean and deviation of the recorded ones."
    )
    reward_scale: Annotated[float, Field(gt=0)] | Literal["return_range"] = Field(
        1.0, description="Factor of all rewards; return_range: 1000 / (largest - smallest return of recorded episodes)."
    )
    reward_shift: float = Field(0.0, description="Added to all rewards after reward_scale.")
    learning_starts: int = Field(0, ge=0, description="Environment steps with random actions before learning goes on.")

    @property
    def facts(self) -> Facts:
        """As the base classes, plus the recorded data; without environment steps, there is no replay."""
        facts = super().facts._replace(pretrain_updates=self.offline_updates or 0)
        if self.offline_updates is not None:
            return facts
        return facts._replace(steps_environments=False, replay_rows=0, replay_on_device=False, random_steps=0)

    @property
    def recorded_column(self) -> Literal["", "next_actions", "returns_to_go"]:
        """What else the learner needs of every recorded row."""
        return ""


class TD3BCParams(OfflineParams, SmoothedTargetParams):
    """Hyper-parameters of TD3+BC, and with other defaults those of ReBRAC."""

    learning_rate: float = Field(3e-4, ge=0, le=10, description="Learning rate of actor and critics.")
    num_critics: int = Field(2, ge=1, le=100, description="Number of critics; the target is the smallest of them.")
    critic_layer_norm: bool = Field(False, description="LayerNorm after each hidden layer of the critics.")
    policy_noise: float | None = Field(
        0.2, ge=0, le=10, description="Standard deviation of the noise on the target's action; null: no noise."
    )
    policy_delay: int = Field(2, ge=1, le=1_000, description="Critic steps per actor step and target update.")
    q_weight: float = Field(
        2.5, ge=0, description="Weight of the value in the actor's loss, relative to its mean size: alpha of TD3+BC."
    )
    actor_bc_coef: float | None = Field(
        None, ge=0, description="Weight of the squared distance to recorded actions in the actor's loss, summed over "
        "dimensions; null: 1 / dimensions.",
    )  # fmt: skip
    critic_bc_coef: float = Field(
        0.0, ge=0, description="Weight of the squared distance to the action recorded next, in the critics' targets."
    )
    normalize_states: bool = Field(
        True, description="Normalize observations by the mean and deviation of the recorded ones."
    )

    @property
    def recorded_column(self) -> Literal["", "next_actions"]:
        """The penalty of the targets needs the next actions."""
        return "next_actions" if self.largest("critic_bc_coef") else ""


class AdvantageWeightedParams(OfflineParams, ActorCriticParams):
    """Hyper-parameters that AWAC and IQL share."""

    learning_rate: float = Field(3e-4, ge=0, le=10, description="Learning rate of every network.")
    num_critics: int = Field(2, ge=1, le=100, description="Number of critics; the smallest value counts.")
    critic_layer_norm: bool = Field(False, description="LayerNorm after each hidden layer of the critics.")
    max_weight: float = Field(100.0, gt=0, description="Largest weight of a recorded action in the actor's loss.")


def offline_spec(learner: type[Algorithm], network: type[nn.Module], **entry: Any) -> AlgorithmSpec:
    """The registry entry of a learner of continuous actions from recorded data."""
    entry.setdefault("defaults", {"log_interval": 1_000, "total_timesteps": 50_000})
    return AlgorithmSpec(
        lane="replay", learner=learner, build=partial(build_on_data, learner, network), store=OfflineStore,
        action_kinds=("continuous",), **entry,
    )  # fmt: skip
