"""`ReplayBuffer`: one-step and n-step transitions of several environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_training.data.memory import Array, ArraySpec, Sender, as_tensors, replay_specs
from rl_training.data.rings import EnvRings, FinalObservations
from rl_training.errors import UserError

CHANGES_BUFFERS = True  # an error in here may leave a buffer half changed (run/interruption.py)

_STACK_CHECKS = 1000  # rows until which observations are checked to be frame stacks


class Ahead(NamedTuple):
    """A batch that was drawn one step ahead of its use."""

    before: Mapping[str, Any]  # the generator's state
    rows: Array
    place: tuple[int, ...]  # the positions of the rings when it is used
    batch: dict[str, Tensor] | None  # None if the step in between may change it


class ReplayBuffer(EnvRings):
    """The newest `capacity` transitions of `num_envs` environments.

    Each environment has a ring of `capacity // num_envs` rows. An observation is stored once: the next observation of
    a row is the observation of the next slot, and where an episode ended it is in a side store with one entry per
    episode end, so that memory stays at 1 + 1 / (episode length) observations per step. With `frame_stack=k`,
    observations `[k * c, H, W]` are k frames, oldest first, of which only the newest is stored; an episode's first
    frame is repeated for the ones before it, as in Gymnasium's FrameStackObservation.

    n-step windows stop at an episode's end and at the newest row: a row whose window is not complete yet bootstraps
    from the newest observation after fewer steps. `folder` keeps the arrays in mapped files instead of memory.

    The slots at `_heads` hold the current observations: their rows have no action yet. Rings are in lockstep until an
    environment skips a step; from then on, samples are drawn from them one after the other.
    """

    kind = "replay buffer"
    more_columns: ClassVar[Mapping[str, Any]] = {}  # of a subclass: names and dtypes of further numbers per row

    def __init__(
        self, capacity: int, num_envs: int = 1, *, obs_shape: Sequence[int], n_step: int = 1, gamma: float = 0.99,
        frame_stack: int = 1, mask_size: int = 0, folder: Any = None, device: str | torch.device = "cpu",
        on_device: bool = False, reuses_batches: bool = False, **layout: Any,
    ) -> None:  # fmt: skip
        """`layout`: obs_dtype, action_shape, continuous.

        With `reuses_batches`, a batch on a GPU is overwritten by a later one (see `Sender`), and sampling takes less
        time.
        """
        if n_step < 1:
            raise UserError(f"n_step is {n_step}; it must be at least 1.")
        sizes: dict[str, Any] = {"obs_shape": obs_shape, "frame_stack": frame_stack, "mask_size": mask_size}
        specs = replay_specs(capacity, num_envs, **sizes, **layout)
        lead = specs["rewards"].shape
        specs |= {name: ArraySpec(lead, np.dtype(dtype)) for name, dtype in self.more_columns.items()}
        places: dict[str, Any] = {"folder": folder, "device": device, "on_device": on_device}
        # Rings start after the room for the first frame's history.
        super().__init__(capacity, num_envs, specs, obs_shape=obs_shape, first=frame_stack - 1, **places)
        self._finals = FinalObservations(specs["obs"], mask_size, self.folder, self.capacity)
        self.columns["final_slots"].fill(-1)  # of the rows where an episode ended; else -1
        self.n_step, self.frame_stack = n_step, frame_stack
        self._channels = specs["obs"].shape[2] if frame_stack > 1 else 0
        self._backwards, self._window = np.arange(frame_stack - 1, -1, -1), np.arange(n_step)
        self._send = Sender(self.device) if reuses_batches else partial(as_tensors, device=self.device)
        self._lockstep = True
        self.ahead: Ahead | None = None
        self._gamma: float
        self.gamma = gamma

    def __len__(self) -> int:
        return int(self._sizes[0]) * self.num_envs if self._lockstep else super().__len__()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays as they are now, final observations included."""
        return super().nbytes + self._finals.nbytes

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

    # writing --------------------------------------------------------------------------------------------------------

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
        of = self._env if envs is None else envs
        rows, sizes, done = self._rows_at(0, of), self._sizes[of], np.logical_or(terminated, truncated)
        if self.frame_stack > 1 and sizes.min() < min(_STACK_CHECKS, self.rows_per_env):
            self._check_stacks(obs, next_obs, done, final_obs is not None, valid)
        if not sizes.any():
            self._show(rows, obs, masks, self._write_history(obs, of))
        elif len(moved := self._moved(rows, self._newest(obs))):
            self._cut(of[moved])
            self._show(rows[moved], obs[moved], _at(masks, moved))
        finals, final_masks = (next_obs, next_masks) if final_obs is None else (final_obs, final_masks)
        step = (of, rows, actions, rewards, terminated, truncated, done, next_obs, next_masks, finals, final_masks)
        if valid is None or valid.all():
            self._lockstep = self._lockstep and envs is None
            self._store(*step)
        else:
            self._lockstep = False
            self._show(rows[~valid], next_obs[~valid], _at(next_masks, ~valid))
            self._store(*(_at(part, valid) for part in step))

    def _store(
        self, of: Array, rows: Array, actions: Array, rewards: Array, terminated: Array, truncated: Array, done: Array,
        next_obs: Array, next_masks: Array | None, finals: Array, final_masks: Array | None,
    ) -> None:  # fmt: skip
        self._drop_oldest(of)
        self._write(rows, actions=actions, rewards=rewards, terminated=terminated, truncated=truncated)
        if done.any():
            ended = np.flatnonzero(done)
            self._keep_finals(rows[ended], self._newest(finals[ended]), _at(final_masks, ended))
        ages = np.where(done, 0, self.columns["ages"][rows] + 1) if self._channels else 0
        self._show((rows + self.num_envs) % self._length, next_obs, next_masks, ages)
        self._advance(of)
        self._added(rows)

    def _added(self, rows: Array) -> None:
        """For subclasses: these rows have just been written."""

    def _dropped(self, rows: Array) -> None:
        """For subclasses: these rows are no longer sampled."""

    def _newest(self, obs: Array) -> Array:
        """The newest frames of these observations."""
        return obs[:, -self._channels :] if self._channels else obs

    def _cut(self, envs: Array) -> None:
        """End the open episodes of environments that were moved: they are truncated at their current observations."""
        newest, current = self._rows_at(-1, envs), self._rows_at(0, envs)
        is_open = (self._sizes[envs] > 0) & (self.columns["final_slots"][newest] < 0)
        newest, current = newest[is_open], current[is_open]
        self._write(newest, truncated=True)
        self._keep_finals(newest, self.columns["obs"][current], _at(self.columns.get("masks"), current))

    def _write_history(self, obs: Array, envs: Array) -> int | Array:
        """Store the older frames of the very first observations, which may lie inside an episode (a resumed run);
        returns how many of them count."""
        if not self._channels:
            return 0
        frames = np.asarray(obs).reshape(len(obs), self.frame_stack, *self.columns["obs"].shape[1:])
        for back in range(1, self.frame_stack):
            self._write(self._rows_at(-back, envs), obs=frames[:, -1 - back])
        repeated = (frames == frames[:, -1:]).all(axis=tuple(range(1, frames.ndim)))
        return np.where(repeated, 0, self.frame_stack - 1)

    def _show(self, rows: Array, obs: Array, masks: Array | None, ages: int | Array = 0) -> None:
        """Write current observations; `ages` counts the steps since their episode began."""
        self._write(rows, obs=self._newest(obs))
        if self._channels:
            self._write(rows, ages=np.minimum(ages, self.frame_stack - 1))
        if "masks" in self.columns:
            self._write(rows, masks=True if masks is None else masks)

    def _drop_oldest(self, envs: Array) -> None:
        full = envs[self._sizes[envs] == self.rows_per_env]
        if len(full):
            rows = self._rows_at(-self.rows_per_env, full)
            slots = self.columns["final_slots"][rows]
            self._finals.free(slots[slots >= 0])
            self._write(rows, final_slots=-1)
            self._dropped(rows)

    def _keep_finals(self, rows: Array, frames: Array, masks: Array | None) -> None:
        self._write(rows, final_slots=self._finals.put(frames, masks))

    def _check_stacks(self, obs: Array, next_obs: Array, done: Array, has_finals: bool, valid: Array | None) -> None:
        """Refuse observations that cannot be rebuilt from frames stored once."""
        c = self._channels
        resets = np.zeros_like(done) if valid is None else ~valid
        going = ~(done | resets)
        begins = resets | done if has_finals else resets
        starts = next_obs[begins].reshape(-1, self.frame_stack, *self.columns["obs"].shape[1:])
        if not np.array_equal(next_obs[going, :-c], obs[going, c:]) or not (starts == starts[:, -1:]).all():
            raise UserError(
                f"the observations are not stacks of {self.frame_stack} frames, oldest first, that begin an episode "
                "with its first frame repeated; set frame_stack to 1 to store them whole."
            )

    # reading --------------------------------------------------------------------------------------------------------

    def sample(self, batch_size: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """`batch_size` transitions, uniformly and with replacement, as `gather` returns them."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            if ahead.place == (self._heads[0], self._sizes[0], self._lockstep) and len(ahead.rows) == batch_size:
                return ahead.batch or self.gather(ahead.rows)
            rng.bit_generator.state = ahead.before
        total = len(self)
        if not total:
            raise ValueError("cannot sample from an empty replay buffer")
        return self.gather(self._rows_of(rng.integers(0, total, batch_size)))

    def draw_ahead(self, batch_size: int, rng: np.random.Generator) -> None:
        """Draw the next sample now, as it will be after one more step of every environment, while a GPU is busy.

        Until the sample is taken, `ahead.before` is the generator's state before the draw. Rows that the step may
        change are gathered after the step.
        """
        if not self._lockstep:
            return
        before, head = rng.bit_generator.state, int(self._heads[0] + 1) % self._slots
        size = int(min(self._sizes[0] + 1, self.rows_per_env))
        ranks = rng.integers(0, size * self.num_envs, batch_size)
        rows = self._rows_in_lockstep(ranks, head - size)
        stays = ranks.max() < (size - 1 - self.n_step) * self.num_envs
        self.ahead = Ahead(before, rows, (head, size, True), self.gather(rows) if stays else None)

    def _rows_of(self, ranks: Array) -> Array:
        """Row indices of ranks 0 .. len - 1 (in lockstep: oldest slot first; else environment by environment)."""
        if self._lockstep:
            return self._rows_in_lockstep(ranks, int(self._heads[0] - self._sizes[0]))
        envs, slots = self._oldest(ranks, self._sizes)
        return slots % self._slots * self.num_envs + envs

    def _rows_in_lockstep(self, ranks: Array, oldest: int) -> Array:
        return (ranks + oldest * self.num_envs) % self._length if oldest else ranks

    def gather(self, rows: Array, **more: Array) -> dict[str, Tensor]:
        """The transitions at row indices [B]: obs, actions, rewards (discounted n-step sum), next_obs, terminated,
        truncated (of the window's last step), dones (terminated as float32), discounts (gamma ** steps actually used,
        0 where terminated); action_masks and next_action_masks where masks are stored; `more`; and on the host
        indices."""
        batch, index, ended, slots = self._look_up(rows)
        batch |= more
        if self.copy is None:
            return self._finish(self._observations(index, ended, slots) | batch, rows)
        tensors = self.copy.gather(index, {**batch, "ended": ended, "finals": self._finals.obs[slots]})
        tensors["next_obs"][:, -1].index_copy_(0, tensors.pop("ended"), tensors.pop("finals"))
        tensors |= {name: tensors[name].reshape(-1, *self.obs_shape) for name in index}
        return {**tensors, "indices": torch.from_numpy(rows)}

    def _finish(self, batch: Mapping[str, Array], rows: Array) -> dict[str, Tensor]:
        """A batch of arrays as tensors on the device, with the rows that it was made from."""
        return {**self._send(batch), "indices": torch.from_numpy(rows)}

    def _look_up(self, rows: Array) -> tuple[dict[str, Array], dict[str, Array], Array, Array]:
        """A batch without observations, the rows of their frames, and where episodes ended, with their slots."""
        rewards, last, powers = self._look_ahead(rows)
        columns, slots = self.columns, self.columns["final_slots"].take(last)
        ended = np.flatnonzero(slots >= 0)
        slots, terminated = slots[ended], columns["terminated"].take(last)
        batch = {
            "actions": columns["actions"].take(rows, axis=0),
            "rewards": rewards,
            "terminated": terminated,
            "truncated": columns["truncated"].take(last),
            "dones": terminated.astype(np.float32),
            "discounts": np.where(terminated, np.float32(0.0), powers),
        }
        if "masks" in columns:
            batch["action_masks"] = columns["masks"].take(rows, axis=0)
            batch["next_action_masks"] = columns["masks"].take((last + self.num_envs) % self._length, axis=0)
            batch["next_action_masks"][ended] = self._finals.masks[slots]
        return batch, self._frames_of(rows, last, ended), ended, slots

    def _look_ahead(self, rows: Array) -> tuple[Array, Array, Any]:
        """Discounted reward sums [B], the last row of each window [B], and gamma ** length."""
        if self.n_step == 1:
            return self.columns["rewards"].take(rows), rows, self._powers[1]
        window, lengths = self._windows(rows)
        rewards = self._add_up(self.columns["rewards"].take(window), lengths)
        return rewards, window[np.arange(len(rows)), lengths - 1], self._powers.take(lengths)

    def _windows(self, rows: Array) -> tuple[Array, Array]:
        """The rows [B, n] of each n-step window, and how many of them [B] count."""
        window = (rows[:, None] + self._window * self.num_envs) % self._length
        room = (self._heads[rows % self.num_envs] - rows // self.num_envs) % self._slots
        ended = self.columns["final_slots"].take(window) >= 0
        # Rows beyond the newest one are stale; `room` cuts them off.
        return window, np.minimum(np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, self.n_step), room)

    def _add_up(self, rewards: Array, lengths: Array) -> Array:
        """Discounted sums [B] of the first `lengths` rewards of windows [B, n]."""
        discounted = rewards * self._powers[:-1]
        discounted[self._window >= lengths[:, None]] = 0.0
        total: Array = discounted.sum(axis=1)
        return total

    def _frames_of(self, rows: Array, last: Array, ended: Array) -> dict[str, Array]:
        """Rows [B, k] of the frames of both observations; where an episode ended, the last one is a placeholder."""
        after = self._stack_index((last + self.num_envs) % self._length)
        if self._channels:
            after[ended, :-1] = self._stack_index(last[ended])[:, 1:]
        return {"obs": self._stack_index(rows), "next_obs": after}

    def _stack_index(self, rows: Array) -> Array:
        """Rows [B, k] of the frames of the stacks at `rows`; never before the episode's first frame."""
        index = rows[:, None]
        if self._channels:
            back = np.minimum(self._backwards, self.columns["ages"].take(rows)[:, None])
            index = (index - back * self.num_envs) % self._length
        return index

    def _observations(self, index: Mapping[str, Array], ended: Array, slots: Array) -> dict[str, Array]:
        """The observations made of these frames, and of the final ones in these slots where an episode ended."""
        found = {name: self.columns["obs"].take(frames, axis=0) for name, frames in index.items()}
        if len(ended):
            found["next_obs"][ended, -1] = self._finals.obs[slots]
        return {name: frames.reshape(-1, *self.obs_shape) for name, frames in found.items()}

    def transitions(self) -> dict[str, Array]:
        """Every one-step transition, each environment's in time order, as numpy arrays; the newest row of an episode
        that is still going is marked truncated, because the next row belongs to another environment."""
        envs, turns = self._oldest(np.arange(len(self)), self._sizes)
        rows = turns % self._slots * self.num_envs + envs
        slots = self.columns["final_slots"][rows]
        found = {name: self.columns[name][rows] for name in ("actions", "rewards", "terminated", "truncated")}
        ends = np.cumsum(self._sizes)[self._sizes > 0] - 1
        found["truncated"][ends] |= ~found["terminated"][ends]
        ended = np.flatnonzero(slots >= 0)
        return found | self._observations(self._frames_of(rows, rows, ended), ended, slots[ended])

    # resuming -------------------------------------------------------------------------------------------------------

    def _layout(self) -> dict[str, Any]:
        return super()._layout() | {"frame_stack": self.frame_stack, "masks": "masks" in self.columns}

    def state_dict(self) -> dict[str, Any]:
        """Everything, as views of the filled part: write them before the next `add`."""
        return super().state_dict() | {"finals": self._finals.state_dict(), "lockstep": self._lockstep}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken; a state of another layout is refused."""
        self.columns["final_slots"].fill(-1)
        super().load_state_dict(state)
        self._finals.load_state_dict(state["finals"])
        self._lockstep, self.ahead = bool(state["lockstep"]), None


def _at(array: Any, rows: Array) -> Any:
    """These rows of an array, which may be missing."""
    return None if array is None else array[rows]
