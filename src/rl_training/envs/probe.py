"""Examine an environment before it is used: its spaces, its first observation, and likely problems."""

from __future__ import annotations

import traceback
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces as gs

from rl_training.envs.action_masks import stack_masks
from rl_training.envs.factory import make_env, make_unwrapped
from rl_training.envs.gym_spaces import image_layout, leaf_spaces
from rl_training.envs.recipe import EnvRecipe
from rl_training.envs.setup_problems import Problem, definition, find_problems
from rl_training.envs.spaces import EnvSpaces
from rl_training.envs.user_env import Env, device_kinds
from rl_training.errors import MISSING, RESET, UserError, first_line, user_line
from rl_training.play import close_all


class Probe(NamedTuple):
    """The spaces of an environment, its known problems, and where the user defines its `step`."""

    spaces: EnvSpaces
    problems: list[Problem]
    step: str


def probe(recipe: EnvRecipe, vectorization: str = "auto") -> Probe:
    """Make the environment once, test its tensor functions if it has any, read its spaces, and close it."""
    options = recipe.wrappers
    normalize = options.normalize_observation
    if options.pixels or options.atari or options.frame_stack > 1:
        env = make_env(recipe)
    else:  # unwrapped, so that prediction reads raw observations (a dict stays a dict)
        env = make_unwrapped(recipe)
    try:
        check_spaces(env, recipe.env_id)
        if vectorization == "device" or device_kinds():
            from rl_training.envs.device_checks import check_used_functions  # torch

            check_used_functions(env, recipe, vectorization)
        observation, info = _first_reset(env, recipe.env_id)
        spaces = EnvSpaces.from_gym(
            recipe.env_id,
            env.observation_space,
            env.action_space,
            has_action_mask="action_mask" in info and not isinstance(env.action_space, gs.Box),
            normalize_observations=_has_measurements(env.observation_space) if normalize == "auto" else normalize,
            normalize_rewards=options.normalize_reward,
        )
        if spaces.has_action_mask:
            stack_masks([info], spaces)
        problems = list(find_problems(env, info))
        reset, step = (definition(env.unwrapped, method) for method in ("reset", "step"))
    finally:
        close_all([env])  # the run will report a failing close itself
    if spaces.normalize_observations and len(spaces.vector_columns) == 0:
        raise UserError(
            f"env_kwargs.wrappers.normalize_observation is for vectors; the images of {recipe.env_id} "
            "are scaled to [0, 1] anyway."
        )
    if isinstance(env.observation_space, gs.Box) and np.shape(observation) != env.observation_space.shape:
        raise UserError(
            f"{recipe.env_id} returned an observation of shape {np.shape(observation)}{reset}; "
            f"its observation space says {env.observation_space.shape}."
        )
    return Probe(spaces, problems, step)


def probe_spaces(recipe: EnvRecipe) -> EnvSpaces:
    """Make the environment once, read its spaces, and close it."""
    return probe(recipe).spaces


def check_spaces(env: Any, env_id: str) -> None:
    """Raise a UserError if an environment has no observation space or no action space."""
    for name in ("observation_space", "action_space"):
        if not isinstance(space := getattr(env, name, None), gs.Space):
            wanted = f"set self.{name} to a gymnasium space in __init__"
            raise UserError(f"the {name} of {env_id} is {space!r}; {wanted}.")


def _has_measurements(space: gs.Space[Any]) -> bool:
    """Whether a vector needs normalization: it is not one-hot and not within [0, 1]."""
    vectors = (part for _, part in leaf_spaces(space) if isinstance(part, gs.Box) and image_layout(part) is None)
    return any((part.low < 0).any() or (part.high > 1).any() for part in vectors)


def _first_reset(env: Env, env_id: str) -> tuple[Any, dict[str, Any]]:
    place = definition(env.unwrapped, "reset")
    try:
        given = env.reset(seed=0)
    except (Exception, SystemExit) as error:
        if missing := MISSING.search(str(error)):
            raise UserError(f"{env_id}: reset{place} takes no {missing[1]}; write {RESET}.") from error
        line = user_line(traceback.format_exception(error))
        raise UserError(f"the environment {env_id} fails in reset: {first_line(error)}{line}.") from error
    if not isinstance(given, tuple) or len(given) != 2:
        raise UserError(f"{env_id}: reset{place} returned only an observation; it must return (observation, info).")
    return given[0], given[1] or {}
