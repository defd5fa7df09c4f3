"""A2C in the registry: hyper-parameters and entry."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rl_training.algorithms.a2c import A2C
from rl_training.config.params import Reason, Reasons
from rl_training.config.rollout_params import NORMALIZED, RecurrentParams, rollout_spec
from rl_training.run.workflows import train_function


class A2CParams(RecurrentParams):
    """Hyper-parameters of A2C."""

    unused: ClassVar[Reasons] = (Reason(("refresh_memory",), "a2c makes one pass over each rollout"),)

    learning_rate: float = Field(7e-4, ge=0, le=10, description="Learning rate of the optimizer.")
    num_steps: int = Field(8, ge=1, le=1_000_000, description="Steps of each environment per rollout.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Trace decay of the advantages; 1 gives n-step returns.")
    normalize_advantages: bool = Field(False, description="Normalize advantages to mean 0 and deviation 1.")


SPECS = [
    rollout_spec(
        A2C, name="a2c", class_name="A2C", year=2016, params=A2CParams,
        paper="Mnih et al. 2016, Asynchronous Methods for Deep Reinforcement Learning (arXiv:1602.01783)",
        scope="N-step returns or GAE, not corrected for the lag of workers; every action kind, vectors and images.",
        defaults={"num_envs": 4, "log_interval": 100, "total_timesteps": 500_000, "env_kwargs": NORMALIZED},
    )
]  # fmt: skip

train_a2c = train_function(__name__, SPECS)
