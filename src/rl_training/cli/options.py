"""Options that several commands share, and the `TrainConfig` that they describe."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_training.cli.screen import is_first_rank, tell
from rl_training.errors import UserError

if TYPE_CHECKING:
    from rl_training.config.train_config import TrainConfig

Text = str | None
Texts = list[str] | None
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


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


def name_environment(env: str | None, modules: Iterable[str] | None, others: Iterable[str] = ()) -> Any:
    """Import the modules of `--import`, and return `--env` and `--import` in the form that `env=` takes.

    Own environments and networks, `env` and `others`, may be modules in the working directory.
    """
    names = tuple(modules or ())
    if (names or any(":" in name for name in (env or "", *others))) and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a stray yaml.py there must not replace PyYAML
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            missing = isinstance(error, ImportError)
            what = f"cannot be imported ({error})" if missing else f"fails with {type(error).__name__}: {error}"
            raise UserError(f"--import {name}: the module {what}.") from error
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
    except ValueError:
        number = math.nan
    if not number.is_integer() or not least <= number <= most:
        limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise UserError(f"{option} is {text!r}; it must be a whole number {limits}.")
    return int(number)


def build_config(
    config: str | None, algo: str | None, env: str | None, settings: Iterable[str] | None = None,
    modules: Iterable[str] | None = None, **fields: Any,
) -> TrainConfig:  # fmt: skip
    """The validated config of a command: a preset or an algorithm's defaults, then `--set`, then `fields`.

    Fields that are None were not given.
    """
    from rl_training.config.spec import list_algorithm_specs
    from rl_training.config.train_config import TrainConfig, settings_in
    from rl_training.validation import validate

    settings = list(settings or ())
    name_environment(None, modules)  # they may register algorithms
    if env is not None and algo is None and config in [spec.name for spec in list_algorithm_specs()]:
        config, algo = None, config
    data = starting_point(config, algo, env)
    given = {name: value for name, value in fields.items() if value is not None}
    changed = drop_replaced_schedules(apply_settings(data, settings), settings) | given
    where = config or f"{algo} on {env}"
    built = validate(TrainConfig, changed, where if changed == data else f"{where}, with the options given")
    keys = named_keys(settings)
    named = [built.env_id] if config is None or "env_id" in keys else []
    named += built.callables[1:] if "network" in keys else ()
    name_environment(None, modules, named)
    built = built.giving(*(settings_in(data, config) if config else ()), *given, *keys)
    return built.naming(*(modules or ()), *named)


def check_parameters(config: TrainConfig) -> None:
    """Refuse hyper-parameters that are wrong, before the first of several runs starts."""
    from rl_training.config.params import read_params
    from rl_training.config.spec import get_algorithm_spec

    read_params(get_algorithm_spec(config.algo).params, config.algo_kwargs)


def starting_point(config: str | None, algo: str | None, env: str | None) -> dict[str, Any]:
    """The mapping in a config file or preset, or for an algorithm and environment, with the algorithm's defaults."""
    from rl_training.config.settings import with_defaults
    from rl_training.config.train_config import read_yaml

    if config is not None:
        if algo is not None or env is not None:
            extra = "--algo" if env is None else "--env"
            raise UserError(f"{config} has an algorithm and an environment, so {extra} cannot be given too; "
                            f"to train it elsewhere, use --set env_id={env or 'ID'}.")  # fmt: skip
        return with_defaults(read_yaml(config))
    if algo is None and env is None:
        raise UserError("there is nothing to run; give a preset such as ppo/cartpole, a file, or --algo and --env.")
    if algo is None or env is None:
        given, missing = (f"--env {env}", "--algo ppo") if algo is None else (f"--algo {algo}", "--env CartPole-v1")
        raise UserError(f"{given} is not enough; {missing.split()[0]} is missing, such as {missing}.")
    return with_defaults({"algo": algo, "env_id": env})


def apply_settings(data: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """A copy of the config mapping with each `key=value` of `--set`."""
    result = dict(data)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not key or not equals:
            raise UserError(f"--set {setting!r} is not KEY=VALUE, such as learning_rate=1e-3.")
        result = _put(result, _path(key.strip(), data.get("algo")), _read_value(setting, text), setting)
    return result


def named_keys(settings: Iterable[str]) -> list[str]:
    """The fields and hyper-parameters that `--set` names."""
    keys = (setting.partition("=")[0].strip().removeprefix("algo_kwargs.") for setting in settings)
    return [key.partition(".")[0] for key in keys]


def drop_replaced_schedules(data: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """The mapping without the schedules of numbers that `--set` sets; prints one line for each."""
    from rl_training.config.params import replaced_schedules
    from rl_training.config.spec import get_algorithm_spec
    from rl_training.config.train_config import TrainConfig

    given = set(named_keys(settings)) - TrainConfig.model_fields.keys()
    if not given:
        return data
    kwargs = dict(data["algo_kwargs"])
    for key, name in replaced_schedules(get_algorithm_spec(str(data.get("algo"))).params, kwargs, given).items():
        schedule = kwargs.pop(key)
        parts = schedule if isinstance(schedule, Mapping) else {}
        shape = f"{parts.get('type', 'linear')}, {parts.get('start')} to {parts.get('end', parts.get('start'))}"
        if is_first_rank():
            tell(f"--set {name}={kwargs[name]} replaces {key} ({shape})")
    return {**data, "algo_kwargs": kwargs}


def _read_value(setting: str, text: str) -> Any:
    """A value read as YAML, except that `1e-3` is a number."""
    from rl_training.config.train_config import parse_yaml

    try:
        return _read_exponents(parse_yaml(text))
    except Exception:
        raise UserError(f"--set {setting!r}: the value is not valid YAML; quote it.") from None


def _read_exponents(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _read_exponents(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_read_exponents(part) for part in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _path(key: str, algo: Any) -> list[str]:
    """Where a key belongs: a field of TrainConfig, or a hyper-parameter under `algo_kwargs`."""
    from rl_training.config.settings import hyper_parameters, nearest_setting
    from rl_training.config.train_config import TrainConfig

    parts = key.split(".")
    if parts[0] in TrainConfig.model_fields:
        return parts
    if parts[0] not in hyper_parameters(algo):
        raise UserError(f"--set: unknown key {parts[0]!r}; {nearest_setting(parts[0], algo)}")
    return ["algo_kwargs", *parts]


def _put(data: Mapping[str, Any], path: list[str], value: Any, setting: str) -> dict[str, Any]:
    first, *rest = path
    if not rest:
        return {**data, first: value}
    inner = data.get(first)
    if inner is not None and not isinstance(inner, Mapping):
        raise UserError(f"--set {setting!r}: {first} is {inner!r}, which has no parts.")
    return {**data, first: _put(inner or {}, rest, value, setting)}
