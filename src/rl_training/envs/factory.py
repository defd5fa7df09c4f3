"""Make one environment with its wrappers, from an id, `module:Class` or a callable."""

from __future__ import annotations

import copy
import re
from typing import Any

import gymnasium as gym

from rl_training.envs.entry_points import check_module, import_entry_point, looks_like_entry_point
from rl_training.envs.recipe import EnvRecipe
from rl_training.envs.user_env import Env, device_kinds
from rl_training.envs.wrappers import wrap
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
    if isinstance(env, device_kinds()):
        from rl_training.envs.device import OneEnvironment  # torch
        from rl_training.envs.device_checks import check_attributes

        check_attributes(env, recipe.env_id)
        limit = recipe.max_episode_steps or env.max_episode_steps
        return gym.wrappers.TimeLimit(OneEnvironment(env), limit) if limit else OneEnvironment(env)
    if not isinstance(env, gym.Env):
        raise UserError(f"{recipe.env_id} made a {type(env).__name__}; it must make a gymnasium.Env.")
    return gym.wrappers.TimeLimit(env, recipe.max_episode_steps) if recipe.max_episode_steps else env


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
    limits = []
    while isinstance(env, gym.Wrapper):
        limits += [env._max_episode_steps] if isinstance(env, gym.wrappers.TimeLimit) else []
        env = env.env
    if (emulator := getattr(env, "ale", None)) is not None:
        limits.append(emulator.getInt("max_num_frames_per_episode"))
    return min((limit for limit in limits if limit), default=None)


def register_on_demand(env_id: str) -> None:
    """Register Atari and MinAtar by importing their packages, which Gymnasium does not do by itself."""
    extra = "results" if env_id.startswith("MinAtar/") else "atari"
    if env_id in gym.registry or not (env_id.startswith(("MinAtar/", "ALE/")) or "NoFrameskip" in env_id):
        return
    try:
        if extra == "results":
            from rl_training.envs.minatar import register_games

            register_games()
        else:
            import ale_py

            gym.register_envs(ale_py)
    except ImportError:
        raise UserError(f"{env_id} needs the extra {extra!r} (pip install 'rl-training[{extra}]').") from None
