"""`EpisodeReplayBuffer`: replay of complete episodes, each row with its discounted return to the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from rl_training.data.memory import Array
from rl_training.data.replay import ReplayBuffer

CHANGES_BUFFERS = True  # an error in here may leave a buffer half changed (run/interruption.py)


class Returns:
    """Discounted returns to the end of an episode, of rewards as the learner sees them.

    With `failure`, an episode whose last reward is not larger has missed its goal, and would have gone on missing it:
    every row is worth r / (1 - gamma).
    """

    def __init__(self, gamma: float, scale: float = 1.0, shift: float = 0.0, failure: float | None = None) -> None:
        self.gamma, self.scale, self.shift, self.failure = gamma, scale, shift, failure

    def of(self, rewards: Array) -> Array:
        """From every step of one episode, [L] -> [L]."""
        earned = self.scale * rewards.astype(np.float64) + self.shift
        if self.failure is not None and earned[-1] <= self.failure and self.gamma < 1.0:
            return np.full(len(earned), earned[-1] / (1.0 - self.gamma), np.float32)
        returns = np.empty(len(earned), np.float32)
        total = 0.0
        for t in range(len(earned) - 1, -1, -1):
            total = earned[t] + self.gamma * total
            returns[t] = total
        return returns


class EpisodeReplayBuffer(ReplayBuffer):
    """A replay buffer whose rows are sampled once their episode has ended, because their return is known then.

    An episode that is cut off, by a time limit or because something else moved the environment, ends there: nothing is
    added for what would have followed.
    """

    def __init__(self, *args: Any, returns: Returns, **options: Any) -> None:
        super().__init__(*args, **options)
        self._returns = returns
        self.returns_to_go = np.zeros(self._length, np.float32)
        self._open = np.zeros(self.num_envs, np.int64)  # steps of each environment's current episode

    @property
    def complete(self) -> Array:
        """Rows of each environment that can be sampled [N], its oldest ones."""
        counts: Array = np.maximum(self._sizes - self._open, 0)
        return counts

    def _added(self, rows: Array) -> None:
        envs = rows % self.num_envs
        self._open[envs] += 1
        self._close_episodes(envs[self.columns["final_slots"][rows] >= 0])

    def _cut(self, envs: Array) -> None:
        super()._cut(envs)
        self._close_episodes(envs[self._open[envs] > 0])

    def _close_episodes(self, envs: Array) -> None:
        """The current episodes of these environments have ended."""
        for env in envs.tolist():
            back = np.arange(-min(self._open[env], self._sizes[env]), 0)
            rows = (self._heads[env] + back) % self._slots * self.num_envs + env
            self.returns_to_go[rows] = self._returns.of(self.columns["rewards"][rows])
            self._open[env] = 0

    def sample(self, batch_size: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """`batch_size` transitions of complete episodes, as `gather` returns them, with `returns_to_go`."""
        counts = self.complete
        envs, slots = self._oldest(rng.integers(0, counts.sum(), batch_size), counts)
        rows = slots % self._slots * self.num_envs + envs
        return self.gather(rows, returns_to_go=self.returns_to_go.take(rows))

    def state_dict(self) -> dict[str, Any]:
        """That of a replay buffer, and the returns."""
        state = super().state_dict()
        filled = len(state["arrays"]["rewards"]) * self.num_envs
        return state | {"returns_to_go": self.returns_to_go[:filled], "open": self._open.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        super().load_state_dict(state)
        self.returns_to_go[: len(state["returns_to_go"])] = state["returns_to_go"]
        self._open[:] = state["open"]
