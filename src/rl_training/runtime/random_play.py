"""Random play: legal actions drawn from a seeded generator, for checks that need no policy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from rl_training.envs.engines import make_engine
from rl_training.envs.factory import EnvRecipe, make_env, probe_spaces
from rl_training.envs.remote import register_missing
from rl_training.envs.spaces import Array, EnvSpaces, read_action_mask
from rl_training.envs.stepper import Stepper

MOST_SECONDS = 2.0  # of one comparison


def play(recipe: EnvRecipe, spaces: EnvSpaces, seed: int, steps: int) -> Iterator[tuple[Any, Any, Any, Any, Any]]:
    """Random play: (observation, reward, terminated, truncated, info) per step; every reset is seeded."""
    env, rng = make_env(recipe), np.random.default_rng(seed)
    try:
        _, info = env.reset(seed=seed)
        for number in range(steps):
            obs, reward, terminated, truncated, info = env.step(sample_action(spaces, rng, info))
            yield np.array(obs), reward, terminated, truncated, info
            if terminated or truncated:
                _, info = env.reset(seed=seed + number + 1)
    finally:
        with suppress(Exception, SystemExit):  # it may be dropped half-way, where nobody can be told
            env.close()


class Player:
    """Plays an environment at random on request: what a worker process does for `doctor`."""

    def __init__(self, registrations: Mapping[str, bytes], recipe: EnvRecipe, seed: int) -> None:
        register_missing(registrations)
        self.recipe, self.seed = recipe, seed

    def play(self, steps: int, seconds: float) -> int:
        """Play from the first reset; returns the number of steps, fewer than asked for when the time is up."""
        taken, end = 0, time.perf_counter() + seconds
        for _ in play(self.recipe, probe_spaces(self.recipe), self.seed, steps):
            taken += 1
            if time.perf_counter() > end:
                break
        return taken

    def close(self) -> None:
        """Nothing is open between calls."""


def sample_action(spaces: EnvSpaces, rng: np.random.Generator, info: dict[str, Any]) -> Any:
    """One random action of the environment's own kind, legal by its info."""
    masks = read_action_mask(info, spaces)[None] if spaces.has_action_mask else None
    action = spaces.map_actions(sample_actions(spaces, rng, 1, masks))[0]
    return action.item() if spaces.action_kind == "discrete" else action


def sample_actions(spaces: EnvSpaces, rng: np.random.Generator, count: int, masks: Array | None) -> Array:
    """Uniform random actions of a policy [count, ...] that keep to the masks."""
    if spaces.action_kind == "continuous":
        return rng.uniform(-1.0, 1.0, (count, *spaces.action_shape)).astype(np.float32)
    scores = rng.random((count, spaces.action_dim))
    if masks is not None:
        scores = np.where(masks, scores, -1.0)
    starts = np.cumsum([0, *spaces.action_sizes])
    columns = [scores[:, a:b].argmax(axis=1) for a, b in pairwise(starts)]
    return columns[0] if spaces.action_kind == "discrete" else np.stack(columns, axis=1)


def reuses_arrays(recipe: EnvRecipe, spaces: EnvSpaces, seed: int) -> bool:
    """Whether an observation that was given out changes when the environment is reset."""
    env = make_env(recipe)
    try:
        _, info = env.reset(seed=seed)
        last, *_ = env.step(sample_action(spaces, np.random.default_rng(seed), info))
        kept = np.array(last)
        env.reset(seed=seed + 1)
        return not np.array_equal(last, kept)
    finally:
        env.close()


def make_stepper(
    recipe: EnvRecipe, spaces: EnvSpaces, seed: int, num_envs: int, vectorization: str, worker_timeout: float = 300.0
) -> Stepper:
    """A stepper over new environments."""
    return Stepper(make_engine(recipe, spaces, num_envs, seed, vectorization, worker_timeout), spaces, num_envs)


def compare_restored(
    recipe: EnvRecipe, spaces: EnvSpaces, seed: int, before: int, after: int, vectorization: str = "sync",
    worker_timeout: float = 300.0,
) -> tuple[list[str], list[str]]:  # fmt: skip
    """Play `before` steps, restore a new copy from there, play `after` more in both, through every reset.

    Returns what a learner would see differ, and attributes of the environment that do; nothing: a resume is exact.
    """
    rng = np.random.default_rng(seed)
    begun = time.perf_counter()
    with ExitStack() as opened:
        makers = [partial(make_stepper, recipe, spaces, seed, 1, vectorization, worker_timeout)] * 2
        original, copy = (opened.enter_context(closing(make())) for make in makers)
        original.start()
        for _ in range(before):
            original.step(sample_actions(spaces, rng, 1, original.masks))
            if time.perf_counter() > begun + MOST_SECONDS:
                break
        stored = original.state_dict()
        copy.load_state_dict(stored)
        seen, hidden = copy.find_differences(stored)
        for _ in range(after):
            if seen or time.perf_counter() > begun + 2 * MOST_SECONDS:
                break
            actions = sample_actions(spaces, rng, 1, original.masks)
            (one, _), (other, _) = original.step(actions), copy.step(actions)
            pairs: dict[str, Any] = {
                "observation": (one.obs, other.obs), "reward": (one.rewards, other.rewards),
                "end of an episode": ((one.terminated, one.truncated), (other.terminated, other.truncated)),
                "last observation": (one.final_obs, other.final_obs), "action mask": (one.masks, other.masks),
            }  # fmt: skip
            seen = [name for name, (a, b) in pairs.items() if not np.array_equal(a, b)]
    return seen, hidden
