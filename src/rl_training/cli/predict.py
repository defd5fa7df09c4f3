"""`rl-training predict`: print the action of a checkpoint's policy as JSON; no environment is needed."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer

from rl_training.cli.options import (
    CheckpointOption,
    ImportOption,
    StochasticOption,
    Text,
    find_checkpoint,
    name_environment,
    option,
)
from rl_training.errors import UserError


def predict(
    checkpoint: CheckpointOption,
    obs: Annotated[str, option("An observation or a batch: JSON, .json or .npy, - is stdin.", metavar="JSON|FILE|-")],
    action_mask: Annotated[
        Text, option("1 for each legal action, else 0; a batch has one row per observation.", metavar="JSON|FILE|-")
    ] = None,
    stochastic: StochasticOption = False,
    modules: ImportOption = None,
) -> None:
    """Print the action for an observation as JSON; a batch gives a batch.

    Every call is treated as the first step of an episode; in Python, `actor()` keeps a policy's memory (Dreamer).
    """
    observation = read_values("--obs", obs, "an observation looks like [0.1, 0.2]")
    mask = None if action_mask is None else read_values("--action-mask", action_mask, "a mask looks like [1, 0, 1]")
    from rl_training.run.learner import load_policy

    policy = load_policy(find_checkpoint(checkpoint), name_environment(None, modules))
    action = policy.predict(observation, not stochastic, action_mask=mask)
    typer.echo(json.dumps(action if isinstance(action, int) else action.tolist()))


def read_values(name: str, given: str, example: str) -> Any:
    """The value of the option `name`: JSON text, a file or stdin."""
    if given.endswith(".npy"):
        return _read_array(name, given)
    try:
        if given == "-":
            return json.loads(sys.stdin.read())
        if given.endswith(".json") or os.path.isfile(given):
            with open(given, encoding="utf-8") as file:
                return json.load(file)
        return json.loads(given)
    except OSError as error:
        raise UserError(f"{name} {given} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        where = "stdin" if given == "-" else repr(given if len(given) <= 60 else given[:57] + "...")
        raise UserError(f"{name}: {where} is not valid JSON; {example}.") from None


def _read_array(name: str, path: str) -> Any:
    import numpy as np

    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)  # mapped: a header may claim any size
    except OSError as error:
        raise UserError(f"{name} {path} cannot be read: {error.strerror or 'not a .npy file'}.") from None
    except Exception:  # a damaged file can fail in any way
        array = None
    if not isinstance(array, np.ndarray):
        raise UserError(f"{name} {path} is not a .npy file of numbers.")
    return array
