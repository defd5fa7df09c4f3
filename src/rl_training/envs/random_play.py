"""Random play: legal actions drawn from a seeded generator, for checks that need no policy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from itertools import islice
from typing import Any

import numpy as np

from rl_training.envs.engines import make_engine
from rl_training.envs.episodes import Differences
from rl_training.envs.factory import make_env
from rl_training.envs.inputs import read_masks
from rl_training.envs.probe import probe_spaces
from rl_training.envs.recipe import EnvRecipe
from rl_training.envs.spaces import Array, EnvSpaces
from rl_training.envs.stepper import Stepper
from rl_training.envs.workers import register_missing
from rl_training.play import Act, Played, close_all, closed_after, play

MOST_SECONDS = 2.0  # of one comparison


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
