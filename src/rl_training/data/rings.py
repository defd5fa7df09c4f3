"""One preallocated ring per environment: `EnvRings`, its parts, and `RecurrentReplayBuffer`, which samples windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rl_training.data.memory import (
    Array,
    ArraySpec,
    DeviceCopy,
    MappedFolder,
    allocate,
    as_tensors,
    check_same_layout,
    format_bytes,
    rows_per_env,
    step_specs,
)  # fmt: skip
from rl_training.errors import UserError

CHANGES_BUFFERS = True  # an error in here may leave a buffer half changed (run/interruption.py)


class EnvRings:
    """The newest rows of `num_envs` environments in shared arrays `[slots, num_envs, ...]`.

    In `columns` they are flat: a row's index is `slot * num_envs + env`. `_heads` are the slots to write next, and the
    `_sizes` rows before them can be sampled. With `on_device`, observations are in the device's memory too, and those
    of a batch are gathered there.
    """

    kind: ClassVar[str]  # in messages

    def __init__(
        self, capacity: int, num_envs: int, specs: Mapping[str, ArraySpec], *, obs_shape: Sequence[int], first: int = 0,
        folder: str | Path | None = None, device: str | torch.device = "cpu", on_device: bool = False,
    ) -> None:  # fmt: skip
        self.rows_per_env, self.num_envs = rows_per_env(capacity, num_envs), num_envs
        self.capacity = self.rows_per_env * num_envs  # rows held when full
        self.obs_shape, self.device = tuple(obs_shape), torch.device(device)
        self.folder = None if folder is None else MappedFolder(folder)
        self._arrays = allocate(specs, self.folder, f"a {self.kind} of {capacity} steps")
        self.columns = {name: array.reshape(-1, *array.shape[2:]) for name, array in self._arrays.items()}
        self.copy = DeviceCopy(self.columns["obs"], self.device) if on_device else None
        self._slots = len(self._arrays["rewards"])
        self._length = self._slots * num_envs
        self._env = np.arange(num_envs)
        self._heads = np.full(num_envs, first, dtype=np.int64)
        self._sizes = np.zeros(num_envs, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._sizes.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays as they are now."""
        return sum(array.nbytes for array in self._arrays.values())

    def describe_size(self) -> str:
        """`7.19 GB`, and where, if not in the host's memory only."""
        copied = "" if self.copy is None else f", observations also in the memory of {self.copy.tensor.device}"
        reserved = "" if self.folder is None else f" reserved in {self.folder.path}"
        return f"{format_bytes(self.nbytes)}{reserved}{copied}"

    def close(self) -> None:
        """Remove the mapped files, if there are any; the arrays stay readable."""
        if self.folder is not None:
            self.folder.close()

    # rows -----------------------------------------------------------------------------------------------------------

    def _rows_at(self, offset: int, envs: Array) -> Array:
        """The rows `offset` slots from the heads of these environments."""
        rows: Array = (self._heads[envs] + offset) % self._slots * self.num_envs + envs
        return rows

    def _oldest(self, ranks: Array, counts: Array) -> tuple[Array, Array]:
        """Environments and slots (of any number of turns) of ranks below `counts.sum()`, if each environment has
        `counts` [N] rows, from its oldest one on, and the environments follow each other."""
        ends = counts.cumsum()
        envs = ends.searchsorted(ranks, side="right")
        return envs, (self._heads - self._sizes - ends + counts)[envs] + ranks

    def _moved(self, rows: Array, obs: Array) -> Array:
        """The indices of those of these observations [N, ...] that are not the ones stored at `rows` [N]."""
        stored = self.columns["obs"][rows]
        obs = np.asarray(obs).astype(stored.dtype, copy=False)
        if stored.tobytes() == obs.tobytes():
            return rows[:0]
        return np.flatnonzero((stored != obs).reshape(len(rows), -1).any(axis=1))

    def _write(self, rows: Array, **values: Any) -> None:
        for name, value in values.items():
            self.columns[name][rows] = value
        if self.copy is not None and "obs" in values:
            self.copy.follow(rows)

    def _advance(self, envs: Array) -> None:
        self._heads[envs] = (self._heads[envs] + 1) % self._slots
        self._sizes[envs] = np.minimum(self._sizes[envs] + 1, self.rows_per_env)

    # resuming -------------------------------------------------------------------------------------------------------

    def _layout(self) -> dict[str, Any]:
        return {
            "capacity": self.capacity, "num_envs": self.num_envs, "obs_shape": list(self.obs_shape),
            "obs_dtype": str(self.columns["obs"].dtype), "action_shape": list(self.columns["actions"].shape[1:]),
            "action_dtype": str(self.columns["actions"].dtype),
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Everything, as views of the filled part: write them before the next `add`."""
        current = self._slots > self.rows_per_env  # the slot at the head holds an observation
        filled = self._slots if (self._sizes == self.rows_per_env).any() else int(self._heads.max()) + current
        arrays = {name: array[:filled] for name, array in self._arrays.items()}
        return {"layout": self._layout(), "arrays": arrays, "heads": self._heads.copy(), "sizes": self._sizes.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken; a state of another layout is refused."""
        check_same_layout(state["layout"], self._layout(), self.kind)
        for name, array in self._arrays.items():
            array[: len(state["arrays"][name])] = state["arrays"][name]
        self._heads[:], self._sizes[:] = state["heads"], state["sizes"]
        if self.copy is not None:
            self.copy.reload(len(state["arrays"]["obs"]) * self.num_envs)


class FinalObservations:
    """A pool with one slot per episode end still in the ring; it starts small, grows by half, and reuses free slots."""

    def __init__(self, obs: ArraySpec, mask_size: int, folder: MappedFolder | None, capacity: int) -> None:
        self._folder, self._what = folder, f"a replay buffer of {capacity} steps"
        self._free: list[int] = []
        self._used = 0  # slots that were ever given out
        self.obs, self.masks = np.empty((0, *obs.shape[2:]), obs.dtype), np.empty((0, mask_size), bool)
        self._grow(max(16, capacity // 256))

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return self.obs.nbytes + self.masks.nbytes

    def put(self, obs: Array, masks: Array | None) -> Array:
        """Store observations [K, ...] and the legal actions there [K, A] (None: all legal); returns their slots [K]."""
        reused = [self._free.pop() for _ in range(min(len(obs), len(self._free)))]
        end = self._used + len(obs) - len(reused)
        slots = np.array([*reused, *range(self._used, end)], dtype=np.int64)
        self._make_room(end)
        self.obs[slots], self.masks[slots] = obs, True if masks is None else masks
        return slots

    def free(self, slots: Array) -> None:
        """Release slots whose rows have left the ring."""
        self._free.extend(slots.tolist())

    def _make_room(self, used: int) -> None:
        if used > len(self.obs):
            self._grow(max(used, len(self.obs) + len(self.obs) // 2))
        self._used = used

    def _grow(self, count: int) -> None:
        old, name = self.obs, f"finals_{count}"
        self.obs = allocate({name: ArraySpec((count, *old.shape[1:]), old.dtype)}, self._folder, self._what)[name]
        self.obs[: len(old)] = old
        self.masks = np.concatenate([self.masks, np.ones((count - len(old), self.masks.shape[1]), dtype=bool)])
        if self._folder is not None and len(old):
            self._folder.remove(f"finals_{len(old)}")

    def state_dict(self) -> dict[str, Any]:
        """The used part, as views."""
        masks = self.masks[: self._used] if self.masks.shape[1] else None
        return {"obs": self.obs[: self._used], "masks": masks, "free": np.array(self._free, dtype=np.int64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._make_room(len(state["obs"]))
        self.obs[: self._used] = state["obs"]
        if state["masks"] is not None:
            self.masks[: self._used] = state["masks"]
        self._free = [int(slot) for slot in state["free"]]


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
        mask_size: int = 0, folder: Any = None, device: Any = "cpu", on_device: bool = False, **layout: Any,
    ) -> None:  # fmt: skip
        """`layout`: obs_dtype, action_shape, continuous. With a `mask_size`, rows have `masks` of legal actions."""
        rows = rows_per_env(capacity, num_envs)
        lead = (rows, num_envs)
        specs = {**step_specs(lead, obs_shape, **layout), "is_first": ArraySpec(lead, np.dtype(bool))}
        if mask_size:
            specs["masks"] = ArraySpec((*lead, mask_size), np.dtype(bool))
        if not 1 <= sequence_length <= rows:
            raise UserError(
                f"sequence_length is {sequence_length}, but buffer_capacity leaves {rows} rows for each environment."
            )
        self.sequence_length = sequence_length
        places: dict[str, Any] = {"folder": folder, "device": device, "on_device": on_device}
        super().__init__(capacity, num_envs, specs, obs_shape=obs_shape, **places)

    def add(
        self, obs: Array, actions: Array, rewards: Array, terminated: Array, truncated: Array, next_obs: Array, *,
        final_obs: Array | None = None, valid: Array | None = None, masks: Array | None = None,
        next_masks: Array | None = None, final_masks: Array | None = None, envs: Array | None = None, **more: Array,
    ) -> None:  # fmt: skip
        """Store one step of N environments, everything [N, ...], with the arguments of `ReplayBuffer.add`.

        `more` goes to `_append` with the rows that arrive.
        """
        of = self._env if envs is None else envs
        self._meet(of, self._shown(obs, masks))
        done = np.logical_or(terminated, truncated)
        more |= self._shown(_arrivals(next_obs, final_obs, done), _arrivals(next_masks, final_masks, done))
        more |= {"actions": actions, "rewards": rewards, "terminated": terminated, "truncated": truncated}
        resets = np.zeros_like(done) if valid is None else ~valid
        live = np.flatnonzero(~resets)
        self._append(of[live], is_first=False, **{name: array[live] for name, array in more.items()})
        self._begin(of, resets if final_obs is None else resets | done, self._shown(next_obs, next_masks))

    def _shown(self, obs: Array, masks: Array | None) -> dict[str, Array]:
        """The columns of an observation."""
        if "masks" not in self.columns:
            return {"obs": obs}
        size = self.columns["masks"].shape[1]
        return {"obs": obs, "masks": np.ones((len(obs), size), bool) if masks is None else masks}

    def _meet(self, of: Array, shown: Mapping[str, Array]) -> None:
        """Begin an episode wherever the observation is not the one that arrived last (a start, or moved from outside);
        the one before it is truncated if it had not ended."""
        newest = self._rows_at(-1, of)
        begins = self._sizes[of] == 0
        begins[self._moved(newest, shown["obs"])] = True
        if begins.any():
            cut = newest[begins & (self._sizes[of] > 0)]
            self._write(cut, truncated=self.columns["truncated"][cut] | ~self.columns["terminated"][cut])
            self._begin(of, begins, shown)

    def _begin(self, of: Array, begins: Array, shown: Mapping[str, Array]) -> None:
        if begins.any():
            start = {"actions": 0, "rewards": 0.0, "terminated": False, "truncated": False, "is_first": True}
            self._append(of[begins], **{name: np.asarray(array)[begins] for name, array in shown.items()}, **start)

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


def _arrivals(following: Any, final: Any, done: Array) -> Any:
    """What comes after a step: the last entry of an episode where it ended, if there are final ones."""
    if final is None or not done.any():
        return following
    return np.where(done.reshape(-1, *[1] * (following.ndim - 1)), final, following)
