"""`SyntheticBuffer`: imagined transitions, of which the oldest are overwritten."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.data.memory import Array, ArraySpec, allocate, check_same_layout, filled_parts, restore_parts


class SyntheticBuffer:
    """A ring of `capacity` single transitions: obs, actions, rewards, next_obs and dones (terminated, as float32).

    Rows are independent, since those of a model rollout are not kept in order.
    """

    def __init__(self, capacity: int, *, obs_dim: int, action_dim: int) -> None:
        floats = np.dtype(np.float32)
        shapes = {"obs": (obs_dim,), "actions": (action_dim,), "rewards": (), "next_obs": (obs_dim,), "dones": ()}
        specs = {name: ArraySpec((capacity, *shape), floats) for name, shape in shapes.items()}
        self._arrays: dict[str, Array] = allocate(specs, None, f"a synthetic buffer of {capacity} transitions")
        self.capacity, self._size, self._head = capacity, 0, 0

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self._arrays.values())

    def add(self, transitions: Mapping[str, Tensor]) -> None:
        """Store rows [B, ...] under the names of `sample`, with `terminated` for dones; the newest are kept."""
        columns = {**transitions, "dones": transitions["terminated"]}
        count = len(columns["rewards"])
        rows = (self._head + np.arange(max(0, count - self.capacity), count)) % self.capacity
        for name, array in self._arrays.items():
            array[rows] = columns[name][count - len(rows) :].cpu().numpy()
        self._head = (self._head + count) % self.capacity
        self._size = min(self._size + count, self.capacity)

    def sample(self, batch_size: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """Rows drawn uniformly with replacement, [batch_size, ...]."""
        rows = rng.integers(0, self._size, batch_size)
        return {name: torch.from_numpy(array.take(rows, axis=0)) for name, array in self._arrays.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything, as views of the filled part."""
        arrays = filled_parts(self._arrays, self._size)
        return {"layout": self._layout(), "arrays": arrays, "size": self._size, "head": self._head}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; a state of another layout is refused."""
        check_same_layout(state["layout"], self._layout(), "synthetic buffer")
        restore_parts(self._arrays, state["arrays"])
        self._size, self._head = int(state["size"]), int(state["head"])

    def _layout(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "shapes": [list(array.shape[1:]) for array in self._arrays.values()]}
