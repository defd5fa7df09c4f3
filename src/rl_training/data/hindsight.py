"""`HindsightReplayBuffer`: replay whose samples may have other goals (Andrychowicz et al. 2017, arXiv:1707.01495)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from rl_training.data.memory import Array
from rl_training.data.replay import ReplayBuffer
from rl_training.envs.goals import ARGUMENTS, Goals

CHANGES_BUFFERS = True  # an error in here may leave a buffer half changed (run/interruption.py)
WHOLE = 1e-9  # what rounding may take from a whole number of rows


class HindsightReplayBuffer(ReplayBuffer):
    """Replay that gives a share of every sample goals that were achieved in the same episode.

    A row t is a step of an episode whose stored rows are s..e. Its new goal is the `achieved_goal` of the observation
    after row j, with j drawn uniformly from t..e (strategy `future`, which includes the row's own next observation),
    from s..e (`episode`), or j = e (`final`). While an episode goes on, e is its newest row. When the ring has
    overwritten the first rows of an episode, s is its oldest row that is left: the goals of `future` and `final` come
    later and are never lost.

    The goal replaces `desired_goal` in `obs` and `next_obs`, and the rewards of all steps of an n-step window are those
    of the new goal. If the environment has `compute_terminated`, the window ends at the first step at which the new
    goal ends the episode, and a step that ended it for the old goal only is a truncation. Otherwise, rows keep the
    flags that they were stored with.
    """

    more_columns: ClassVar[Mapping[str, Any]] = {
        "before": np.int32,  # rows of the same episode that were stored earlier
        "after": np.int32,  # and later; -1 while the episode goes on
    }

    def __init__(self, *args: Any, goals: Goals, strategy: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.goals, self.strategy = goals, strategy
        self._warned = goals.recomputes_ends

    def _added(self, rows: Array) -> None:
        columns, previous = self.columns, (rows - self.num_envs) % self._length
        begins = (self._sizes[rows % self.num_envs] == 1) | (columns["final_slots"][previous] >= 0)
        columns["before"][rows] = np.where(begins, 0, columns["before"][previous] + 1)
        columns["after"][rows] = -1
        if not self._warned and columns["terminated"][rows].any():
            self._warned = True
            what = f"an episode of {self.goals.env_id} terminated, but it has no compute_terminated{ARGUMENTS}"
            warnings.warn(
                f"{what}: steps keep their flag when their goal is replaced, which is wrong if goals end episodes.",
                stacklevel=2,
            )
        self._end(rows[columns["final_slots"][rows] >= 0])

    def _cut(self, envs: Array) -> None:
        super()._cut(envs)
        newest = self._rows_at(-1, envs)
        self._end(newest[(self._sizes[envs] > 0) & (self.columns["after"][newest] < 0)])

    def _end(self, rows: Array) -> None:
        """Tell the rows of episodes that end at these rows how many come after them."""
        for row in rows:
            count = min(self.columns["before"][row] + 1, self._sizes[row % self.num_envs])
            back = np.arange(count)
            self.columns["after"][(row - back * self.num_envs) % self._length] = back

    # reading --------------------------------------------------------------------------------------------------------

    def sample(self, batch_size: int, rng: np.random.Generator, *, ratio: float = 0.0) -> dict[str, Tensor]:
        """`batch_size` transitions, uniformly and with replacement; the first `ratio` of them with new goals."""
        if not len(self):
            raise ValueError("cannot sample from an empty replay buffer")
        rows = self._rows_of(rng.integers(0, len(self), batch_size))
        batch, index, ended, slots = self._look_up(rows)
        batch |= self._observations(index, ended, slots)
        if changed := int(ratio * batch_size + WHOLE):
            self._relabel(batch, rows[:changed], self._draw(rows[:changed], rng))
        return self._finish(batch, rows)

    def _draw(self, rows: Array, rng: np.random.Generator) -> Array:
        """The rows [B] after which the new goals of these rows [B] were achieved."""
        envs, slots = rows % self.num_envs, rows // self.num_envs
        newer, after = (self._heads[envs] - 1 - slots) % self._slots, self.columns["after"][rows]
        offset = np.where(after < 0, newer, after).astype(np.int64)
        if self.strategy != "final":
            older = np.minimum(self.columns["before"][rows], self._sizes[envs] - 1 - newer)
            offset = rng.integers(-older if self.strategy == "episode" else 0, offset + 1)
        drawn: Array = (rows + offset * self.num_envs) % self._length
        return drawn

    def _relabel(self, batch: dict[str, Array], rows: Array, achieved_at: Array) -> None:
        """Give the first rows of a batch, which are these, the goals that were achieved after others."""
        goals, count = self.goals, len(rows)
        wanted = self._after(achieved_at)[:, goals.achieved]
        window, lengths = self._windows(rows)
        reached = self._after(window.ravel())
        rewards, ends = goals.judge(reached[:, goals.achieved], wanted.repeat(self.n_step, axis=0))
        if ends is not None:
            counted = ends.reshape(window.shape) & (self._window < lengths[:, None])
            terminated = counted.any(axis=1)
            lengths = np.where(terminated, counted.argmax(axis=1) + 1, lengths)
            batch["terminated"][:count] = batch["dones"][:count] = terminated
        each = np.arange(count)
        last = window[each, lengths - 1]
        terminated = batch["terminated"][:count]
        batch["truncated"][:count] = (self.columns["final_slots"][last] >= 0) & ~terminated
        batch["discounts"][:count] = np.where(terminated, np.float32(0.0), self._powers[lengths])
        batch["rewards"][:count] = self._add_up(rewards.reshape(window.shape), lengths)
        batch["next_obs"][:count] = reached.reshape(*window.shape, -1)[each, lengths - 1]
        for name in ("obs", "next_obs"):
            batch[name][:count, goals.desired] = wanted

    def _after(self, rows: Array) -> Array:
        """The observations [B, ...] after these rows: the final ones where an episode ended."""
        slots = self.columns["final_slots"][rows]
        found, ended = self.columns["obs"].take((rows + self.num_envs) % self._length, axis=0), slots >= 0
        found[ended] = self._finals.obs[slots[ended]]
        return found

    # resuming -------------------------------------------------------------------------------------------------------

    def _layout(self) -> dict[str, Any]:
        return super()._layout() | {"hindsight": True}
