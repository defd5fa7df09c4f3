"""IMPALA in the registry: hyper-parameters and entry."""

from __future__ import annotations

from pydantic import Field

from rl_training.algorithms.impala import IMPALA
from rl_training.config.rollout_params import NORMALIZED, VTraceParams, rollout_spec
from rl_training.run.workflows import train_function


class IMPALAParams(VTraceParams):
    """Hyper-parameters of IMPALA."""

    num_steps: int = Field(8, ge=1, le=1_000_000, description="Steps of each environment per rollout.")
    learning_rate: float = Field(7e-4, ge=0, le=10, description="Learning rate of the optimizer.")


SPECS = [
    rollout_spec(
        IMPALA, name="impala", class_name="IMPALA", year=2018, params=IMPALAParams,
        paper="Espeholt et al. 2018, IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner "
        "Architectures (arXiv:1802.01561)",
        scope="V-trace on rollouts of one process or of workers; policy_lag adds lag; "
        "every action kind, vectors and images.",
        defaults={"num_envs": 4, "log_interval": 100, "total_timesteps": 500_000, "env_kwargs": NORMALIZED},
    )
]  # fmt: skip

train_impala = train_function(__name__, SPECS)
