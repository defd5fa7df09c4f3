"""`PrioritizedReplayBuffer`: proportional prioritized replay (Schaul et al. 2016, arXiv:1511.05952)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.data.memory import Array
from rl_training.data.replay import ReplayBuffer

CHANGES_BUFFERS = True  # an error in here may leave a buffer half changed (run/interruption.py)

_BLOCK = 64


class SumTree:
    """Priorities of `size` leaves, found by cumulative sum.

    It has two levels: leaves in blocks of 64, and one sum per block. numpy's cost is per call, hardly per element, so
    one cumulative sum over all blocks and one over the 256 blocks that a batch hits are cheaper than 20 binary levels.
    A block's sum is always recomputed from its leaves, so errors do not accumulate, and the leaves alone restore the
    tree bit for bit.
    """

    def __init__(self, size: int) -> None:
        blocks = -(-size // _BLOCK)
        self.leaves: Array = np.zeros(blocks * _BLOCK)
        self._blocks = self.leaves.reshape(blocks, _BLOCK)
        self._sums: Array = np.zeros(blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of the tree."""
        return self.leaves.nbytes + self._sums.nbytes

    def set(self, index: Array, values: Array | float) -> None:
        """Set leaves [B]; of duplicate indices the last one counts."""
        self.leaves[index] = values
        touched = index // _BLOCK
        self._sums[touched] = self._blocks.take(touched, axis=0).sum(axis=1)

    def rebuild(self) -> None:
        """Recompute every block after the leaves were written directly."""
        self._sums[:] = self._blocks.sum(axis=1)

    def sample(self, count: int, rng: np.random.Generator) -> tuple[Array, float]:
        """Leaves [count], one from each of `count` equal parts of the total (stratified), and the total."""
        bounds = self.bounds()
        total = bounds[-1]
        return self.find((np.arange(count) + rng.random(count)) * (total / count), bounds), float(total)

    def bounds(self) -> Array:
        """The cumulative sums of the blocks; the last is the total."""
        return self._sums.cumsum()

    def find(self, values: Array, bounds: Array) -> Array:
        """For each value [B] in [0, total] the first leaf whose cumulative sum exceeds it; never a leaf of 0."""
        # Rounding may move a value to the very end; just below it is the last leaf that is not 0.
        values = np.minimum(values, np.nextafter(bounds[-1], 0.0))
        blocks = bounds.searchsorted(values, side="right")
        rest = values - np.where(blocks > 0, bounds[blocks - 1], 0.0)
        sums = self._blocks.take(blocks, axis=0).cumsum(axis=1)
        rest = np.minimum(rest, np.nextafter(sums[:, -1], 0.0))
        inside: Array = (sums > rest[:, None]).argmax(axis=1)
        return blocks * _BLOCK + inside


class Priorities:
    """P(i) = p_i^alpha / sum p^alpha, p = |error| + eps, of `size` entries; new ones get the largest p so far (at first
    1), and those that cannot be sampled have 0."""

    def __init__(self, size: int, alpha: float, eps: float) -> None:
        self.alpha, self.eps = alpha, eps
        self.max_priority = 1.0
        self.tree = SumTree(size)
        self._late: tuple[Tensor | Array, Tensor | Array] | None = None  # arguments of a pending update

    def draw(self, batch_size: int, rng: np.random.Generator, count: int, beta: float) -> tuple[Array, Array]:
        """Entries [B], one per stratum of the priorities, and their weights: (N P)^-beta over the largest of them, with
        `count` as N."""
        self._settle()
        drawn, total = self.tree.sample(batch_size, rng)
        weights = (self.tree.leaves.take(drawn) * (count / total)) ** -beta
        return drawn, (weights / weights.max()).astype(np.float32)

    def add(self, index: Array) -> None:
        """New entries [K]."""
        self._settle()
        self.tree.set(index, self.max_priority**self.alpha)

    def drop(self, index: Array) -> None:
        """Entries [K] that are no longer sampled."""
        self._settle()
        self.tree.set(index, 0.0)

    def update(self, indices: Tensor | Array, errors: Tensor | Array) -> None:
        """Set the priorities of sampled entries [B] from their unweighted errors [B]; those that were dropped keep 0.

        Errors on a GPU are read the next time they are needed: by then acting has waited for the update.
        """
        self._settle()
        self._late = indices, errors
        if not getattr(errors, "is_cuda", False):
            self._settle()

    def _settle(self) -> None:
        if self._late is None:
            return
        (indices, errors), self._late = self._late, None
        rows, delta = _as_numpy(indices), np.abs(_as_numpy(errors).astype(np.float64)) + self.eps
        largest = float(delta.max())
        if not np.isfinite(largest):
            raise ValueError("errors hold a NaN or an infinity; priorities must be finite")
        self.max_priority = max(self.max_priority, largest)
        self.tree.set(rows, np.where(self.tree.leaves.take(rows) > 0.0, delta**self.alpha, 0.0))

    def state_dict(self, filled: int) -> dict[str, Any]:
        """The priorities of the first `filled` entries (a view) and the largest one."""
        self._settle()
        return {"priorities": self.tree.leaves[:filled], "max_priority": self.max_priority}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        self._late = None
        self.tree.leaves[:] = 0.0
        self.tree.leaves[: len(state["priorities"])] = state["priorities"]
        self.tree.rebuild()
        self.max_priority = float(state["max_priority"])


class PrioritizedReplayBuffer(ReplayBuffer):
    """Replay of transitions by their `Priorities`."""

    def __init__(self, *args: Any, alpha: float = 0.6, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.priorities = Priorities(self._length, alpha, eps)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays as they are now."""
        return super().nbytes + self.priorities.tree.nbytes

    def sample(self, batch_size: int, rng: np.random.Generator, *, beta: float = 0.4) -> dict[str, Tensor]:
        """`batch_size` transitions as in `Priorities.draw`, with `weights`."""
        if not len(self):
            raise ValueError("cannot sample from an empty replay buffer")
        rows, weights = self.priorities.draw(batch_size, rng, len(self), beta)
        return self.gather(rows, weights=weights)

    def update_priorities(self, indices: Tensor | Array, errors: Tensor | Array) -> None:
        """Set the priorities of sampled rows [B] from their unweighted errors [B]; rows that left the ring keep 0."""
        self.priorities.update(indices, errors)

    def _added(self, rows: Array) -> None:
        self.priorities.add(rows)

    def _dropped(self, rows: Array) -> None:
        self.priorities.drop(rows)

    def state_dict(self) -> dict[str, Any]:
        """The buffer's state, and the priorities of its filled part."""
        state = super().state_dict()
        return {**state, **self.priorities.state_dict(len(state["arrays"]["rewards"]) * self.num_envs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        super().load_state_dict(state)
        self.priorities.load_state_dict(state)


def _as_numpy(values: Tensor | Array) -> Array:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
