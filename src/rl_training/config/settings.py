"""The user's settings: a `TrainConfig` made from them, hints for unknown keys, and settings that have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_training.config.params import REVERSED, SCHEDULE, Params, change_params, parameter_names
from rl_training.config.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.config.train_config import TrainConfig, read_yaml, settings_in
from rl_training.envs.factory import MadeEnvironment, SimulatorSettings, UserEnv, name_env
from rl_training.envs.spaces import EnvSpaces
from rl_training.envs.wrappers import AtariOptions, PixelOptions, WrapperOptions
from rl_training.errors import ALSO_CALLED, UnknownKey, UserError, did_you_mean, near_name, translate
from rl_training.validation import validate

# For the config of a checkpoint, which must not use defaults that its algorithm got later.
UNSAID: dict[str, Any] = {
    "num_envs": 1, "log_interval": 1,
    "env_kwargs": {"wrappers": {"normalize_observation": False, "normalize_reward": False}},
}  # fmt: skip
# Fields of TrainConfig; a hyper-parameter is declared where its model is (`Params.unused`).
OF_WORKERS = ("num_workers", "worker_order", "max_policy_lag", "max_worker_restarts")
ENVIRONMENT = {
    "env_kwargs": ("max_episode_steps", "wrappers", "simulator"),
    "env_kwargs.simulator": tuple(SimulatorSettings.model_fields),
    "env_kwargs.wrappers": tuple(WrapperOptions.model_fields),
    "env_kwargs.wrappers.pixels": tuple(PixelOptions.model_fields),
    "env_kwargs.wrappers.atari": tuple(AtariOptions.model_fields),
}
AnyConfig = TrainConfig | Mapping[str, Any] | str | Path


def read_config(
    config: AnyConfig | None, env: UserEnv | None, algo: str = "", settings: Mapping[str, Any] | None = None
) -> TrainConfig:
    """The config of a run of the algorithm `algo` on the user's environment, with these settings.

    A setting is a field of `TrainConfig` or a hyper-parameter. Everything else has the algorithm's default.
    """
    settings, env = settings or {}, None if isinstance(env, tuple) else env
    names: tuple[str, ...] | None = None  # what the user named; None means everything, as in the user's own code
    if isinstance(config, TrainConfig):
        data, names, given = config.model_dump(exclude_unset=True), config.named, config.given
    elif isinstance(config, str | Path):
        data, names = read_yaml(config), ()
        given = settings_in(data, config)
    else:
        data = dict(config or {})
        given = settings_in(data)
    wanted = settings.get("algo", data.setdefault("algo", algo)) if algo else ""
    if wanted != algo:
        raise UserError(f"algo is {wanted!r}; {get_algorithm_spec(algo).class_name} needs {algo!r}.")
    if isinstance(env, str) or (env is not None and (names == () or "env_id" not in data)):
        data["env_id"] = name_env(env)
    if settings:
        data = put_settings(get_algorithm_spec(str(data.get("algo"))), data, settings)
    if isinstance(env, MadeEnvironment):
        data.setdefault("num_envs", 1)
    data = with_defaults(data)
    read = validate(TrainConfig, data, str(config) if isinstance(config, str | Path) else "config")
    read = read.giving(*given, *settings_in(settings))
    if names is None:  # the user's own code
        return read.naming(*read.callables)
    said = [read.env_id] if isinstance(env, str) or "env_id" in settings else []
    return read.naming(*names, *said, *(read.callables[1:] if "network" in settings else ()))


def with_defaults(data: dict[str, Any]) -> dict[str, Any]:
    """A config's mapping, with the defaults of its algorithm (`AlgorithmSpec.defaults`) for all missing fields."""
    algo = data.get("algo")
    return fill_defaults(data, get_algorithm_spec(algo).defaults) if isinstance(algo, str) and algo else data


def fill_defaults(said: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping with defaults for all missing keys, also in nested mappings."""
    parts = {name: said.get(name) for name, value in defaults.items() if isinstance(value, Mapping)}
    inner = {name: fill_defaults(part, defaults[name]) for name, part in parts.items() if isinstance(part, Mapping)}
    return {**defaults, **said, **inner}


def put_settings(spec: AlgorithmSpec, data: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A config's mapping with each setting in its place; a mapping is merged into the existing one."""
    known, fields = parameter_names(spec.params), TrainConfig.model_fields
    for name in settings:
        if name not in fields and name not in known:
            hint = nearest_setting(name, spec.name, settings[name])
            raise UserError(f"{spec.class_name} has no setting {name!r}; {hint}")
        if callable(settings[name]) and f"{name}{SCHEDULE}" in known:
            what = f"{name}{SCHEDULE}, a function of the progress from 0 to 1 ({REVERSED})"
            raise UserError(f"{name} is a function; give it as {what}.")
    inner = "algo_kwargs", "env_kwargs"
    for name, value in [(name, part[name]) for part in (data, settings) for name in inner if name in part]:
        if not isinstance(value, Mapping):
            raise UserError(f"{name} is {value!r}; it must be a mapping of names to values.")
    given = {name: value for name, value in settings.items() if name in fields and name not in inner}
    hyper = {**settings.get("algo_kwargs", {}), **{name: settings[name] for name in settings if name not in fields}}
    return {
        **data, **given,
        "algo_kwargs": change_params(spec.params, data.get("algo_kwargs", {}), hyper),
        "env_kwargs": {**data.get("env_kwargs", {}), **settings.get("env_kwargs", {})},
    }  # fmt: skip


def hyper_parameters(algo: Any) -> list[str]:
    """Names that `algo_kwargs` may hold for that algorithm, schedules included."""
    return parameter_names(get_algorithm_spec(str(algo)).params)


def full_path(name: str, algo: Any = None) -> str | None:
    """The full path of the key with that name or the most similar one; None if no key is similar."""
    levels: dict[str, Any] = {"": tuple(TrainConfig.model_fields)}
    try:
        levels["algo_kwargs"] = hyper_parameters(algo)
    except UserError:  # there is no such algorithm
        levels["algo_kwargs"] = ("learning_rate",)
    levels |= ENVIRONMENT
    paths: dict[str, str] = {}
    for level, names in levels.items():
        for known in names:
            paths.setdefault(known, f"{level}.{known}".lstrip("."))
    return paths.get(near_name(name, paths, likeness=0.8) or "")


def nearest_setting(name: str, algo: str, value: Any = None) -> str:
    """The end of a sentence about an unknown setting: the most similar name, its full path, or where to find all."""
    known = [*hyper_parameters(algo), *TrainConfig.model_fields]
    if (ours := translate(name, known, value)) is not None:
        return ours
    if (number := name.removesuffix(SCHEDULE)) != name and number in known:
        return f"{number} cannot be scheduled."
    found = (full_path(name, algo) or name).removeprefix("algo_kwargs.")
    nearest = did_you_mean(found, [*known, *([found] if "." in found else [])])
    if nearest.startswith("known:"):  # a list of sixty names does not help
        return f"rl-training config --schema --algo {algo} shows them all."
    return nearest


@contextmanager
def keys_located() -> Iterator[None]:
    """Add a hint to every unknown-key error that is raised inside."""
    try:
        yield
    except UnknownKey as error:
        raise with_full_path(error) from None


def with_full_path(error: UnknownKey) -> UnknownKey:
    """The error with the full path of the key, unless it already suggests a similar key of its own level."""
    name = error.field.rpartition(".")[2]
    found = full_path(name, error.data.get("algo"))
    elsewhere = found is not None and (found.rpartition(".")[2] == ALSO_CALLED.get(name, name) or not error.is_near)
    return UnknownKey(error.where, error.field, did_you_mean(found, [found])) if found and elsewhere else error


def find_unused_fields(config: TrainConfig, params: Params) -> dict[str, str]:
    """Fields of a resolved config that have no effect, and why: the end of a sentence."""
    reasons: dict[str, str] = {}
    backend = f"execution_backend is {config.execution_backend!r}"
    if not config.has_workers:
        reasons |= dict.fromkeys(OF_WORKERS, f"{backend}, which has no workers")
    if config.execution_backend != "ray":
        reasons["ray"] = backend
    if not config.has_workers and config.vectorization != "async":
        reasons["worker_timeout"] = "no environment has a process of its own"
    if not get_algorithm_spec(config.algo).steps_environments:
        reasons |= dict.fromkeys(("num_envs", "vectorization"), f"{config.algo} steps no environments")
    elif not params.facts.steps_environments:
        idle = ("num_envs", "vectorization", "execution_backend", *OF_WORKERS)
        reasons |= dict.fromkeys(idle, f"with these settings, {config.algo} steps no environments")
    if config.device == "cpu":
        reasons["matmul_precision"] = "device is 'cpu'"
    if not config.checkpoint_interval:
        reasons["checkpoint_keep"] = "checkpoint_interval is 0, so no step_<n> is written"
    if not params.facts.replay_rows:
        reasons["replay_in_checkpoint"] = f"{config.algo} has no replay buffer"
    return reasons


def find_unused(config: TrainConfig, params: Params, spaces: EnvSpaces) -> Iterator[str]:
    """Sentences about the settings in `config.given` that have no effect in this run."""
    starts = params.facts.random_steps
    if starts >= config.total_timesteps and not params.facts.pretrain_updates:
        yield f"learning_starts is {starts}, but the run ends after {config.total_timesteps} steps: it learns nothing"
    given = set(config.given)
    if given.issuperset(type(params).model_fields.keys() - {"schedules"}):
        return  # the config of an earlier run, which has every setting
    fields = TrainConfig.model_fields
    idle = {
        name: why
        for name, why in find_unused_fields(config, params).items()
        if getattr(config, name) != fields[name].get_default(call_default_factory=True)
    } | params.find_unused(spaces)
    reasons: dict[str, list[str]] = {}
    for name, why in idle.items():
        if name in given:
            reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        yield f"{listed} {'has' if len(names) == 1 else 'have'} no effect: {why}"
