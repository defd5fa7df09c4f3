"""Goals inside observations: where a Dict observation has them, and what an environment pays for another goal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces as gs

from rl_training.envs.factory import EnvRecipe, make_env
from rl_training.envs.probe import play_at_random
from rl_training.envs.spaces import Array, EnvSpaces, image_layout, in_words
from rl_training.errors import EnvironmentFailure, UserError, first_line
from rl_training.play import close_all

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
ARGUMENTS = "(achieved_goal, desired_goal, info)"
TRIED = 8  # random steps, before a run, whose goals are compared with each other


class Goals:
    """The goals in encoded observations, and the environment's own functions of them.

    Rewards come from `compute_reward(achieved_goal, desired_goal, info)`, called with batches of goals [B, ...], and
    ends of episodes from `compute_terminated` with the same arguments, if there is one. A function that does not take
    batches is called row by row. Replay stores no infos, so one that reads `info` is refused. Both are called on an
    environment of their own.
    """

    def __init__(self, recipe: EnvRecipe, spaces: EnvSpaces, seed: int) -> None:
        self.env_id = spaces.env_id
        self.space = read_goal_space(recipe, spaces)
        self.achieved, self.desired = (find_columns(spaces, key) for key in (ACHIEVED, DESIRED))
        self._clip = recipe.wrappers.clip_range
        self.notes: list[str] = []
        self.env = make_env(recipe)
        try:
            self._try_out(recipe, spaces, seed)
        except BaseException:
            self.close()
            raise

    def _try_out(self, recipe: EnvRecipe, spaces: EnvSpaces, seed: int) -> None:
        """Find the functions, and compare them with a few random steps."""
        steps = list(play_at_random(recipe, spaces, seed, TRIED))
        rows = spaces.encode_rows([step.next_obs for step in steps])
        reached, asked = rows[:, self.achieved], rows[:, self.desired]
        first = np.repeat(np.arange(TRIED), 2 * TRIED)  # each of them with every goal, its own achieved one included
        pairs = reached[first], np.tile(np.concatenate([reached, asked]), (TRIED, 1))
        reward = self._find("compute_reward", pairs, float)
        if reward is None:
            raise refuse(f"{self.env_id} has no compute_reward{ARGUMENTS}, which gives the reward of another goal")
        self._reward, self._terminated = reward, self._find("compute_terminated", pairs, bool)
        self.recomputes_ends = self._terminated is not None
        paid = np.array([step.reward for step in steps], dtype=np.float32)
        told = self.judge(reached, asked)[0]
        if len(differ := np.flatnonzero(~np.isclose(paid, told, rtol=1e-4, atol=1e-4))):
            both = f"a step of {self.env_id} paid {paid[differ[0]]:.4g} and compute_reward says {told[differ[0]]:.4g}"
            self.notes.append(f"{both} for its goals: replayed steps with another goal have the latter kind of reward")

    def _find(self, name: str, pairs: tuple[Array, Array], kind: type) -> Callable[[Array, Array], Array] | None:
        """The environment's function for encoded goals [B, G], if it has one; `pairs` are tried."""
        try:
            function = self.env.get_wrapper_attr(name)
        except AttributeError:
            return None
        info = NoInfo(self.env_id, name)

        def in_one(achieved: Array, desired: Array) -> Array:
            return np.asarray(function(self.decode(achieved), self.decode(desired), info)).astype(kind)

        def by_row(achieved: Array, desired: Array) -> Array:
            goals = zip(self.decode(achieved), self.decode(desired), strict=True)
            return np.array([function(*pair, info) for pair in goals]).astype(kind)

        def constant(achieved: Array, desired: Array) -> Array:
            return np.full(len(achieved), in_one(achieved, desired))

        try:
            each = by_row(*pairs)
        except UserError:
            raise
        except Exception as error:
            raise EnvironmentFailure.of(self.env_id, f"failed in {name}{ARGUMENTS}: {first_line(error)}") from error
        if each.shape != (len(pairs[0]),):
            raise refuse(f"{name} of {self.env_id} returned an array of shape {each.shape[1:]} for one pair of goals")
        try:
            whole = in_one(*pairs)
        except Exception:  # it does not take batches
            whole = np.zeros(0)
        if whole.shape == each.shape and np.allclose(whole, each):
            return in_one
        if whole.shape == () and (each == whole).all():
            return constant
        self.notes.append(f"{name} of {self.env_id} takes no batches of goals, so it is called once for every row")
        return by_row

    def decode(self, encoded: Array) -> Array:
        """Encoded goals [B, G] as the environment gives them."""
        values, space = encoded, self.space
        if values.dtype == np.uint8:  # an observation with images
            values = np.ascontiguousarray(values).view(np.float32)
        if isinstance(space, gs.Discrete):
            chosen: Array = values.argmax(axis=1) + space.start
            return chosen
        return values.reshape(len(values), *(space.shape or ())).astype(space.dtype, copy=False)

    def judge(self, achieved: Array, desired: Array) -> tuple[Array, Array | None]:
        """Rewards [B] of reaching these encoded goals [B, G] when those are desired, and whether that ends the episode;
        None if the environment does not say."""
        rewards = self._reward(achieved, desired).astype(np.float32)
        if self._clip is not None:
            rewards = rewards.clip(*self._clip)
        return rewards, None if self._terminated is None else self._terminated(achieved, desired)

    def close(self) -> None:
        """Close the environment."""
        close_all([self.env])


class NoInfo(dict[Any, Any]):
    """The `info` of a replayed step, which is not stored: reading anything is refused."""

    def __init__(self, env_id: str, function: str) -> None:
        super().__init__()
        self._what = f"{function} of {env_id} reads info, which replay does not store; it may read the goals only"

    def _refuse(self, *_: Any) -> Any:
        raise refuse(self._what)

    __getitem__ = __contains__ = __iter__ = __len__ = get = keys = values = items = _refuse


def refuse(reason: str) -> UserError:
    """The error of a run with goals that cannot be replaced."""
    return UserError(f"her_ratio is above 0, but {reason}.")


def read_goal_space(recipe: EnvRecipe, spaces: EnvSpaces) -> gs.Space[Any]:
    """The space of both goals, or a UserError."""
    space = spaces.observation_space
    if recipe.made:
        raise refuse(f"{spaces.env_id} is a Simulator; goals are replaced for environments in Python only")
    if not isinstance(space, gs.Dict) or not {ACHIEVED, DESIRED} <= set(space.spaces):
        found = f"the observation space of {spaces.env_id} is {in_words(space)}"
        raise refuse(f"{found}; it must be a Dict with observation, {ACHIEVED} and {DESIRED}")
    goal, other = space[ACHIEVED], space[DESIRED]
    known = isinstance(goal, gs.Box | gs.MultiBinary | gs.Discrete) and image_layout(goal) is None
    if not known or not same_kind(goal, other):
        found = f"{ACHIEVED} of {spaces.env_id} is {in_words(goal)} and {DESIRED} {in_words(other)}"
        raise refuse(f"{found}; they must be of the same kind and shape: Box (no image), MultiBinary or Discrete")
    return goal


def same_kind(one: gs.Space[Any], other: gs.Space[Any]) -> bool:
    """Whether every value of one space is written as in the other; the bounds of a Box may differ."""
    if isinstance(one, gs.Box) and isinstance(other, gs.Box):
        return one.shape == other.shape and image_layout(other) is None
    return bool(one == other)


def find_columns(spaces: EnvSpaces, key: str) -> Array:
    """The columns of an encoded observation that hold this part of a Dict without images: floats, or their bytes."""
    start = 0
    for name, part in spaces.observation_space.spaces.items():  # type: ignore[attr-defined]
        if name == key:
            break
        start += int(gs.flatdim(part))
    flat = np.arange(start, start + int(gs.flatdim(spaces.observation_space[key])))  # type: ignore[index]
    if spaces.obs_kind == "vector":
        return flat
    places = len(spaces.pixel_columns) + 4 * np.searchsorted(spaces.vector_columns, flat)
    columns: Array = (places[:, None] + np.arange(4)).ravel()
    return columns
