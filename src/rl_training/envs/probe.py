"""Examine an environment before it is used: its spaces, setups that run but do not learn, and random play."""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from itertools import islice
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces as gs

from rl_training.envs.engines import make_engine
from rl_training.envs.factory import EnvRecipe, device_kinds, make_env, make_unwrapped
from rl_training.envs.hidden_state import hidden_state
from rl_training.envs.inputs import read_masks
from rl_training.envs.spaces import Array, EnvSpaces, image_layout, leaf_spaces
from rl_training.envs.stepper import Differences, Stepper, join_names
from rl_training.envs.workers import register_missing
from rl_training.envs.wrappers import Env, layers
from rl_training.errors import MISSING, RESET, UserError, definition, first_line, user_line
from rl_training.play import Act, Played, close_all, closed_after, play

HIDDEN = "hidden state"
IMAGE_SIDE = 8  # pixels; a smaller array is more likely a board or a table
MOST_CHANNELS = 16
RAW_SIDE = 160  # of an unprocessed Atari screen
MASK_METHODS = ("action_masks", "action_mask", "valid_action_mask", "get_action_mask", "legal_actions")
PREPROCESSING = (
    "--set env_kwargs.frameskip=1 --set 'env_kwargs.wrappers.atari={}', "
    "in a file `env_kwargs: {frameskip: 1, wrappers: {atari: {}}}`"
)
MOST_SECONDS = 2.0  # of one comparison


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


def play_at_random(recipe: EnvRecipe, spaces: EnvSpaces, seed: int, steps: int) -> Iterator[Played]:
    """Steps at random in a new environment; every reset is seeded."""
    taken, opened = 0, [make_env(recipe)]
    played = play(opened, act_at_random(spaces, seed), lambda _: seed + taken, spaces.env_id)
    try:
        for step in islice(played, steps):
            taken += 1
            yield step
    finally:
        close_all(opened)  # the iterator may be dropped half-way, when no error can be reported


def act_at_random(spaces: EnvSpaces, seed: int) -> Act:
    """A function that gives `play` random actions."""
    rng = np.random.default_rng(seed)
    return lambda rows, infos, _: spaces.as_given(draw(spaces, rng, len(rows), read_masks(infos, spaces)))


def draw(spaces: EnvSpaces, rng: np.random.Generator, count: int, masks: Array | None) -> Array:
    """Random actions; without masks they are drawn as with masks, because recorded results depend on the draws."""
    return spaces.random_actions(rng, count, np.ones((count, spaces.action_dim), bool) if masks is None else masks)


class Player:
    """Plays an environment at random on request, in a worker process of `doctor`."""

    def __init__(self, registrations: Mapping[str, bytes], recipe: EnvRecipe, seed: int) -> None:
        register_missing(registrations)
        self.recipe, self.seed = recipe, seed

    def play(self, steps: int, seconds: float) -> int:
        """Play from the first reset; return the number of steps, which is smaller if the time runs out."""
        spaces = probe_spaces(self.recipe)
        taken, end = 0, time.perf_counter() + seconds
        for _ in play_at_random(self.recipe, spaces, self.seed, steps):
            taken += 1
            if time.perf_counter() > end:
                break
        return taken

    def close(self) -> None:
        """Nothing to close between calls."""


def reuses_arrays(recipe: EnvRecipe, spaces: EnvSpaces, seed: int) -> bool:
    """Whether a returned observation changes when the environment is reset."""
    env = make_env(recipe)
    with closed_after([env], spaces.env_id):
        last = next(play([env], act_at_random(spaces, seed), lambda _: seed, spaces.env_id)).next_obs
        kept = np.array(last)
        env.reset(seed=seed + 1)
        return not np.array_equal(last, kept)


def make_stepper(
    recipe: EnvRecipe, spaces: EnvSpaces, seed: int, num_envs: int, vectorization: str, worker_timeout: float = 300.0
) -> Stepper:
    """A stepper over new environments."""
    return Stepper(make_engine(recipe, spaces, num_envs, seed, vectorization, worker_timeout), spaces, num_envs)


def compare_restored(
    recipe: EnvRecipe, spaces: EnvSpaces, seed: int, before: int, after: int, vectorization: str = "sync",
    worker_timeout: float = 300.0,
) -> Differences:  # fmt: skip
    """Play `before` steps, restore a new copy from there, play `after` more in both, through every reset.

    Return the differences, which are empty if a resume is exact.
    """
    rng = np.random.default_rng(seed)
    begun = time.perf_counter()
    with ExitStack() as opened:
        given = recipe, spaces, seed, 1, vectorization, worker_timeout
        original, copy = (opened.enter_context(closing(make_stepper(*given))) for _ in range(2))
        original.start()
        for _ in range(before):
            original.step(draw(spaces, rng, 1, original.masks))
            if time.perf_counter() > begun + MOST_SECONDS:
                break
        stored = original.state_dict()
        copy.load_state_dict(stored)
        seen, hidden, unseen = copy.find_differences(stored)
        for _ in range(after):
            if seen or time.perf_counter() > begun + 2 * MOST_SECONDS:
                break
            actions = draw(spaces, rng, 1, original.masks)
            (one, _), (other, _) = original.step(actions), copy.step(actions)
            pairs: dict[str, Any] = {
                "observation": (one.obs, other.obs), "reward": (one.rewards, other.rewards),
                "end of an episode": ((one.terminated, one.truncated), (other.terminated, other.truncated)),
                "last observation": (one.final_obs, other.final_obs), "action mask": (one.masks, other.masks),
            }  # fmt: skip
            seen = [name for name, (a, b) in pairs.items() if not np.array_equal(a, b)]
    return Differences(seen, hidden, unseen)
