"""`RecurrentReplayBuffer`: windows [B, L] of consecutive steps for recurrent learners and world models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.data.memory import Array, ArraySpec, as_tensors, check_same_layout, rows_per_env, step_specs
from rl_training.data.rings import EnvRings
from rl_training.errors import UserError

CHANGES_BUFFERS = True  # an error in here may leave a buffer half changed (run/interruption.py)


class RecurrentReplayBuffer(EnvRings):
    """The newest rows of `num_envs` environments, one ring each, sampled as windows of `sequence_length` rows.

    A row is an ARRIVAL: `obs[t]`, the action that LED there (`actions[t]`, taken at `obs[t - 1]`), the reward received
    on arriving, and whether `obs[t]` is terminal or the last one before a time limit. An episode of T steps is T + 1
    rows: its first row has `is_first` true, reward 0 and action 0 (not a real action: a learner zeroes state and
    action there), its last one is the true final observation. So h_t = f(h_{t-1}, z_{t-1}, actions[t]) and the reward
    and continue heads at t predict `rewards[t]` and `1 - terminated[t]`: nothing has to be shifted.

    Windows may start inside an episode and may run across its end (`is_first` marks the next one's start), but never
    across the ring's write position. `capacity` counts rows.
    """

    def __init__(
        self, capacity: int, num_envs: int = 1, *, obs_shape: Sequence[int], sequence_length: int = 64,
        folder: str | Path | None = None, device: str | torch.device = "cpu", on_device: bool = False, **layout: Any,
    ) -> None:  # fmt: skip
        """`layout`: obs_dtype, action_shape, continuous. `on_device` as in `ReplayBuffer`."""
        rows = rows_per_env(capacity, num_envs)
        lead = (rows, num_envs)
        specs = {**step_specs(lead, obs_shape, **layout), "is_first": ArraySpec(lead, np.dtype(bool))}
        if not 1 <= sequence_length <= rows:
            raise UserError(
                f"sequence_length is {sequence_length}, but buffer_capacity leaves {rows} rows for each environment."
            )
        self.sequence_length, self.device = sequence_length, torch.device(device)
        copy_to = self.device if on_device else None
        super().__init__(capacity, num_envs, specs, folder, "sequence buffer", copy_to=copy_to)
        self._flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in self._arrays.items()}

    def add(
        self, obs: Array, actions: Array, rewards: Array, terminated: Array, truncated: Array, next_obs: Array, *,
        final_obs: Array | None = None, valid: Array | None = None, envs: Array | None = None,
    ) -> None:  # fmt: skip
        """Store one step of N environments, everything [N, ...], with the arguments of `ReplayBuffer.add`."""
        of = self._env if envs is None else envs
        self._meet(obs, of)
        done = np.logical_or(terminated, truncated)
        arrivals = next_obs
        if final_obs is not None and done.any():
            arrivals = np.where(done.reshape(-1, *[1] * (next_obs.ndim - 1)), final_obs, next_obs)
        live = np.arange(len(of)) if valid is None else np.flatnonzero(valid)
        self._append(
            of[live], obs=arrivals[live], actions=actions[live], rewards=rewards[live], terminated=terminated[live],
            truncated=truncated[live], is_first=False,
        )  # fmt: skip
        resets = np.zeros_like(done) if valid is None else ~valid
        self._begin(of, np.flatnonzero(resets | done if final_obs is not None else resets), next_obs)

    def _meet(self, obs: Array, of: Array) -> None:
        """Begin an episode wherever `obs` is not the observation that arrived last (a start, or moved from outside)."""
        stored = self._flat["obs"]
        newest = stored[(self._heads[of] - 1) % self.rows_per_env * self.num_envs + of]
        given = np.asarray(obs).astype(stored.dtype, copy=False)
        if self._sizes[of].all() and newest.tobytes() == given.tobytes():
            return
        moved = np.flatnonzero((newest != given).reshape(len(of), -1).any(axis=1) | (self._sizes[of] == 0))
        self._cut(of[moved])
        self._begin(of, moved, given)

    def _cut(self, envs: Array) -> None:
        """Mark an episode as truncated if it had not ended when another one's first row follows."""
        envs = envs[self._sizes[envs] > 0]
        rows = (self._heads[envs] - 1) % self.rows_per_env * self.num_envs + envs
        self._flat["truncated"][rows] |= ~self._flat["terminated"][rows]

    def _begin(self, of: Array, rows: Array, obs: Array) -> None:
        if len(rows):
            start = {"actions": 0, "rewards": 0.0, "terminated": False, "truncated": False, "is_first": True}
            self._append(of[rows], obs=obs[rows], **start)

    def _append(self, envs: Array, **values: Any) -> None:
        rows = self._heads[envs] * self.num_envs + envs
        for name, value in values.items():
            self._flat[name][rows] = value
        if self.copy is not None:
            self.copy.follow(rows)
        self._heads[envs] = (self._heads[envs] + 1) % self.rows_per_env
        self._sizes[envs] = np.minimum(self._sizes[envs] + 1, self.rows_per_env)

    def num_windows(self) -> int:
        """How many different windows can be sampled now."""
        return int(np.maximum(self._sizes - self.sequence_length + 1, 0).sum())

    def sample(
        self, batch_size: int, rng: np.random.Generator, sequence_length: int | None = None
    ) -> dict[str, Tensor]:
        """`batch_size` windows, uniformly: obs, actions, rewards, terminated, truncated, is_first, each [B, L, ...]."""
        length = sequence_length or self.sequence_length
        starts = np.maximum(self._sizes - length + 1, 0)
        bounds = np.cumsum(starts)
        if not bounds[-1]:
            raise ValueError(f"no environment has {length} rows yet")
        ranks = rng.integers(0, bounds[-1], batch_size)
        envs = bounds.searchsorted(ranks, side="right")
        first = self._heads[envs] - self._sizes[envs] + ranks - (bounds - starts)[envs]
        rows = (first[:, None] + np.arange(length)) % self.rows_per_env * self.num_envs + envs[:, None]
        if self.copy is None:
            return as_tensors({name: array.take(rows, axis=0) for name, array in self._flat.items()}, self.device)
        others = {name: array.take(rows, axis=0) for name, array in self._flat.items() if name != "obs"}
        return self.copy.gather({"obs": rows}, others)

    def _layout(self) -> dict[str, Any]:
        obs, actions = self._flat["obs"], self._flat["actions"]
        return {
            "capacity": self.capacity, "num_envs": self.num_envs, "obs_shape": list(obs.shape[1:]),
            "obs_dtype": str(obs.dtype), "action_shape": list(actions.shape[1:]), "action_dtype": str(actions.dtype),
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Everything, as views of the filled part: write them before the next `add`."""
        return {"layout": self._layout(), **self._filled_state(int(self._sizes.max()))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken; a state of another layout is refused."""
        check_same_layout(state["layout"], self._layout(), "sequence buffer")
        self._restore(state)
