"""`FinalObservations`: the true last observations of the episodes in a replay buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rl_training.data.mapped import MappedFolder
from rl_training.data.memory import Array, ArraySpec, allocate

CHANGES_BUFFERS = True  # an error in here may leave a buffer half changed (run/interruption.py)


class FinalObservations:
    """A pool with one slot per episode end still in the ring; it starts small, grows by half, and reuses free slots."""

    def __init__(self, obs: ArraySpec, mask_size: int, folder: MappedFolder | None, capacity: int) -> None:
        self._folder, self._name = folder, "finals"
        spec = ArraySpec((max(16, capacity // 256), *obs.shape[2:]), obs.dtype)
        self.obs = allocate({self._name: spec}, folder, f"a replay buffer of {capacity} steps")[self._name]
        self.masks: Array | None = np.ones((len(self.obs), mask_size), dtype=bool) if mask_size else None
        self._free: list[int] = []
        self._used = 0  # slots that were ever given out

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return self.obs.nbytes + (0 if self.masks is None else self.masks.nbytes)

    def put(self, obs: Array, masks: Array | None) -> Array:
        """Store observations [K, ...] and the legal actions there [K, A] (None: all legal); returns their slots [K]."""
        count = len(obs)
        reused = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fresh = count - len(reused)
        if self._used + fresh > len(self.obs):
            self._grow(self._used + fresh)
        slots = np.array([*reused, *range(self._used, self._used + fresh)], dtype=np.int64)
        self._used += fresh
        self.obs[slots] = obs
        if self.masks is not None:
            self.masks[slots] = True if masks is None else masks
        return slots

    def free(self, slots: Array) -> None:
        """Release slots whose rows have left the ring."""
        self._free.extend(slots.tolist())

    def _grow(self, at_least: int) -> None:
        old, count = self.obs, max(at_least, len(self.obs) + len(self.obs) // 2)
        shape = (count, *old.shape[1:])
        if self._folder is None:
            self.obs = np.zeros(shape, old.dtype)
        else:
            self.obs = self._folder.make_array(f"finals_{count}", shape, old.dtype)
            self._folder.remove(self._name)
            self._name = f"finals_{count}"
        self.obs[: len(old)] = old
        if self.masks is not None:
            masks = np.ones((count, self.masks.shape[1]), dtype=bool)
            masks[: len(old)] = self.masks
            self.masks = masks

    def state_dict(self) -> dict[str, Any]:
        """The used part, as views."""
        masks = None if self.masks is None else self.masks[: self._used]
        return {"obs": self.obs[: self._used], "masks": masks, "free": np.array(self._free, dtype=np.int64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._used = len(state["obs"])
        if self._used > len(self.obs):
            self._grow(self._used)
        self.obs[: self._used] = state["obs"]
        if self.masks is not None:
            self.masks[: self._used] = state["masks"]
        self._free = [int(slot) for slot in state["free"]]
