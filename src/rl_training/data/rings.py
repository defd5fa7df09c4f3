"""One preallocated ring per environment: `EnvRings`, and `TransitionRings`, into which a replay buffer writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_training.data.device_copy import DeviceCopy
from rl_training.data.finals import FinalObservations
from rl_training.data.mapped import MappedFolder
from rl_training.data.memory import (
    Array,
    ArraySpec,
    allocate,
    check_same_layout,
    filled_parts,
    format_bytes,
    replay_specs,
    restore_parts,
    rows_per_env,
)  # fmt: skip
from rl_training.errors import UserError

CHANGES_BUFFERS = True  # an error in here may leave a buffer half changed (run/interruption.py)

_STACK_CHECKS = 1000  # steps during which observations are checked to be frame stacks


class EnvRings:
    """The newest rows of `num_envs` environments in shared arrays `[rows, num_envs, ...]`.

    `_heads` are the rows to write next; `_sizes` is how many rows before them can be sampled.
    """

    def __init__(
        self, capacity: int, num_envs: int, specs: Mapping[str, ArraySpec], folder: str | Path | None, what: str,
        first: int = 0, copy_to: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.rows_per_env, self.num_envs = rows_per_env(capacity, num_envs), num_envs
        self.folder = None if folder is None else MappedFolder(folder)
        self._arrays = allocate(specs, self.folder, f"a {what} of {capacity} steps")
        obs = self._arrays["obs"]
        self.copy = None if copy_to is None else DeviceCopy(obs.reshape(-1, *obs.shape[2:]), copy_to)
        self._env = np.arange(num_envs)
        self._heads = np.full(num_envs, first, dtype=np.int64)
        self._sizes = np.zeros(num_envs, dtype=np.int64)

    @property
    def capacity(self) -> int:
        """Rows held when full."""
        return self.rows_per_env * self.num_envs

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

    def _filled_state(self, filled: int) -> dict[str, Any]:
        """The first `filled` rows of the arrays, as views, and the positions of the rings."""
        arrays = filled_parts(self._arrays, filled)
        return {"arrays": arrays, "heads": self._heads.copy(), "sizes": self._sizes.copy()}

    def _restore(self, state: Mapping[str, Any]) -> None:
        restore_parts(self._arrays, state["arrays"])
        self._heads[:], self._sizes[:] = state["heads"], state["sizes"]
        if self.copy is not None:
            self.copy.reload(len(state["arrays"]["obs"]) * self.num_envs)


class TransitionRings(EnvRings):
    """Storage, writing and resuming for `ReplayBuffer`, which adds the reading.

    All rings are in one array `[slots, num_envs, ...]`; a row's index is `slot * num_envs + env`. `_heads` are the
    slots of the current observations: their rows have no action yet, and the `_sizes` rows before them can be sampled.
    Rings are in lockstep, and written with slices, until an environment skips a step.
    """

    def __init__(
        self, capacity: int, num_envs: int = 1, *, obs_shape: Sequence[int], frame_stack: int = 1, mask_size: int = 0,
        folder: str | Path | None = None, copy_to: torch.device | None = None, **layout: Any,
    ) -> None:  # fmt: skip
        specs = replay_specs(
            capacity, num_envs, obs_shape=obs_shape, frame_stack=frame_stack, mask_size=mask_size, **layout
        )
        # Rings start after the room for the first frame's history.
        super().__init__(capacity, num_envs, specs, folder, "replay buffer", frame_stack - 1, copy_to)
        arrays = self._arrays
        self.obs_shape, self.frame_stack = tuple(obs_shape), frame_stack
        self._slots = len(arrays["rewards"])
        self._length = self._slots * num_envs  # of the flat arrays
        flat = {name: array.reshape(self._length, *array.shape[2:]) for name, array in arrays.items()}
        self._obs, self._actions, self._rewards = flat["obs"], flat["actions"], flat["rewards"]
        self._terminated, self._truncated = flat["terminated"], flat["truncated"]
        self._ages, self._masks = flat.get("ages"), flat.get("masks")
        self._final_slots = flat["final_slots"]  # of the rows where an episode ended, else -1
        self._final_slots.fill(-1)
        self._finals = FinalObservations(specs["obs"], mask_size, self.folder, self.capacity)
        self._channels = self._obs.shape[1] if frame_stack > 1 else 0
        self._lockstep, self._started, self._wrapped, self._steps_checked = True, False, False, 0

    def __len__(self) -> int:
        return int(self._sizes[0]) * self.num_envs if self._lockstep else super().__len__()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays as they are now, final observations included."""
        return super().nbytes + self._finals.nbytes

    # writing ----------------------------------------------------------------------------------------------------

    def add(
        self, obs: Array, actions: Array, rewards: Array, terminated: Array, truncated: Array, next_obs: Array, *,
        final_obs: Array | None = None, valid: Array | None = None, masks: Array | None = None,
        next_masks: Array | None = None, final_masks: Array | None = None, envs: Array | None = None,
    ) -> None:  # fmt: skip
        """Store one step of N environments, everything [N, ...]; the new rows can be sampled at once.

        The actions were taken at `obs`; the next ones are taken at `next_obs`. Where an episode ended, `final_obs` is
        its true last observation; without it, `next_obs` is used (next-step autoreset, or plain tuples of a data set).
        Rows with `valid` false only reset: nothing is stored for them. If `obs` is not the last `next_obs`, something
        else moved the environment: its open episode ends there as a truncation. `masks` are the legal actions
        [N, A] in `obs`, `next_masks` in `next_obs`, `final_masks` in `final_obs` (all legal when None). `envs` are the
        environments of the N rows (None: all).
        """
        done = np.logical_or(terminated, truncated)
        if self.frame_stack > 1 and self._steps_checked < _STACK_CHECKS:
            self._check_stacks(obs, next_obs, done, final_obs is not None, valid)
        self._lockstep = self._lockstep and envs is None
        of = self._env if envs is None else envs
        self._meet(obs, masks, of)
        pick: Any = slice(None)  # of the rows given
        if valid is not None and not valid.all():
            self._lockstep = False
            pick, idle = np.flatnonzero(valid), np.flatnonzero(~valid)
            self._write_current(of[idle], next_obs[idle], None if next_masks is None else next_masks[idle], 0)
        envs = None if self._lockstep else of[pick]
        rows = self._rows_at(0, envs)
        self._drop_oldest(envs)
        self._actions[rows], self._rewards[rows] = actions[pick], rewards[pick]
        self._terminated[rows], self._truncated[rows] = terminated[pick], truncated[pick]
        if done.any():
            ended = np.flatnonzero(done if valid is None else done & valid)
            finals, legal = (next_obs, next_masks) if final_obs is None else (final_obs, final_masks)
            frames = self._newest_frames(finals[ended])
            self._keep_finals(self._rows_at(0, of[ended]), frames, None if legal is None else legal[ended])
        self._advance(envs)
        ages = 0 if self._ages is None else np.where(done[pick], 0, self._ages[rows] + 1)
        self._write_current(envs, next_obs[pick], None if next_masks is None else next_masks[pick], ages)
        self._added(rows)

    def _added(self, rows: slice | Array) -> None:
        """For subclasses: these rows have just been written."""

    def _dropped(self, rows: slice | Array) -> None:
        """For subclasses: these rows are no longer sampled."""

    def _rows_at(self, offset: int, envs: Array | None) -> slice | Array:
        """Rows `offset` slots from each head: one slice [N] while all rings are in lockstep, else indices."""
        if envs is None:
            start = (int(self._heads[0]) + offset) % self._slots * self.num_envs
            return slice(start, start + self.num_envs)
        rows: Array = (self._heads[envs] + offset) % self._slots * self.num_envs + envs
        return rows

    def _newest_frames(self, obs: Array) -> Array:
        return obs[:, -self._channels :] if self._channels else obs

    def _meet(self, obs: Array, masks: Array | None, of: Array) -> None:
        """Make `obs` the current observation; it nearly always is already, bit for bit."""
        envs = None if self._lockstep else of
        rows = self._rows_at(0, envs)
        if not self._started or (len(of) < self.num_envs and not self._sizes[of].any()):
            self._started = True
            self._write_current(envs, obs, masks, self._write_history(obs, envs))
            return
        frames = self._newest_frames(np.asarray(obs)).astype(self._obs.dtype, copy=False)
        stored = self._obs[rows]
        if stored.tobytes() == frames.tobytes():
            return
        moved = np.flatnonzero((stored != frames).reshape(len(of), -1).any(axis=1))
        is_open = (self._sizes[of[moved]] > 0) & (self._final_slots[self._rows_at(-1, of[moved])] < 0)
        newest = self._rows_at(-1, of[moved[is_open]])
        self._truncated[newest] = True
        legal = None if self._masks is None else self._masks[rows][moved[is_open]]
        self._keep_finals(newest, stored[moved[is_open]], legal)
        self._write_current(of[moved], obs[moved], None if masks is None else masks[moved], 0)

    def _write_history(self, obs: Array, envs: Array | None) -> int | Array:
        """Store the older frames of the very first observations, which may lie inside an episode (a resumed run);
        returns how many of them count."""
        if self._ages is None:
            return 0
        frames = np.asarray(obs).reshape(len(obs), self.frame_stack, *self._obs.shape[1:])
        for back in range(1, self.frame_stack):
            self._write_obs(self._rows_at(-back, envs), frames[:, -1 - back])
        repeated = (frames == frames[:, -1:]).all(axis=tuple(range(1, frames.ndim)))
        return np.where(repeated, 0, self.frame_stack - 1)

    def _write_current(self, envs: Array | None, obs: Array, masks: Array | None, ages: int | Array) -> None:
        """Put observations into the head slots; `ages` counts the steps since their episode began."""
        rows = self._rows_at(0, envs)
        self._write_obs(rows, self._newest_frames(obs))
        if self._ages is not None:
            self._ages[rows] = np.minimum(ages, self.frame_stack - 1)
        if self._masks is not None:
            self._masks[rows] = True if masks is None else masks

    def _write_obs(self, rows: slice | Array, frames: Array) -> None:
        self._obs[rows] = frames
        if self.copy is not None:
            self.copy.follow(rows)

    def _drop_oldest(self, envs: Array | None) -> None:
        if envs is not None:
            envs = envs[self._sizes[envs] == self.rows_per_env]
        if (self._sizes[0] < self.rows_per_env) if envs is None else not len(envs):
            return
        rows = self._rows_at(-self.rows_per_env, envs)
        slots = self._final_slots[rows]
        self._finals.free(slots[slots >= 0])
        self._final_slots[rows] = -1
        self._dropped(rows)

    def _keep_finals(self, rows: slice | Array, frames: Array, masks: Array | None) -> None:
        if len(frames):
            self._final_slots[rows] = self._finals.put(frames, masks)

    def _advance(self, envs: Array | None) -> None:
        if envs is None:  # plain numbers cost less than arrays of one
            head = int(self._heads[0]) + 1
            self._wrapped = self._wrapped or head == self._slots
            self._heads.fill(head % self._slots)
            self._sizes.fill(min(int(self._sizes[0]) + 1, self.rows_per_env))
            return
        heads = self._heads[envs] + 1
        self._wrapped = self._wrapped or bool((heads == self._slots).any())
        self._heads[envs] = heads % self._slots
        self._sizes[envs] = np.minimum(self._sizes[envs] + 1, self.rows_per_env)

    def _check_stacks(self, obs: Array, next_obs: Array, done: Array, has_finals: bool, valid: Array | None) -> None:
        """Refuse observations that cannot be rebuilt from frames stored once."""
        self._steps_checked += 1
        c = self._channels
        going = ~done if valid is None else ~done & valid
        shifted = np.array_equal(next_obs[going, :-c], obs[going, c:])
        begins = np.zeros_like(done) if valid is None else ~valid
        begins = begins | done if has_finals else begins
        starts = next_obs[begins].reshape(-1, self.frame_stack, *self._obs.shape[1:])
        if not shifted or not (starts == starts[:, -1:]).all():
            raise UserError(
                f"the observations are not stacks of {self.frame_stack} frames, oldest first, that begin an episode "
                "with its first frame repeated; set frame_stack to 1 to store them whole."
            )

    # resuming ---------------------------------------------------------------------------------------------------

    def _layout(self) -> dict[str, Any]:
        return {
            "capacity": self.capacity, "num_envs": self.num_envs, "frame_stack": self.frame_stack,
            "obs_shape": list(self.obs_shape), "obs_dtype": str(self._obs.dtype),
            "action_shape": list(self._actions.shape[1:]), "action_dtype": str(self._actions.dtype),
            "masks": self._masks is not None,
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Everything, as views of the filled part: write them before the next `add`."""
        filled = self._slots if self._wrapped else int(self._heads.max()) + 1
        return {
            "layout": self._layout(), **self._filled_state(filled), "finals": self._finals.state_dict(),
            "lockstep": self._lockstep, "started": self._started, "wrapped": self._wrapped,
            "steps_checked": self._steps_checked,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken; a state of another layout is refused."""
        check_same_layout(state["layout"], self._layout(), "replay buffer")
        self._final_slots.fill(-1)
        self._restore(state)
        self._finals.load_state_dict(state["finals"])
        self._lockstep, self._started = bool(state["lockstep"]), bool(state["started"])
        self._wrapped, self._steps_checked = bool(state["wrapped"]), int(state["steps_checked"])
