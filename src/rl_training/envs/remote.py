"""One environment in a worker process: it reads its action from shared memory and writes its results there."""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

from rl_training.envs.action_masks import read_action_mask, stack_masks
from rl_training.envs.episodes import ReplayableEpisodes
from rl_training.envs.spaces import Array, EnvSpaces

ALIGNMENT = 64


class SharedRows:
    """Arrays `[N, ...]` of N environments in unnamed shared memory, which disappears with the processes."""

    def __init__(self, spaces: EnvSpaces, count: int, descriptor: int | None = None) -> None:
        row, action = spaces.row_space, spaces.action_space
        layout: list[tuple[tuple[int, ...], Any]] = [
            *[(row.shape, row.dtype)] * 2,
            ((), np.int64) if spaces.action_kind == "discrete" else (action.shape or (), action.dtype),
            ((), np.float32), *[((), np.bool_)] * 2,
            *[((spaces.action_dim if spaces.has_action_mask else 0,), np.bool_)] * 2,
        ]  # fmt: skip
        arrays, self.descriptor = share_arrays([((count, *shape), dtype) for shape, dtype in layout], descriptor)
        self.obs, self.final_obs, self.actions, self.rewards, self.terminated, self.truncated = arrays[:6]
        self.masks, self.final_masks = arrays[6:]


def share_arrays(
    layout: Sequence[tuple[tuple[int, ...], Any]], descriptor: int | None = None
) -> tuple[list[Array], int]:
    """Arrays of these shapes and types in unnamed shared memory, and its descriptor; or open a given descriptor."""
    sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in layout]
    starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
    descriptor = _open_memory(starts[-1]) if descriptor is None else descriptor
    memory = mmap.mmap(descriptor, starts[-1])
    arrays = [np.ndarray(shape, dtype, memory, at) for (shape, dtype), at in zip(layout, starts[:-1], strict=True)]
    return arrays, descriptor


def _open_memory(size: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("rl_training")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


class RemoteEnvironment:
    """An environment in a worker process, with row `index`; only failures and states are sent as messages."""

    def __init__(
        self, make: Callable[[], ReplayableEpisodes], index: int, registrations: Mapping[str, bytes],
        spaces: Mapping[str, Any], count: int, descriptor: int,
    ) -> None:  # fmt: skip
        register_missing(registrations)
        self.spaces, self.index = EnvSpaces.from_dict(spaces), index
        self.rows = SharedRows(self.spaces, count, descriptor)
        os.close(descriptor)
        self.env = make()
        self._is_discrete = self.spaces.action_kind == "discrete"

    def reset(self) -> None:
        """Start the first episode."""
        self._keep(*self.env.reset())

    def step(self) -> None:
        """Take one step; at the end of an episode, keep the last observation and start the next episode."""
        rows, index = self.rows, self.index
        action = rows.actions[index]
        obs, rows.rewards[index], terminated, truncated, info = self.env.step(
            action.item() if self._is_discrete else action.copy()
        )
        rows.terminated[index], rows.truncated[index] = terminated, truncated
        if terminated or truncated:
            rows.final_obs[index] = self.spaces.read_row(obs)
            if self.spaces.has_action_mask:
                rows.final_masks[index] = read_action_mask(info, self.spaces)
            obs, info = self.env.reset()
        self._keep(obs, info)

    def _keep(self, obs: Any, info: Any) -> None:
        self.rows.obs[self.index] = self.spaces.read_row(obs)
        if self.spaces.has_action_mask:
            self.rows.masks[self.index] = stack_masks([info], self.spaces)[0]

    def episode_state(self) -> dict[str, Any]:
        """The state of the episode for a checkpoint."""
        return self.env.episode_state()

    def restore_episode(self, states: list[dict[str, Any]]) -> None:
        """Replay the episode."""
        self._keep(*self.env.restore_episode(states[self.index]))

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def pickle_registrations() -> dict[str, bytes]:
    """The environments that other code registered with Gymnasium, which a new interpreter does not know."""
    found = {}
    for name, spec in gym.registry.items():
        if str(spec.entry_point).startswith("gymnasium.envs."):
            continue
        with suppress(Exception):  # an environment that cannot be pickled is an error only if it is used
            found[name] = cloudpickle.dumps(spec)
    return found


def register_missing(registrations: Mapping[str, bytes]) -> None:
    """Register with Gymnasium what `pickle_registrations` found and this process does not have yet."""
    # a module that registers its environments when it is imported finds them there
    warnings.filterwarnings("ignore", ".*Overriding environment .* already in registry")
    for name, pickled in registrations.items():
        if name not in gym.registry:
            with suppress(Exception):
                gym.registry[name] = cloudpickle.loads(pickled)
