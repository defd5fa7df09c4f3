"""`RunState`: the part of a run that a checkpoint stores next to its learner and experience."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from rl_training.validation import StrictModel

SCHEMA = 1
AnyFloat = Annotated[float, Field(allow_inf_nan=True)]


class RunState(StrictModel):
    """The part of a `Run` that a checkpoint stores: each field is the attribute of the same name."""

    step: int = Field(ge=0)
    updates: int = Field(ge=0)
    train_seconds: float = Field(ge=0)
    best_return: float = Field(lt=math.inf, allow_inf_nan=True)  # minus infinity before the first evaluation
    good_evaluations: int = Field(ge=0)
    next_log: int = Field(ge=1)
    next_evaluation: int = Field(ge=0)
    next_checkpoint: int = Field(ge=0)
    episodes: list[tuple[float, int]]
    latest: dict[str, AnyFloat]
    collected_metrics: dict[str, AnyFloat]
    last_evaluation: dict[str, int | AnyFloat]
    abandoned: bool = False  # saved in the middle of a turn, so without the environments' episodes
