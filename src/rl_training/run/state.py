"""What a checkpoint holds: the learner, its experience, and `RunState`, the counters of the run."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field

from rl_training.validation import StrictModel

if TYPE_CHECKING:
    from rl_training.run.build import Session

SCHEMA = 1
AnyFloat = Annotated[float, Field(allow_inf_nan=True)]


class RunState(StrictModel):
    """The counters of a run, as a checkpoint stores them. `Run` counts in it, its `Cadence` sets what is next."""

    model_config = ConfigDict(frozen=False)

    step: int = Field(ge=0)
    updates: int = Field(ge=0)
    train_seconds: float = Field(ge=0)
    best_return: float = Field(lt=math.inf, allow_inf_nan=True)  # minus infinity before the first evaluation
    good_evaluations: int = Field(ge=0)
    next_log: int = Field(ge=1)
    next_evaluation: int = Field(ge=0)
    next_checkpoint: int = Field(ge=0)
    episodes: list[tuple[float, int]]
    latest: dict[str, AnyFloat]  # metrics of the last update; tensors until somebody reads them
    collected_metrics: dict[str, AnyFloat]
    last_evaluation: dict[str, int | AnyFloat]
    abandoned: bool = False  # saved in the middle of a turn, so without the environments' episodes


def summarize_episodes(episodes: Collection[tuple[float, int]]) -> dict[str, float]:
    """Mean return and length of the last training episodes, if there are any."""
    if not episodes:
        return {}
    returns, lengths = zip(*episodes, strict=True)
    return {
        "episode_return_mean": sum(returns) / len(returns), "episode_length_mean": sum(lengths) / len(lengths),
    }  # fmt: skip


def checkpoint_tree(
    session: Session, source: dict[str, Any], state: RunState, machine: dict[str, str]
) -> dict[str, Any]:  # fmt: skip
    """Everything needed to resume, evaluate and predict; complete on rank 0."""
    algorithm = dict(session.algorithm.state_dict())
    others = session.ranks.gather(algorithm, source)
    return {
        "schema": SCHEMA,
        "config": session.config.model_dump(mode="json"),
        "spaces": session.spaces.to_dict(),
        "algorithm": algorithm,
        "source": source,
        "run": {**dict(state), "episodes": [list(episode) for episode in state.episodes]},
        "machine": machine,
        **({"ranks": others} if others else {}),
    }
