"""MOPO in the registry: hyper-parameters and entry."""

from __future__ import annotations

from pydantic import Field

from rl_training.algorithms.mopo import MOPO
from rl_training.config.replay_params import DatasetKind, DatasetParams, ModelParams, OffPolicyParams, model_spec
from rl_training.data.model_store import ModelDatasetStore
from rl_training.run.workflows import train_function


class MOPOParams(ModelParams, DatasetParams, OffPolicyParams):
    """Hyper-parameters of MOPO."""

    dataset_kind: DatasetKind | None = Field(  # type: ignore[assignment]
        None, description="Where the recorded data comes from; there is no default."
    )
    model_updates: int | None = Field(
        None, ge=1, description="Maximum gradient steps of the fit; null: the held-out error alone stops it."
    )
    rollout_horizon: float = Field(5.0, ge=1, le=1_000, description="Steps per rollout, rounded down.")
    penalty_coef: float = Field(
        1.0, ge=0, description="Reward penalty per unit of the model's largest predicted deviation; 0: MBPO offline."
    )


SPECS = [
    model_spec(
        MOPO, name="mopo", class_name="MOPO", year=2020, params=MOPOParams, store=ModelDatasetStore,
        paper="Yu et al. 2020, MOPO: Model-based Offline Policy Optimization (arXiv:2005.13239)",
        scope="MBPO on a dataset alone, with rewards lowered where the model is uncertain; a timestep is a policy "
        "update; vectors.",
        total_timesteps=50_000, steps_environments=False,
    )
]  # fmt: skip

train_mopo = train_function(__name__, SPECS)
