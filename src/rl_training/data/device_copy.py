"""`DeviceCopy`: a copy of a buffer's observations in device memory, so that batches are gathered there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rl_training.data.memory import Array, as_tensors, torch_dtype

CHANGES_BUFFERS = True  # an error in here may leave a buffer half changed (run/interruption.py)

MOST_WAITING = 256  # written rows that wait for the next batch


class DeviceCopy:
    """A copy of `array` [rows, ...] on a device; rows written on the host are sent with the next batch.

    The host draws all rows and keeps the array itself, so that batches and checkpoints are the same with and without a
    copy.
    """

    def __init__(self, array: Array, device: torch.device) -> None:
        self.array, self.tensor = array, torch.zeros(array.shape, dtype=torch_dtype(array.dtype), device=device)
        self._written: list[Array] = []  # indices of rows
        self._waiting = 0

    def follow(self, rows: slice | Array) -> None:
        """Record that these rows have been written."""
        self._written.append(np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows)
        self._waiting += len(self._written[-1])
        if self._waiting >= MOST_WAITING:
            self.gather({}, {})

    def gather(self, rows: Mapping[str, Array], arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        """The entries at each of `rows` [B] or [B, K], and other arrays, on the device."""
        given = {**arrays, **rows}
        if self._written:
            given["written"] = np.concatenate(self._written)
            given["values"] = self.array[given["written"]]
            self._written, self._waiting = [], 0
        there = as_tensors(given, self.tensor.device)
        if "written" in there:
            self.tensor.index_copy_(0, there.pop("written"), there.pop("values"))
        return {name: self.tensor[x] if name in rows else x for name, x in there.items()}

    def reload(self, count: int) -> None:
        """Copy the first `count` rows."""
        self._written, self._waiting = [], 0
        self.tensor[:count].copy_(torch.from_numpy(self.array[:count]))
