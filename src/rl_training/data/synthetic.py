"""`SyntheticBuffer`: imagined transitions, of which the oldest are overwritten."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.data.memory import ArraySpec, allocate, check_same_layout, filled_parts, fits_on_gpu, restore_parts

CHANGES_BUFFERS = True  # an error in here may leave a buffer half changed (run/interruption.py)


class SyntheticBuffer:
    """A ring of `capacity` single transitions: obs, actions, rewards, next_obs and dones (terminated, as float32).

    Rows are independent, because the rows of a model rollout are not kept in order. They are on `device` if they fit.
    """

    def __init__(self, capacity: int, *, obs_dim: int, action_dim: int, device: str = "cpu") -> None:
        floats = np.dtype(np.float32)
        shapes = {"obs": (obs_dim,), "actions": (action_dim,), "rewards": (), "next_obs": (obs_dim,), "dones": ()}
        specs = {name: ArraySpec((capacity, *shape), floats) for name, shape in shapes.items()}
        self.nbytes = sum(spec.nbytes for spec in specs.values())
        self.on_gpu = fits_on_gpu(self.nbytes, device)
        self._columns: dict[str, Any]
        if self.on_gpu:
            self._columns = {name: torch.zeros(spec.shape, device=device) for name, spec in specs.items()}
        else:
            self._columns = allocate(specs, None, f"a synthetic buffer of {capacity} transitions")
        self.capacity, self._size, self._head = capacity, 0, 0

    def __len__(self) -> int:
        return self._size

    def add(self, transitions: Mapping[str, Tensor]) -> None:
        """Store rows [B, ...] under the names of `sample`, with `terminated` for dones; the newest are kept."""
        rows = {**transitions, "dones": transitions["terminated"]}
        count = len(rows["rewards"])
        skipped = max(0, count - self.capacity)
        start = (self._head + skipped) % self.capacity
        turn = min(count, skipped + self.capacity - start)  # the row that goes to the ring's beginning
        for name, column in self._columns.items():
            values = rows[name] if self.on_gpu else rows[name].cpu().numpy()
            column[start : start + turn - skipped] = values[skipped:turn]
            column[: count - turn] = values[turn:]
        self._head = (self._head + count) % self.capacity
        self._size = min(self._size + count, self.capacity)

    def sample(self, batch_size: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """Rows drawn uniformly with replacement, [batch_size, ...]."""
        rows = rng.integers(0, self._size, batch_size)
        if not self.on_gpu:
            return {name: torch.from_numpy(column.take(rows, axis=0)) for name, column in self._columns.items()}
        indices = torch.from_numpy(rows).to(self._columns["rewards"].device)
        return {name: column.index_select(0, indices) for name, column in self._columns.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything as arrays; those on the host are views of the filled part."""
        arrays: dict[str, Any] = filled_parts(self._columns, self._size)
        if self.on_gpu:
            arrays = {name: column.cpu().numpy() for name, column in arrays.items()}
        return {"layout": self._layout(), "arrays": arrays, "size": self._size, "head": self._head}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`, also of a buffer on another device; another layout is refused."""
        check_same_layout(state["layout"], self._layout(), "synthetic buffer")
        stored = state["arrays"]
        if self.on_gpu:
            stored = {name: torch.from_numpy(np.array(array)) for name, array in stored.items()}
        restore_parts(self._columns, stored)
        self._size, self._head = int(state["size"]), int(state["head"])

    def _layout(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "shapes": [list(column.shape[1:]) for column in self._columns.values()]}
