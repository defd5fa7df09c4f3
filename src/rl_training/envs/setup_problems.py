"""Setups that run but do not learn in practice: how to recognize them, and what to change."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces as gs

from rl_training.envs.episodes import join_names
from rl_training.envs.gym_spaces import leaf_spaces
from rl_training.envs.hidden_state import hidden_state
from rl_training.errors import RESET, is_users_file, show_line

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
    if not takes_options(env.unwrapped.reset):
        detail = f"reset{definition(env.unwrapped, 'reset')} takes no options, so that wrappers and time limits fail"
        yield Problem("reset", detail, f"write {RESET}")


def takes_options(reset: Callable[..., Any]) -> bool:
    """Whether a `reset` takes `options`, as Gymnasium's wrappers give them."""
    known = inspect.signature(reset).parameters
    return "options" in known or any(part.kind is part.VAR_KEYWORD for part in known.values())


def find_unread_masks(env: gym.Env[Any, Any], info: Any) -> Iterator[Problem]:
    """Yield a problem if an environment provides action masks in a way that this package does not read."""
    keys = info if isinstance(info, Mapping) else {}
    if "action_mask" in keys or isinstance(env.action_space, gs.Box):
        return
    fix = "put the mask into info['action_mask'] of what reset and step return"
    for key in MASK_METHODS:
        if key in keys:
            yield Problem("action masks", f"info[{key!r}] is not read as a mask", fix)
            return
    layer: Any = env
    while layer is not None:
        for name in MASK_METHODS:
            if callable(getattr(type(layer), name, None)):
                detail = f"{type(layer).__name__}.{name}(){definition(layer, name)} is not read"
                yield Problem("action masks", detail, fix)
                return
        layer = layer.env if isinstance(layer, gym.Wrapper) else None


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
