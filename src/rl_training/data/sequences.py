"""`RecurrentReplayBuffer`: windows [B, L] of consecutive steps for recurrent learners and world models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rl_training.data.memory import Array, ArraySpec, rows_per_env, step_specs
from rl_training.data.rings import EnvRings
from rl_training.data.transfer import as_tensors
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

    kind = "sequence buffer"

    def __init__(
        self, capacity: int, num_envs: int = 1, *, obs_shape: Sequence[int], sequence_length: int = 64,
        folder: Any = None, device: Any = "cpu", on_device: bool = False, **layout: Any,
    ) -> None:  # fmt: skip
        """`layout`: obs_dtype, action_shape, continuous."""
        rows = rows_per_env(capacity, num_envs)
        lead = (rows, num_envs)
        specs = {**step_specs(lead, obs_shape, **layout), "is_first": ArraySpec(lead, np.dtype(bool))}
        if not 1 <= sequence_length <= rows:
            raise UserError(
                f"sequence_length is {sequence_length}, but buffer_capacity leaves {rows} rows for each environment."
            )
        self.sequence_length = sequence_length
        places: dict[str, Any] = {"folder": folder, "device": device, "on_device": on_device}
        super().__init__(capacity, num_envs, specs, obs_shape=obs_shape, **places)

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
        resets = np.zeros_like(done) if valid is None else ~valid
        live = np.flatnonzero(~resets)
        self._append(
            of[live], obs=arrivals[live], actions=actions[live], rewards=rewards[live], terminated=terminated[live],
            truncated=truncated[live], is_first=False,
        )  # fmt: skip
        self._begin(of, resets | done if final_obs is not None else resets, next_obs)

    def _meet(self, obs: Array, of: Array) -> None:
        """Begin an episode wherever `obs` is not the observation that arrived last (a start, or moved from outside);
        the one before it is truncated if it had not ended."""
        newest = self._rows_at(-1, of)
        begins = self._sizes[of] == 0
        begins[self._moved(newest, obs)] = True
        if begins.any():
            cut = newest[begins & (self._sizes[of] > 0)]
            self._write(cut, truncated=self.columns["truncated"][cut] | ~self.columns["terminated"][cut])
            self._begin(of, begins, np.asarray(obs))

    def _begin(self, of: Array, begins: Array, obs: Array) -> None:
        if begins.any():
            start = {"actions": 0, "rewards": 0.0, "terminated": False, "truncated": False, "is_first": True}
            self._append(of[begins], obs=obs[begins], **start)

    def _append(self, envs: Array, **values: Any) -> None:
        self._write(self._rows_at(0, envs), **values)
        self._advance(envs)

    def num_windows(self) -> int:
        """How many different windows can be sampled now."""
        return int(np.maximum(self._sizes - self.sequence_length + 1, 0).sum())

    def sample(
        self, batch_size: int, rng: np.random.Generator, sequence_length: int | None = None
    ) -> dict[str, Tensor]:
        """`batch_size` windows, uniformly: obs, actions, rewards, terminated, truncated, is_first, each [B, L, ...]."""
        length = sequence_length or self.sequence_length
        starts = np.maximum(self._sizes - length + 1, 0)
        if not starts.any():
            raise ValueError(f"no environment has {length} rows yet")
        envs, first = self._oldest(rng.integers(0, starts.sum(), batch_size), starts)
        rows = (first[:, None] + np.arange(length)) % self._slots * self.num_envs + envs[:, None]
        others = {name: array.take(rows, axis=0) for name, array in self.columns.items() if name != "obs"}
        if self.copy is None:
            return as_tensors({"obs": self.columns["obs"].take(rows, axis=0), **others}, self.device)
        return self.copy.gather({"obs": rows}, others)
