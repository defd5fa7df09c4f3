"""APPO in the registry: hyper-parameters and entry."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from rl_training.algorithms.appo import APPO
from rl_training.config.params import Reason, Reasons
from rl_training.config.rollout_params import NORMALIZED, ClippedParams, VTraceParams, rollout_spec
from rl_training.run.workflows import train_function


class APPOParams(VTraceParams, ClippedParams):
    """Hyper-parameters of APPO."""

    unused: ClassVar[Reasons] = (
        Reason(
            ("pg_rho_clip", "kl_coef", "kl_target", "target_update_interval"),
            "target_policy is false, and nothing else reads it", lambda p: not p.target_policy,
        ),
    )  # fmt: skip
    fixed: ClassVar[Reasons] = (Reason(("kl_coef",), "it is where a weight starts that then adapts to kl_target"),)

    num_steps: int = Field(32, ge=1, le=1_000_000, description="Steps of each environment per rollout.")
    learning_rate: float = Field(5e-4, ge=0, le=10, description="Learning rate of the optimizer.")
    ent_coef: float = Field(0.01, ge=0, description="Weight of the entropy bonus.")
    update_epochs: int = Field(4, ge=1, le=10_000, description="Passes over each rollout.")
    minibatch_size: int | None = Field(
        128, ge=1, description="Rows per gradient step, rounded to whole trajectories; null: the whole rollout."
    )
    target_policy: bool = Field(False, description="RLlib's variant: a slowly copied target policy and a KL penalty.")
    target_update_interval: int = Field(4, ge=1, description="Updates between copies of the target policy.")
    kl_coef: float = Field(1.0, ge=0, description="Initial weight of KL(target || policy).")
    kl_target: float = Field(0.01, gt=0, description="KL divergence to which kl_coef adapts.")

    @model_validator(mode="after")
    def _target_has_no_memory(self) -> APPOParams:
        if self.target_policy and self.memory != "none":
            raise ValueError("target_policy is true; with a memory it must be false")
        return self


SPECS = [
    rollout_spec(
        APPO, name="appo", class_name="APPO", year=2020, params=APPOParams,
        paper="Petrenko et al. 2020, Sample Factory (arXiv:2006.11751); the option target_policy after "
        "Luo et al. 2019, IMPACT (arXiv:1912.00167)",
        scope="Clipped surrogate against the behaviour policy on V-trace targets, optionally "
        "with a target policy and a KL penalty; every action kind, vectors and images.",
        defaults={"num_envs": 16, "log_interval": 10, "total_timesteps": 300_000, "env_kwargs": NORMALIZED},
    )
]  # fmt: skip

train_appo = train_function(__name__, SPECS)
