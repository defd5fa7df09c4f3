"""`ReplayBuffer`: one-step and n-step transitions of several environments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_training.data.memory import Array, Sender, as_tensors
from rl_training.data.rings import TransitionRings
from rl_training.errors import UserError

CHANGES_BUFFERS = True  # an error in here may leave a buffer half changed (run/interruption.py)


class Ahead(NamedTuple):
    """A batch that was drawn one step ahead of its use."""

    before: Mapping[str, Any]  # the generator's state
    rows: Array
    place: tuple[int, ...]  # the positions of the rings when it is used
    batch: dict[str, Tensor] | None  # None if the step in between may change it


class ReplayBuffer(TransitionRings):
    """The newest `capacity` transitions of `num_envs` environments.

    Each environment has a ring of `capacity // num_envs` rows. An observation is stored once: the next observation of
    a row is the observation of the next slot, and where an episode ended it is in a side store with one entry per
    episode end, so that memory stays at 1 + 1 / (episode length) observations per step. With `frame_stack=k`,
    observations `[k * c, H, W]` are k frames, oldest first, of which only the newest is stored; an episode's first
    frame is repeated for the ones before it, as in Gymnasium's FrameStackObservation.

    n-step windows stop at an episode's end and at the newest row: a row whose window is not complete yet bootstraps
    from the newest observation after fewer steps. `folder` keeps the arrays in mapped files instead of memory.
    """

    def __init__(
        self, capacity: int, num_envs: int = 1, *, n_step: int = 1, gamma: float = 0.99,
        device: str | torch.device = "cpu", on_device: bool = False, reuses_batches: bool = False, **layout: Any,
    ) -> None:  # fmt: skip
        """`layout`: obs_shape, obs_dtype, action_shape, continuous, frame_stack, mask_size, folder.

        With `on_device`, observations are in the device's memory too, and those of a batch are gathered there. With
        `reuses_batches`, a batch on a GPU is overwritten by a later one (see `Sender`), and sampling takes less time.
        """
        if n_step < 1:
            raise UserError(f"n_step is {n_step}; it must be at least 1.")
        self.n_step, self.device = n_step, torch.device(device)
        self._send = Sender(self.device) if reuses_batches else partial(as_tensors, device=self.device)
        super().__init__(capacity, num_envs, copy_to=self.device if on_device else None, **layout)
        self._backwards = np.arange(self.frame_stack - 1, -1, -1)
        self._window = np.arange(n_step)
        self.ahead: Ahead | None = None
        self._gamma: float
        self.gamma = gamma

    @property
    def gamma(self) -> float:
        """Discount per step; rewards are stored undiscounted, so that a new value applies to every row."""
        return self._gamma

    @gamma.setter
    def gamma(self, value: float) -> None:
        if self.ahead is not None and value != self._gamma:
            self.ahead = self.ahead._replace(batch=None)
        self._gamma = value
        self._powers = (value ** np.arange(self.n_step + 1)).astype(np.float32)

    def sample(self, batch_size: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """`batch_size` transitions, uniformly and with replacement, as `gather` returns them."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            if ahead.place == self._place() and len(ahead.rows) == batch_size:
                return ahead.batch or self.gather(ahead.rows)
            rng.bit_generator.state = ahead.before
        return self.gather(self._draw(batch_size, rng))

    def draw_ahead(self, batch_size: int, rng: np.random.Generator) -> None:
        """Draw the next sample now, as it will be after one more step of every environment, while a GPU is busy.

        Until the sample is taken, `ahead.before` is the generator's state before the draw. Rows that the step may
        change are gathered after the step.
        """
        if not self._lockstep:
            return
        before, (head, size, _) = rng.bit_generator.state, self._place()
        head, size = (head + 1) % self._slots, min(size + 1, self.rows_per_env)
        ranks = rng.integers(0, size * self.num_envs, batch_size)
        rows = (ranks + (head - size) % self._slots * self.num_envs) % self._length
        stays = ranks.max() < (size - 1 - self.n_step) * self.num_envs
        self.ahead = Ahead(before, rows, (head, size, True), self.gather(rows) if stays else None)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken; a state of another layout is refused."""
        super().load_state_dict(state)
        self.ahead = None

    def _place(self) -> tuple[int, ...]:
        return int(self._heads[0]), int(self._sizes[0]), self._lockstep

    def _draw(self, batch_size: int, rng: np.random.Generator) -> Array:
        total = len(self)
        if not total:
            raise ValueError("cannot sample from an empty replay buffer")
        return self._rows_of(rng.integers(0, total, batch_size))

    def _rows_of(self, ranks: Array) -> Array:
        """Row indices of ranks 0 .. len - 1 (in lockstep: oldest slot first; else environment by environment)."""
        if self._lockstep:
            oldest = int(self._heads[0] - self._sizes[0]) % self._slots
            return (ranks + oldest * self.num_envs) % self._length if oldest else ranks
        bounds = np.cumsum(self._sizes)
        envs = bounds.searchsorted(ranks, side="right")
        slots = (self._heads[envs] + ranks - bounds[envs]) % self._slots
        return slots * self.num_envs + envs

    def gather(self, rows: Array, **more: Array) -> dict[str, Tensor]:
        """The transitions at row indices [B]: obs, actions, rewards (discounted n-step sum), next_obs, terminated,
        truncated (of the window's last step), dones (terminated as float32), discounts (gamma ** steps actually used,
        0 where terminated); action_masks and next_action_masks where masks are stored; `more`; and on the host
        indices."""
        rewards, last, powers = self._look_ahead(rows)
        slots = self._final_slots.take(last)
        ended = np.flatnonzero(slots >= 0)
        after = last + self.num_envs  # may be one turn of the ring too far
        terminated = self._terminated.take(last)
        dones = terminated.astype(np.float32)
        batch = {
            "actions": self._actions.take(rows, axis=0),
            "rewards": rewards,
            "terminated": terminated,
            "truncated": self._truncated.take(last),
            "dones": dones,
            "discounts": np.where(terminated, np.float32(0.0), powers),
            **more,
        }
        if self._masks is not None and self._finals.masks is not None:
            batch["action_masks"] = self._masks.take(rows, axis=0)
            batch["next_action_masks"] = next_masks = self._masks.take(after, axis=0, mode="wrap")
            next_masks[ended] = self._finals.masks[slots[ended]]
        if self.copy is not None:
            tensors = self._gather_on_device(rows, last, after, ended, slots, batch)
        else:
            obs = self._stacks(rows) if self._channels else self._obs.take(rows, axis=0)
            tensors = self._send({"obs": obs, "next_obs": self._next_obs(last, after, ended, slots), **batch})
        return {**tensors, "indices": torch.from_numpy(rows)}

    def _gather_on_device(
        self, rows: Array, last: Array, after: Array, ended: Array, slots: Array, arrays: dict[str, Array]
    ) -> dict[str, Tensor]:
        """`arrays` with the observations before and after, gathered there."""
        assert self.copy is not None
        wanted = {"obs": rows, "next_obs": after % self._length}
        if self._channels:
            wanted = {"obs": self._stack_index(rows), "next_obs": self._next_stack_index(last, after, ended)}
        batch = self.copy.gather(wanted, {**arrays, "ended": ended, "finals": self._finals.obs[slots[ended]]})
        positions, finals, next_obs = batch.pop("ended"), batch.pop("finals"), batch["next_obs"]
        if len(ended):
            (next_obs[:, -1] if self._channels else next_obs).index_copy_(0, positions, finals)
        return {name: x.reshape(-1, *self.obs_shape) if name in wanted else x for name, x in batch.items()}

    def _look_ahead(self, rows: Array) -> tuple[Array, Array, Any]:
        """Discounted reward sums [B], the last row of each window [B], and gamma ** length."""
        if self.n_step == 1:
            return self._rewards.take(rows), rows, self._powers[1]
        window = (rows[:, None] + self._window * self.num_envs) % self._length
        room = (self._heads[rows % self.num_envs] - rows // self.num_envs) % self._slots
        ended = self._final_slots.take(window) >= 0
        # Rows beyond the newest one are stale; `room` cuts them off.
        lengths = np.minimum(np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, self.n_step), room)
        rewards = self._rewards.take(window) * self._powers[:-1]
        rewards[self._window >= lengths[:, None]] = 0.0
        last = window[np.arange(len(rows)), lengths - 1]
        return rewards.sum(axis=1), last, self._powers.take(lengths)

    def _next_obs(self, last: Array, after: Array, ended: Array, slots: Array) -> Array:
        if self._channels:
            frames = self._obs.take(self._next_stack_index(last, after, ended), axis=0)
            frames[ended, -1] = self._finals.obs[slots[ended]]
            return frames.reshape(len(last), *self.obs_shape)
        next_obs = self._obs.take(after, axis=0, mode="wrap")
        if len(ended):
            next_obs[ended] = self._finals.obs[slots[ended]]
        return next_obs

    def _next_stack_index(self, last: Array, after: Array, ended: Array) -> Array:
        """Rows [B, k] of the frames of the next stacks; where an episode ended, the last one is a placeholder."""
        index = self._stack_index(after % self._length)
        index[ended, :-1] = self._stack_index(last[ended])[:, 1:]
        return index

    def _stack_index(self, rows: Array) -> Array:
        """Rows [B, k] of the frames of the stacks at `rows`; never before the episode's first frame."""
        assert self._ages is not None
        back = np.minimum(self._backwards, self._ages.take(rows)[:, None])
        index: Array = (rows[:, None] - back * self.num_envs) % self._length
        return index

    def _stacks(self, rows: Array) -> Array:
        return self._obs.take(self._stack_index(rows), axis=0).reshape(len(rows), *self.obs_shape)

    def transitions(self) -> dict[str, Array]:
        """Every one-step transition, each environment's in time order, as numpy arrays; the newest row of an episode
        that is still going is marked truncated, because the next row belongs to another environment."""
        oldest = (self._heads - self._sizes) % self._slots
        parts = [
            (oldest[env] + np.arange(self._sizes[env])) % self._slots * self.num_envs + env for env in self._env
        ]
        rows = np.concatenate(parts)
        after = (rows + self.num_envs) % self._length
        slots = self._final_slots[rows]
        truncated = self._truncated[rows]
        ends = np.cumsum(self._sizes)[self._sizes > 0] - 1
        truncated[ends] |= ~self._terminated[rows[ends]]
        return {
            "obs": self._stacks(rows) if self._channels else self._obs[rows],
            "actions": self._actions[rows], "rewards": self._rewards[rows],
            "next_obs": self._next_obs(rows, after, np.flatnonzero(slots >= 0), slots),
            "terminated": self._terminated[rows], "truncated": truncated,
        }  # fmt: skip
