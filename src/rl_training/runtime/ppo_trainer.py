"""PPO in the registry: hyper-parameters and entry."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rl_training.algorithms.ppo import PPO
from rl_training.config.params import Reason, Reasons
from rl_training.config.rollout_params import NORMALIZED, ClippedParams, rollout_spec
from rl_training.run.workflows import train_function


class PPOParams(ClippedParams):
    """Hyper-parameters of PPO."""

    fixed: ClassVar[Reasons] = (
        Reason(("learning_rate",), "desired_kl adapts it", lambda p: p.desired_kl is not None),
        Reason(("desired_kl",), "it stays the aim of the learning rate"),
    )

    num_steps: int = Field(256, ge=1, le=1_000_000, description="Steps of each environment per rollout.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Trace decay of the advantages.")
    minibatch_size: int = Field(64, ge=2, description="Rows per gradient step.")
    clip_value_loss: bool = Field(False, description="Clip values to within clip_coef of the old ones in the loss.")
    target_kl: float | None = Field(
        None, gt=0, description="Stop the epochs when the mean KL of an epoch exceeds 1.5 times this; null: never."
    )
    desired_kl: float | None = Field(
        None, gt=0, description="Adapt the learning rate, which is its first value then, to this KL per minibatch; "
        "null: do not.",
    )  # fmt: skip


SPECS = [
    rollout_spec(
        PPO, name="ppo", class_name="PPO", year=2017, params=PPOParams,
        paper="Schulman et al. 2017, Proximal Policy Optimization Algorithms (arXiv:1707.06347)",
        scope="Clipped surrogate, GAE, minibatch epochs; every action kind, vectors and images.",
        defaults={"num_envs": 8, "total_timesteps": 200_000, "env_kwargs": NORMALIZED},
    )
]  # fmt: skip

train_ppo = train_function(__name__, SPECS)
