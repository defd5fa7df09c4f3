"""`rl-training list` shows algorithms and presets; `rl-training config` shows a resolved config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rl_training.cli.options import (
    AlgoOption,
    ConfigOption,
    EnvOption,
    ImportOption,
    PresetArgument,
    SetOption,
    one_config,
    option,
)
from rl_training.cli.screen import make_console
from rl_training.errors import counted

LIST_WIDTH = 80  # where there is no terminal


def list_algorithms() -> None:
    """Show every algorithm, and every preset with its result in recorded runs."""
    from rl_training.experiment.registry import list_algorithm_specs

    specs = list_algorithm_specs()
    every = max((spec.action_kinds for spec in specs), key=len)
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", style="bold cyan", no_wrap=True)
    for name in ("year", "actions", "images", "what it is"):
        table.add_column(name, max_width=10 if name == "actions" else None)
    for spec in specs:
        actions = "any" if set(spec.action_kinds) == set(every) else ", ".join(spec.action_kinds)
        images = "yes" if "image" in spec.observation_kinds else "no"
        table.add_row(spec.name, str(spec.year), actions, images, spec.scope.partition(";")[0].rstrip("."))
    console = make_console()
    width = console.width if console.is_terminal else LIST_WIDTH
    console.print(table, width=width)
    console.print(f"any: {', '.join(every)}", style="dim")
    console.print(table_of_presets(), width=width)
    console.print("reached: median return over seeds in recorded runs (docs/results.md)", style="dim")


def table_of_presets() -> Table:
    """Every packaged preset and its result."""
    from rl_training.config.train_config import list_presets, read_reached

    reached = read_reached()
    table = Table(header_style="bold", box=SIMPLE_HEAD)
    table.add_column("preset", style="bold cyan", no_wrap=True)
    table.add_column("reached", no_wrap=True)
    for name in list_presets():
        table.add_row(name, describe_score(reached.get(name)))
    return table


def describe_score(score: Mapping[str, float] | None) -> str:
    """The result of a preset, in words."""
    if score is None:
        return "untrained"
    return f"{score['score']:,g} in {score['steps']:,} steps ({counted(int(score['seeds']), 'seed')})"


def show_config(
    preset: PresetArgument = None,
    config: ConfigOption = None,
    algo: AlgoOption = None,
    env: EnvOption = None,
    settings: SetOption = None,
    modules: ImportOption = None,
    schema: Annotated[bool, option("Print the JSON schema; --algo adds its hyper-parameters.", "--schema")] = False,
    presets: Annotated[bool, option("List the packaged presets.", "--list")] = False,
) -> None:
    """Print a config as YAML with every default filled in; nothing in it is called."""
    from rl_training.config.train_config import dump_yaml, list_presets

    config = one_config(preset, config)
    if presets:
        typer.echo("\n".join(list_presets()))
        return
    if schema:
        typer.echo(json.dumps(config_schema(_algorithm_of(config, algo)), indent=2))
        return
    from rl_training.cli.overrides import build_config

    typer.echo(dump_yaml(resolve_config(build_config(config, algo, env, settings, modules))), nl=False)


def _algorithm_of(config: str | None, algo: str | None) -> str | None:
    from rl_training.config.train_config import load_config

    return load_config(config).algo if config is not None else algo


def resolve_config(config: Any) -> dict[str, Any]:
    """The config checked against its algorithm and resolved as far as possible without an environment."""
    from rl_training.config.choices import resolve
    from rl_training.config.params import read_params
    from rl_training.config.spec import get_algorithm_spec
    from rl_training.envs.recipe import read_recipe

    params = read_params(get_algorithm_spec(config.algo).params, config.algo_kwargs)
    recipe = read_recipe(config.env_id, config.env_kwargs)
    return resolve(config, params, recipe).model_dump(mode="json")


def config_schema(algo: str | None) -> dict[str, Any]:
    """The JSON schema of a config file; for one algorithm also of its hyper-parameters under `algo_kwargs`."""
    from rl_training.config.train_config import TrainConfig
    from rl_training.envs.wrappers import WrapperOptions
    from rl_training.experiment.registry import get_algorithm_spec, list_algorithm_specs

    schema = TrainConfig.model_json_schema()
    parts = schema["properties"]
    parts["algo"]["enum"] = [spec.name for spec in list_algorithm_specs()] if algo is None else [algo]
    wrappers = WrapperOptions.model_json_schema()
    definitions = wrappers.pop("$defs", {})
    limit = {"type": "integer", "minimum": 1, "description": "Steps after which an episode is truncated."}
    parts["env_kwargs"]["properties"] = {"max_episode_steps": limit, "wrappers": wrappers}
    if algo is not None:
        hyper = _hyper_parameter_schema(get_algorithm_spec(algo).params, algo)
        definitions |= hyper.pop("$defs", {})
        parts["algo_kwargs"] = hyper | {"description": parts["algo_kwargs"]["description"]}
    return schema | {"$defs": definitions | schema.get("$defs", {})}


def _hyper_parameter_schema(params: Any, algo: str) -> dict[str, Any]:
    """The schema of the hyper-parameters, with their schedules under the names that a config uses."""
    from rl_training.config.settings import hyper_parameters

    schema: dict[str, Any] = params.model_json_schema()
    fields = schema["properties"]
    fields.pop("schedules", None)
    for name in hyper_parameters(algo):
        if name not in fields:
            fields[name] = {"$ref": "#/$defs/Schedule"}
    return schema
