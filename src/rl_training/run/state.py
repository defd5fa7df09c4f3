"""What a checkpoint holds: the learner, its experience, and `RunState`, the part of the run itself."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from rl_training.run.interruption import can_save_after
from rl_training.validation import StrictModel

if TYPE_CHECKING:
    from rl_training.run.run import Run

SCHEMA = 1
AnyFloat = Annotated[float, Field(allow_inf_nan=True)]


class RunState(StrictModel):
    """The part of a `Run` that a checkpoint stores: its attributes of the same names, and the seconds of its clock."""

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


def summarize_episodes(episodes: Collection[tuple[float, int]]) -> dict[str, float]:
    """Mean return and length of the last training episodes, if there are any."""
    if not episodes:
        return {}
    returns, lengths = zip(*episodes, strict=True)
    return {
        "episode_return_mean": sum(returns) / len(returns), "episode_length_mean": sum(lengths) / len(lengths),
    }  # fmt: skip


def checkpoint_tree(run: Run, *, replay: bool) -> dict[str, Any]:
    """Everything needed to resume, evaluate and predict; complete on rank 0."""
    session = run.session
    try:
        source = session.source_state()
    except Exception as error:  # because an environment is gone, for example
        if run.abandoned or not session.collector.started or not can_save_after(error):
            raise
        run.logger.message(f"warning: {error}")
        run.abandon_turn()
        source = session.source_state()
    if not replay:
        source.pop("replay", None)
    run.abandoned = bool(run.ranks.largest(run.abandoned))
    algorithm = dict(session.algorithm.state_dict())
    others = run.ranks.gather(algorithm, source)
    return {
        "schema": SCHEMA,
        "config": run.config.model_dump(mode="json"),
        "spaces": session.spaces.to_dict(),
        "algorithm": algorithm,
        "source": source,
        "run": _state_of(run),
        "machine": run.machine,
        **({"ranks": others} if others else {}),
    }


def _state_of(run: Run) -> dict[str, Any]:
    derived = {
        "train_seconds": run.clock.seconds, "episodes": [list(e) for e in run.episodes], "latest": run.read_latest(),
    }  # fmt: skip
    return {name: derived[name] if name in derived else getattr(run, name) for name in RunState.model_fields}
