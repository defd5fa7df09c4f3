"""Options that several commands share, and how they are read."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from rl_training.errors import UserError

Text = str | None
Texts = list[str] | None


def option(text: str, *names: str, metavar: str | None = None, complete: Any = None) -> Any:
    """An option of a command; `text` is its help, and `complete` gives the values that a shell offers."""
    return typer.Option(*names, metavar=metavar, help=text, autocompletion=complete)


def complete_preset(incomplete: str) -> list[str]:
    """Presets that begin with this text."""
    from rl_training.config.train_config import list_presets

    return [name for name in list_presets() if name.startswith(incomplete)]


def complete_algorithm(incomplete: str) -> list[str]:
    """Algorithms that begin with this text, taken from the presets, because the registry takes seconds to load."""
    return sorted({name.partition("/")[0] for name in complete_preset("") if name.startswith(incomplete)})


ConfigOption = Annotated[
    Text, option("A YAML file, or a preset such as ppo/cartpole.", "--config", metavar="C", complete=complete_preset)
]
PresetArgument = Annotated[
    Text, typer.Argument(metavar="PRESET", help="Same as --config.", autocompletion=complete_preset)
]
AlgoOption = Annotated[
    Text,
    option("Algorithm, with its defaults (see `list`).", "--algo", metavar="NAME", complete=complete_algorithm),
]
EnvOption = Annotated[Text, option("Gymnasium id, or module:name of a class or function.", "--env", metavar="ID")]
OwnEnvOption = Annotated[Text, option("Your own name for the checkpoint's environment.", "--env", metavar="ID")]
ImportOption = Annotated[Texts, option("Import a module of environments or networks.", "--import", metavar="MODULE")]
SetOption = Annotated[
    Texts, option("Set a config field or a hyper-parameter: learning_rate=1e-3.", "--set", metavar="KEY=VALUE")
]
CheckpointOption = Annotated[str, option("A .ckpt file of a run, or the run's folder.", "--checkpoint", metavar="P")]
StepsOption = Annotated[Text, option("Budget in environment steps; 1e6 is fine.", "--total-timesteps", metavar="N")]
NumEnvsOption = Annotated[Text, option("Environments stepped together.", "--num-envs", metavar="N")]
DeviceOption = Annotated[Text, option("cpu, cuda, cuda:<index> or auto.", "--device", metavar="NAME")]
OutputOption = Annotated[Text, option("Folder in which the run's folder is created.", "--output-dir", metavar="DIR")]
StochasticOption = Annotated[bool, option("Sample actions instead of taking the most likely.", "--stochastic")]


def name_environment(env: str | None, modules: Iterable[str] | None) -> Any:
    """Import the modules of `--import`, and return `--env` and `--import` in the form that `env=` takes."""
    names = tuple(modules or ())
    if (names or ":" in (env or "")) and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a stray yaml.py there must not replace PyYAML
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(f"--import {name}: the module cannot be imported ({error}).") from error
        except Exception as error:
            raise UserError(f"--import {name}: the module fails with {type(error).__name__}: {error}.") from error
    return names if env is None else env


def one_config(preset: str | None, config: str | None) -> str | None:
    """The value of --config, or the positional argument."""
    if preset is not None and config is not None:
        raise UserError(f"{preset!r} and --config {config} were both given; give one of them.")
    return config if preset is None else preset


def find_checkpoint(given: str) -> str:
    """The checkpoint file; for a run's folder, its newest checkpoint."""
    for newest in (os.path.join(given, "checkpoints", "latest.ckpt"), os.path.join(given, "latest.ckpt")):
        if os.path.isfile(newest):
            return newest
    return given


def whole_number(option: str, text: str, *, least: int = 0, most: float = math.inf) -> int:
    """The whole number in an option's text; `1e5` is valid."""
    try:
        number = float(text)
        whole = int(text) if text.lstrip("+-").isdigit() else int(number)
    except (ValueError, OverflowError):
        raise UserError(f"{option} is {text!r}; it must be a whole number.") from None
    if whole != number or not least <= whole <= most:
        limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise UserError(f"{option} is {text!r}; it must be a whole number {limits}.")
    return whole
