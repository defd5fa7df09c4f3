"""Sessions with simulators, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from resume_cases import tiny
from rl_training.run.build import Session, open_session

SETTINGS: dict[str, Any] = {"vectorization": "device", "eval_episodes": 0}


def open_simulator(make: Any, algo: str = "ppo", steps: int = 24, **fields: Any) -> Session:
    config = tiny(algo, Path("unused"), env_id="points", **{**SETTINGS, **fields})
    if "num_steps" in config.algo_kwargs:
        config = config.model_copy(update={"algo_kwargs": {**config.algo_kwargs, "num_steps": steps}})
    config._given = tuple(name for name in fields if name in type(config).model_fields)
    return open_session(config, env=make)


def take_rollout(session: Session) -> dict[str, Tensor]:
    """One rollout, copied."""
    session.store.add(session.collect(session.store.request(0)), 0)
    return {name: array.clone() for name, array in session.store.experience.arrays.items()}  # type: ignore[attr-defined]
