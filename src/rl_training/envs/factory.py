"""Make one environment with its wrappers, from an id, `module:Class` or a callable; import what a name stands for.

A name such as `module:Class` may come from a file, and a file must not run code. Importing a module runs it, so a
module that only a file names is not imported (`check_module`), and what it holds is used only if it is a class of the
wanted kind. A function is used only if the user named it (`named_by_user`).
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable
from typing import Any, cast

import gymnasium as gym

from rl_training.envs.recipe import EnvRecipe, device_kinds, is_provided, looks_like_entry_point, simulator_kinds
from rl_training.envs.wrappers import Env, layers, wrap
from rl_training.errors import UnknownKey, UserError, did_you_mean, first_line


def make_env(recipe: EnvRecipe, *, evaluation: bool = False, render_mode: str | None = None) -> Env:
    """Make one environment with its wrappers, for training or for evaluation."""
    env = make_unwrapped(recipe, "rgb_array" if recipe.wrappers.pixels else render_mode)
    try:
        return wrap(env, recipe.wrappers, evaluation=evaluation)
    except Exception as error:
        raise UserError(f"env_kwargs.wrappers do not fit {recipe.env_id}: {first_line(error)}.") from error


def make_unwrapped(recipe: EnvRecipe, render_mode: str | None = None) -> Env:
    """Make one environment without the wrappers of the config, except for its time limit."""
    if recipe.made:
        return cast(Env, recipe.made[0])  # there is but one simulator
    kwargs = dict(recipe.kwargs) | ({"render_mode": render_mode} if render_mode else {})
    maker = recipe.maker
    if maker is None and ":" in recipe.env_id and not recipe.may_import:
        check_module("env_id", recipe.env_id, "env")
    try:
        if maker is None and looks_like_entry_point(recipe.env_id):
            maker = import_entry_point("env_id", recipe.env_id, gym.Env, recipe.named_by_user, "--env ", "env")
        if maker is None:
            register_on_demand(recipe.env_id)
            spec: Any = copy.deepcopy(gym.registry.get(recipe.env_id, recipe.env_id))
            if not isinstance(spec, str):
                spec.order_enforce = False  # saves a wrapper call per step; this package calls reset before step anyway
            return gym.make(spec, recipe.max_episode_steps, disable_env_checker=True, **kwargs)
        env: Any = maker(**kwargs)
    except UserError:
        raise
    except (gym.error.NameNotFound, gym.error.NamespaceNotFound, gym.error.VersionNotFound):
        hint = did_you_mean(recipe.env_id, gym.registry)
        raise UserError(
            f"env_id {recipe.env_id!r} is not registered with Gymnasium; "
            f"{hint if hint.startswith('did') else 'no registered name is near.'} "
            "(your own: --env module:Class, or --import the module that registers it; in Python the class itself)"
        ) from None
    except (Exception, SystemExit) as error:
        raise explain(error, recipe) from error
    if isinstance(env, simulator_kinds()):
        from rl_training.envs.simulator import SimulatorView  # torch

        view = SimulatorView(env, recipe)
        recipe.made.append(view)
        return view
    limit = recipe.max_episode_steps
    if isinstance(env, device_kinds()):
        from rl_training.envs.device import OneEnvironment  # torch
        from rl_training.envs.device_checks import check_attributes

        check_attributes(env, recipe.env_id)
        limit, env = limit or env.max_episode_steps, OneEnvironment(env)
    if not isinstance(env, gym.Env):
        raise UserError(f"{recipe.env_id} made a {type(env).__name__}; it must make a gymnasium.Env.")
    return gym.wrappers.TimeLimit(env, limit) if limit else env


def explain(error: BaseException, recipe: EnvRecipe) -> UserError:
    """What is wrong, in the user's words, if the code of an environment raised while it was made."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if unknown and unknown[1] in recipe.kwargs:
        return UnknownKey("env_kwargs", unknown[1], f"{recipe.env_id} does not take it.")
    if missing := re.search(r"missing .*required .*argument.*: '(\w+)'", str(error)):
        how = f"give it in env_kwargs, such as --set env_kwargs.{missing[1]}=VALUE"
        return UserError(f"the environment {recipe.env_id} needs the argument {missing[1]!r}; {how}.")
    return UserError(f"the environment {recipe.env_id} cannot be made: {first_line(error)}.")


def episode_limit(env: Env) -> int | None:
    """Steps after which a wrapper or the emulator truncates an episode, or None."""
    limits = [layer._max_episode_steps for layer in layers(env) if isinstance(layer, gym.wrappers.TimeLimit)]
    if (emulator := getattr(env.unwrapped, "ale", None)) is not None:
        limits.append(emulator.getInt("max_num_frames_per_episode"))
    return min((limit for limit in limits if limit), default=None)


def register_on_demand(env_id: str) -> None:
    """Register Atari and MinAtar by importing their packages, which Gymnasium does not do by itself."""
    if env_id in gym.registry or not (env_id.startswith(("MinAtar/", "ALE/")) or "NoFrameskip" in env_id):
        return
    is_minatar = env_id.startswith("MinAtar/")
    extra, module = ("results", "rl_training.envs.minatar") if is_minatar else ("atari", "ale_py")
    try:
        importlib.import_module(module)
    except ImportError:
        raise UserError(f"{env_id} needs the extra {extra!r} (pip install 'rl-training[{extra}]').") from None


def check_module(field: str, value: str, argument: str | None = None) -> None:
    """Refuse `module:name` from a file if its module would have to be imported for it."""
    module = value.partition(":")[0]
    if not is_provided(module):
        raise UserError(
            f"{field} {value!r} comes from a file, and a file does not decide which modules are imported; if you trust "
            f"it, add --import {module} (in Python: import {module} first, or give {argument or field}={value!r})."
        )


def import_entry_point(
    field: str, value: str, kind: type, named_by_user: bool, option: str, argument: str | None = None
) -> Callable[..., Any]:
    """Import the object that `module:name` in a field names; if the user did not name it, only a class of that kind."""
    module_name, _, name = value.partition(":")
    hint = f"; a module is named without .py: {module_name[:-3]}:{name}" if module_name.endswith(".py") else ""
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{field} {value!r}: the module {module_name!r} cannot be imported ({error}){hint}.") from None
    kinds = (kind, *device_kinds(), *simulator_kinds()) if kind is gym.Env else (kind,)
    maker: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(maker):
        own = [one for one, held in vars(module).items() if isinstance(held, type) and issubclass(held, kinds)]
        noun = "environment" if kind is gym.Env else "network"
        near = did_you_mean(name, own) if own else f"it defines no {noun}."
        raise UserError(f"{field} {value!r}: {module_name} has no class or function {name!r}; {near}")
    if not named_by_user and not (isinstance(maker, type) and issubclass(maker, kinds)):
        wanted = "gymnasium.Env" if kind is gym.Env else "torch.nn.Module"
        raise UserError(
            f"{field} {value!r} comes from a file and is not a {wanted} class, so it is not called; if you trust "
            f"it, name it yourself: {option}{value} or --import {module_name}, in Python {argument or field}={value!r}."
        )
    return maker
