"""Reinforcement learning for Gymnasium environments: one loop, many algorithms.

`from rl_training import PPO` is the managed class (train, evaluate, predict, save, load, resume);
`rl_training.PPOAlgorithm` is its learner. Names are loaded on first use, so importing this package is cheap.
"""

from __future__ import annotations

from typing import Any

__version__ = "1.0.0rc1"
FUNCTIONS = {"register": "rl_training.api", "load_runs": "rl_training.tools.frames"}


def __dir__() -> list[str]:
    """The public names, read from the generated type stub, because the registry would import torch."""
    import re
    from pathlib import Path

    stub = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    return sorted({*globals(), *re.findall(r'^    "(\w+)",$', stub, re.MULTILINE)})


def __getattr__(name: str) -> Any:
    if not (name[:1].isupper() or name in FUNCTIONS):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(FUNCTIONS.get(name, "rl_training.api")), name)
