"""APPO in the registry: hyper-parameters and entry."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rl_training.algorithms.appo import APPO
from rl_training.config.params import Facts, Unused
from rl_training.config.rollout import NORMALIZED, RolloutParams, rollout_spec
from rl_training.run.workflows import train_function


class APPOParams(RolloutParams):
    """Hyper-parameters of APPO."""

    unused: ClassVar[tuple[Unused, ...]] = (
        Unused(
            ("pg_rho_clip", "kl_coef", "kl_target", "target_update_interval"),
            "target_policy is false, and nothing else reads it", lambda p: not p.target_policy,
        ),
    )  # fmt: skip

    num_steps: int = Field(32, ge=1, le=1_000_000, description="Steps of each environment per rollout.")
    learning_rate: float = Field(5e-4, ge=0, le=10, description="Learning rate of the optimizer.")
    ent_coef: float = Field(0.01, ge=0, description="Weight of the entropy bonus.")
    rho_clip: float = Field(1.0, gt=0, description="Maximum ratio in the temporal difference.")
    c_clip: float = Field(1.0, gt=0, description="Maximum ratio in the trace.")
    pg_rho_clip: float = Field(1.0, gt=0, description="Maximum ratio in the policy gradient, with target_policy.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Decay of the V-trace traces; IMPALA's paper uses 1.")
    importance_correction: bool = Field(True, description="False sets V-trace's ratios to 1: a control.")
    clip_coef: float = Field(0.2, gt=0, le=10, description="How far the probability ratio may be from 1.")
    update_epochs: int = Field(4, ge=1, le=10_000, description="Passes over each rollout.")
    minibatch_size: int | None = Field(
        128, ge=1, description="Rows per gradient step, rounded to whole trajectories; null: the whole rollout."
    )
    normalize_advantages: bool = Field(
        True, description="Normalize advantages to zero mean and unit standard deviation per minibatch."
    )
    target_policy: bool = Field(
        False, description="Use RLlib's variant, with a slowly copied target policy and a KL penalty."
    )
    target_update_interval: int = Field(4, ge=1, description="Updates between copies of the target policy.")
    kl_coef: float = Field(1.0, ge=0, description="Initial weight of KL(target || policy).")
    kl_target: float = Field(0.01, gt=0, description="KL divergence to which kl_coef adapts.")

    def fixed_numbers(self) -> dict[str, str]:
        """As the base class, plus the KL weight, which adapts."""
        return super().fixed_numbers() | {"kl_coef": "it is where a weight starts that then adapts to kl_target"}

    @property
    def facts(self) -> Facts:
        """As the base class, plus the rows of a minibatch."""
        return super().facts._replace(rows=self.minibatch_size or 0)


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
