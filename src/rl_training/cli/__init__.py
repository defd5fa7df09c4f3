"""The command line; `rl_training.cli.load_config` is the config reader's public second address."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "load_config":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rl_training.experiment.config import load_config

    return load_config
