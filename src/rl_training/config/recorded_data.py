"""Hyper-parameters that name recorded data: prior data, data sets and experts."""

from __future__ import annotations

import os
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from rl_training.config.params import Facts, Params
from rl_training.config.replay import ReplayParams
from rl_training.validation import StrictModel

DatasetKind = Literal["random", "npz", "minari", "checkpoint"]



def absolute(path: str | None) -> str | None:
    """The absolute path, so that a run can be resumed from any folder; the name of a packaged file stays."""
    return os.path.abspath(path) if path is not None and os.path.exists(path) else path


DataPath = Annotated[str | None, AfterValidator(absolute)]



class DatasetParams(StrictModel):
    """Hyper-parameters that name recorded data."""

    dataset_kind: DatasetKind = Field("random", description="Where the recorded data comes from.")
    dataset_path: DataPath = Field(
        None, description="An npz file, the name of a packaged one, a checkpoint with its replay, or Minari's folder."
    )
    dataset_id: str | None = Field(None, description="Name of a Minari dataset.")
    dataset_size: int | None = Field(
        None, ge=1, description="Transitions to generate, or to use from a larger data set."
    )
    dataset_seed: int = Field(0, ge=0, description="Seed of the generated data.")



class PriorDataParams(ReplayParams, DatasetParams):
    """Hyper-parameters of replay with prior data."""

    one_step_with: ClassVar[str] = "prior data"

    offline_batch_ratio: float = Field(0.5, ge=0, le=1, description="Share of every batch that is prior data.")
    offline_pretrain_updates: int = Field(0, ge=0, description="Updates on prior data only, before the first step.")

    @property
    def facts(self) -> Facts:
        """As the base class, plus the prior data."""
        return super().facts._replace(pretrain_updates=self.offline_pretrain_updates, reads_recordings=True)


class DatasetLaneParams(Params, DatasetParams):
    """Hyper-parameters of learning from recorded data alone."""

    batch_size: int = Field(256, ge=1, le=10**6, description="Rows per update.")
    heldout_fraction: float = Field(0.1, gt=0, lt=1, description="Share of the episodes that is held out.")
    heldout_interval: int = Field(100, ge=1, description="Updates between evaluations on the held-out data.")

    @property
    def facts(self) -> Facts:
        """As the base class, plus the rows of a batch."""
        return super().facts._replace(rows=self.batch_size, reads_recordings=True)

NEEDED = {"npz": "expert_dataset_path", "minari": "expert_dataset_id", "checkpoint": "expert_checkpoint"}



class ExpertParams(StrictModel):
    """Hyper-parameters that name an expert's steps."""

    expert_dataset_kind: DatasetKind = Field("random", description="Where the expert's steps come from.")
    expert_dataset_path: DataPath = Field(
        None, description="An npz file, the name of a packaged one, or Minari's folder."
    )
    expert_dataset_id: str | None = Field(None, description="Name of a Minari dataset.")
    expert_dataset_size: int | None = Field(
        None, ge=1, description="Steps to record, or to use from a larger data set."
    )
    expert_dataset_seed: int = Field(0, ge=0, description="Seed of the recorded steps.")
    expert_checkpoint: DataPath = Field(None, description="Checkpoint whose policy is recorded before the run.")

    @model_validator(mode="after")
    def _says_where(self) -> ExpertParams:
        name = NEEDED.get(self.expert_dataset_kind)
        if name is not None and getattr(self, name) is None:
            raise ValueError(f"{name} is missing; expert_dataset_kind {self.expert_dataset_kind} needs it")
        return self

    def as_dataset(self) -> DatasetParams:
        """The same settings under the names that other data uses; only an expert can be a checkpoint."""
        return DatasetParams(**{name: getattr(self, f"expert_{name}") for name in DatasetParams.model_fields})
