"""Build a `TrainConfig` from options: a preset or an algorithm's defaults, then `--set`, then the other options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import typer

from rl_training.cli.exits import is_first_rank
from rl_training.errors import UserError, printable

if TYPE_CHECKING:
    from rl_training.config.train_config import TrainConfig

_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def build_config(
    config: str | None, algo: str | None, env: str | None, settings: Iterable[str] | None = None,
    modules: Iterable[str] | None = None, **fields: Any,
) -> TrainConfig:  # fmt: skip
    """The validated config of a command; `fields` that are None were not given."""
    from rl_training.cli.options import name_environment
    from rl_training.config.spec import list_algorithm_specs
    from rl_training.config.train_config import TrainConfig, settings_in
    from rl_training.validation import validate

    if env is not None and algo is None and config in [spec.name for spec in list_algorithm_specs()]:
        config, algo = None, config
    data = starting_point(config, algo, env)
    given = {name: value for name, value in fields.items() if value is not None}
    changed = drop_replaced_schedules(apply_settings(data, settings or ()), settings or ())
    changed.update(given)
    where = config or f"{algo} on {env}"
    built = validate(TrainConfig, changed, where if changed == data else f"{where}, with the options given")
    keys = {setting.partition("=")[0].strip().removeprefix("algo_kwargs.") for setting in settings or ()}
    named = [built.env_id] if config is None or "env_id" in keys else []
    named += built.callables[1:] if "network" in keys else ()
    for name in named:
        name_environment(name, None)
    name_environment(None, modules)
    built = built.giving(*(settings_in(data, config) if config else ()), *given, *(key.split(".")[0] for key in keys))
    return built.naming(*(modules or ()), *named)


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
        one, other = (f"--env {env}", "--algo ppo") if algo is None else (f"--algo {algo}", "--env CartPole-v1")
        raise UserError(f"{one} is not enough; {other[:other.index(' ')]} is missing, such as {other}.")
    return with_defaults({"algo": algo, "env_id": env})


def apply_settings(data: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """A copy of the config mapping with each `key=value` of `--set`."""
    result = dict(data)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not key or not equals:
            raise UserError(f"--set {setting!r} is not KEY=VALUE, such as learning_rate=1e-3.")
        result = _put(result, _path(key.strip(), data.get("algo")), read_value(setting, text), setting)
    return result


def drop_replaced_schedules(data: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """The mapping without the schedules of numbers that `--set` sets; prints one line for each."""
    from rl_training.config.params import replaced_schedules
    from rl_training.config.spec import get_algorithm_spec

    paths = [_path(setting.partition("=")[0].strip(), data.get("algo")) for setting in settings]
    given = [path[1] for path in paths if len(path) > 1 and path[0] == "algo_kwargs"]
    if not given:
        return data
    kwargs = dict(data["algo_kwargs"])
    for key, name in replaced_schedules(get_algorithm_spec(str(data.get("algo"))).params, kwargs, given).items():
        if is_first_rank():
            replaces = f"--set {name}={kwargs[name]} replaces {key} {describe_schedule(kwargs[key])}"
            typer.echo(printable(replaces), err=True)
        del kwargs[key]
    return {**data, "algo_kwargs": kwargs}


def describe_schedule(schedule: Any) -> str:
    """Such as (linear, 0.001 to 0)."""
    parts = dict(schedule) if isinstance(schedule, Mapping) else {}
    return f"({parts.get('type', 'linear')}, {parts.get('start')} to {parts.get('end', parts.get('start'))})"


def read_value(setting: str, text: str) -> Any:
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
