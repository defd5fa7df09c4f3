"""Examine an environment before it is used: its spaces, its first observation, and setups that run but do not learn."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces as gs

from rl_training.envs.episodes import join_names
from rl_training.envs.factory import make_env, make_unwrapped
from rl_training.envs.gym_spaces import image_layout, leaf_spaces
from rl_training.envs.hidden_state import hidden_state
from rl_training.envs.inputs import read_masks
from rl_training.envs.recipe import EnvRecipe, SimulatorSettings, device_kinds
from rl_training.envs.spaces import EnvSpaces
from rl_training.envs.wrappers import Env, layers
from rl_training.errors import MISSING, RESET, UserError, first_line, is_users_file, show_line, user_line
from rl_training.play import close_all

HIDDEN = "hidden state"
IMAGE_SIDE = 8  # pixels; a smaller array is more likely a board or a table
MOST_CHANNELS = 16
RAW_SIDE = 160  # of an unprocessed Atari screen
MASK_METHODS = ("action_masks", "action_mask", "valid_action_mask", "get_action_mask", "legal_actions")
PREPROCESSING = (
    "--set env_kwargs.frameskip=1 --set 'env_kwargs.wrappers.atari={}', "
    "in a file `env_kwargs: {frameskip: 1, wrappers: {atari: {}}}`"
)


class Problem(NamedTuple):
    """What is wrong, and what to do about it."""

    name: str
    detail: str
    fix: str

    def sentence(self) -> str:
        """The problem as one sentence, printed when a run starts."""
        return f"{self.detail}; {self.fix}"


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
        if recipe.simulator != SimulatorSettings() and not recipe.made:
            which = f"which {recipe.env_id} is not"
            raise UserError(f"env_kwargs.simulator is for a Simulator (docs/simulators.md), {which}.")
        if not recipe.made and (vectorization == "device" or device_kinds()):
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
        read_masks([info], spaces, check=True)
        problems = [] if recipe.made else list(find_problems(env, info))
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


def find_problems(env: gym.Env[Any, Any], info: Any) -> Iterator[Problem]:
    """Yield the known problems of an environment that was just reset."""
    space = env.observation_space
    if hasattr(env.unwrapped, "ale") and isinstance(space, gs.Box) and max(space.shape, default=0) >= RAW_SIDE:
        detail = f"raw Atari frames {list(space.shape)} learn badly: they show no motion, and every frame is a step"
        yield Problem("Atari frames", detail, f"use {PREPROCESSING}")
    for name, part in leaf_spaces(space):
        if is_float_image(part):
            what = f"the {f'part {name!r}' if name else 'observation'} {list(part.shape or ())} of {part.dtype}"
            fix = f"return uint8 from 0 to 255, with the space Box(0, 255, {part.shape}, np.uint8)"
            yield Problem("float image", f"{what} looks like an image, but a vector is read", fix)
    yield from find_unread_masks(env, info)
    if unseen := hidden_state(env).unseen:
        names = join_names(f"{name} ({what})" for name, what in unseen.items())
        detail = f"{names} cannot be compared after a resume, so a resume may not be exact"
        yield Problem(HIDDEN, detail, "let reset(seed=...) set it, so that nothing carries over between episodes")
    known = inspect.signature(env.unwrapped.reset).parameters  # wrappers give options
    if "options" not in known and not any(part.kind is part.VAR_KEYWORD for part in known.values()):
        detail = f"reset{definition(env.unwrapped, 'reset')} takes no options, so that wrappers and time limits fail"
        yield Problem("reset", detail, f"write {RESET}")


def find_unread_masks(env: gym.Env[Any, Any], info: Any) -> Iterator[Problem]:
    """Yield a problem if an environment provides action masks in a way that this package does not read."""
    keys = info if isinstance(info, Mapping) else {}
    if "action_mask" in keys or isinstance(env.action_space, gs.Box):
        return
    found = [f"info[{key!r}] is not read as a mask" for key in MASK_METHODS if key in keys]
    for layer in layers(env):
        names = (name for name in MASK_METHODS if callable(getattr(type(layer), name, None)))
        found += [f"{type(layer).__name__}.{name}(){definition(layer, name)} is not read" for name in names]
    if found:
        yield Problem("action masks", found[0], "put the mask into info['action_mask'] of what reset and step return")


def is_float_image(space: gs.Space[Any]) -> bool:
    """Whether it would be an image if it were uint8: height, width and a few channels."""
    if not isinstance(space, gs.Box) or space.dtype in (np.uint8, np.bool_) or len(space.shape) != 3:
        return False
    first, middle, last = space.shape
    sides = (first, middle) if last <= MOST_CHANNELS else (middle, last) if first <= MOST_CHANNELS else (0,)
    return min(sides) >= IMAGE_SIDE


def definition(env: Any, method: str) -> str:
    """Where the user's own class defines a method, such as ` (my_envs.py, line 12)`; empty for other classes."""
    code = getattr(inspect.unwrap(getattr(type(env), method, len)), "__code__", None)
    return show_line(code.co_filename, code.co_firstlineno) if code and is_users_file(code.co_filename) else ""
