"""Transitions made by acting at random in an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import numpy as np

from rl_training.data.datasets import REQUIRED, TransitionDataset
from rl_training.errors import UserError, first_line
from rl_training.play import closed_after, play


def open_env(env_id: str, env_kwargs: Mapping[str, Any] | None = None) -> Any:
    """One Gymnasium environment, or a `UserError` that says why not."""
    import gymnasium

    try:
        return gymnasium.make(env_id, **(env_kwargs or {}))
    except Exception as error:  # an id or arguments from a file can fail in any way
        raise UserError(f"{env_id} cannot be made: {first_line(error)}.") from None


def make_random_dataset(
    env_id: str, num_steps: int, seed: int, env_kwargs: Mapping[str, Any] | None = None,
    make_env: Callable[[], Any] | None = None,
) -> TransitionDataset:  # fmt: skip
    """`num_steps` of uniformly random legal actions; the same seed makes the same data."""
    env = open_env(env_id, env_kwargs) if make_env is None else make_env()
    with closed_after([env], env_id):
        env.action_space.seed(seed)
        steps = play(
            [env], lambda _, infos, __: [_random_action(env.action_space, infos[0], env_id)],
            lambda episode: None if episode else seed, env_id,
        )  # fmt: skip
        rows = [
            (_encode(env, obs), np.array(action), reward, _encode(env, next_obs), terminated, truncated)
            for obs, action, reward, next_obs, terminated, truncated, *_ in islice(steps, num_steps)
        ]
    arrays = {name: np.stack(column) for name, column in zip(REQUIRED, zip(*rows, strict=True), strict=True)}
    return TransitionDataset.from_arrays(arrays, env_id, env_id=env_id, policy="random", seed=seed)


def _random_action(space: Any, info: Any, env_id: str) -> Any:
    """An action drawn uniformly from those that the mask allows; the mask has any dtype, whole or in parts."""
    from gymnasium import spaces

    mask = info.get("action_mask") if isinstance(info, Mapping) else None
    if mask is None or isinstance(space, spaces.Box):
        return space.sample()
    if isinstance(space, spaces.Discrete):
        sizes: Any = [space.n]
    else:
        sizes = np.ravel(space.nvec) if isinstance(space, spaces.MultiDiscrete) else [2] * int(np.prod(space.shape))
    flat = np.concatenate([np.ravel(part) for part in mask]) if isinstance(mask, list | tuple) else np.ravel(mask)
    if flat.size != sum(sizes):
        raise UserError(f"info['action_mask'] of {env_id} has {flat.size} entries; {space} needs {sum(sizes)}.")
    legal = [np.flatnonzero(part) for part in np.split(flat, np.cumsum(sizes)[:-1])]
    if not all(part.size for part in legal):
        raise UserError(f"info['action_mask'] of {env_id} forbids every action; one at least must be legal.")
    drawn = np.array([space.np_random.choice(part) for part in legal])  # as Gymnasium draws from an int8 mask
    if isinstance(space, spaces.Discrete):
        return space.start + drawn[0]
    start = space.start if isinstance(space, spaces.MultiDiscrete) else 0
    return (drawn.reshape(space.shape) + start).astype(space.dtype)


def _encode(env: Any, obs: Any) -> Any:
    """A copy of a Box observation, any other as Gymnasium flattens it."""
    from gymnasium import spaces

    space = env.observation_space
    return np.array(obs if isinstance(space, spaces.Box) else spaces.flatten(space, obs))
