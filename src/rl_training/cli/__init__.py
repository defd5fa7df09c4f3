"""The command line; also exports `TrainConfig` and `load_config`."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("TrainConfig", "load_config"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rl_training.config import train_config as config

    return getattr(config, name)
