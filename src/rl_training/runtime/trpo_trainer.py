"""TRPO in the registry: hyper-parameters and entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from rl_training.algorithms.trpo import TRPO
from rl_training.config.params import Reason, Reasons
from rl_training.config.rollout_params import NORMALIZED_OBSERVATIONS, RolloutParams, rollout_spec
from rl_training.run.workflows import train_function


class TRPOParams(RolloutParams):
    """Hyper-parameters of TRPO."""

    synonyms: ClassVar[Mapping[str, str]] = {"learning_rate": "value_learning_rate"}
    unused: ClassVar[Reasons] = (
        Reason(("ent_coef", "vf_coef"), "policy and critic have steps of their own, without it"),
    )

    learning_rate: float = Field(1e-3, ge=0, le=10, description="The same as value_learning_rate.")
    value_learning_rate: float = Field(1e-3, gt=0, le=10, description="Of the critic; the policy has no learning rate.")
    value_updates: int = Field(80, ge=1, description="Gradient steps of the critic per rollout.")
    value_minibatch_size: int = Field(128, ge=1, description="Rows per step of the critic.")
    max_grad_norm: float | None = Field(None, gt=0, description="Maximum norm of the critic's gradient; null: any.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Trace decay of the advantages.")
    normalize_advantages: bool = Field(True, description="Normalize advantages to mean 0 and deviation 1.")
    max_kl: float = Field(0.01, gt=0, description="Size of the trust region: the maximum KL divergence of an update.")
    cg_iterations: int = Field(15, ge=1, le=10_000, description="Conjugate-gradient steps.")
    cg_damping: float = Field(0.1, gt=0, description="Added to the diagonal of the Fisher matrix.")
    line_search_steps: int = Field(10, ge=1, le=10_000, description="Maximum number of backtracking steps.")
    line_search_shrink: float = Field(0.8, gt=0, lt=1, description="Factor of the update's size per backtracking step.")

    @model_validator(mode="before")
    @classmethod
    def _remembers_nothing(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Its step differentiates the policy twice, which torch's LSTM on a CPU does not support."""
        if data.get("memory", "none") != "none":
            raise ValueError(f"memory is {data['memory']!r}; trpo supports none, take ppo, a2c, impala or appo")
        return {name: value for name, value in data.items() if name != "memory"}

    @model_validator(mode="before")
    @classmethod
    def _leave_out_unused_rate(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Accept what earlier versions stored: `learning_rate` with a default that nothing used."""
        unused = "value_learning_rate" in data and data.get("learning_rate") == 3e-4
        return {name: value for name, value in data.items() if name != "learning_rate"} if unused else data


SPECS = [
    rollout_spec(
        TRPO, name="trpo", class_name="TRPO", year=2015, params=TRPOParams,
        paper="Schulman et al. 2015, Trust Region Policy Optimization (arXiv:1502.05477)",
        scope="Conjugate gradient and line search on the whole batch, separate critic steps; "
        "every action kind, vectors and images.",
        defaults={"num_envs": 8, "total_timesteps": 200_000, "env_kwargs": NORMALIZED_OBSERVATIONS},
    )
]  # fmt: skip

train_trpo = train_function(__name__, SPECS)
