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
    import sys
    from importlib import import_module
    from importlib.util import find_spec

    if name.startswith("_") or find_spec(f"{__name__}.{name}") is not None:  # a module that is not imported yet
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(FUNCTIONS.get(name, "rl_training.api")), name)
    except AttributeError as error:
        # `from rl_training import name` replaces the message of an AttributeError, but not that of an ImportError
        if sys._getframe(1).f_code.co_name == "_handle_fromlist":
            raise ImportError(str(error), name=name) from None
        raise
