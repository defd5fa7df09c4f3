"""Arrays on their way to the device that learns: one transfer per batch, reused memory, and copies that stay there."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.data.memory import Array

SHARE_OF_GPU = 0.5  # of its free memory, for data that the user did not ask to keep there
MOST_WAITING = 256  # written rows that wait for the next batch


@cache
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The torch dtype of a numpy dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def fits_on_gpu(nbytes: int, device: str) -> bool:
    """Whether a GPU has room for this many bytes that the user did not ask to keep there; False for a CPU."""
    return device.startswith("cuda") and nbytes <= SHARE_OF_GPU * torch.cuda.mem_get_info(device)[0]


def as_tensors(arrays: Mapping[str, Array], device: torch.device) -> dict[str, Tensor]:
    """The arrays on a device: on the CPU the tensors share their memory, on others one transfer copies all of them."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    given = list(arrays.values())
    return dict(zip(arrays, Lane(given, device, is_reused=False).send(given), strict=True))


class Sender:
    """`as_tensors` for arrays of few different shapes, in reused memory: a result is overwritten `TURNS` calls later.

    Allocating pinned memory and making views takes longer than sending a small batch.
    """

    TURNS = 4

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lanes: dict[Any, deque[Lane]] = {}

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        """The arrays on the device; on the CPU the tensors share their memory."""
        if self.device.type == "cpu":
            return as_tensors(arrays, self.device)
        given = list(arrays.values())
        lanes = self._lanes.setdefault(tuple([(array.shape, array.dtype) for array in given]), deque())
        lanes.append(lanes.popleft() if len(lanes) == self.TURNS else Lane(given, self.device))
        return dict(zip(arrays, lanes[-1].send(given), strict=True))


class Lane:
    """Memory for arrays of these shapes, one after the other, pinned on the host and on a device."""

    def __init__(self, arrays: Sequence[Array], device: torch.device, *, is_reused: bool = True) -> None:
        on_gpu = device.type == "cuda"
        begins = [0, *accumulate(-(-array.nbytes // 16) * 16 for array in arrays)]  # each at a multiple of 16
        self.here = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=on_gpu)
        self.there = torch.empty_like(self.here, device=device)
        # numpy makes the views on the host: a call of torch takes longer
        host, placed = self.here.numpy(), list(zip(arrays, begins, strict=False))
        self.views = [host[at : at + array.nbytes].view(array.dtype).reshape(array.shape) for array, at in placed]
        whole = {dtype: self.there.view(torch_dtype(dtype)) for dtype in {array.dtype for array in arrays}}
        self.tensors = [
            whole[array.dtype].narrow(0, at // array.itemsize, array.size).view(array.shape) for array, at in placed
        ]
        # looking the stream up takes longer than the transfer
        self.stream = torch.cuda.current_stream(device) if on_gpu and is_reused else None
        self.sent = None if self.stream is None else torch.cuda.Event()

    def send(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Send arrays, overwriting what was sent before."""
        if self.sent is not None:
            self.sent.synchronize()
        for view, array in zip(self.views, arrays, strict=True):
            view[...] = array
        self.there.copy_(self.here, non_blocking=True)
        if self.sent is not None:
            self.sent.record(self.stream)
        return self.tensors


class DeviceCopy:
    """A copy of `array` [rows, ...] on a device; rows written on the host are sent with the next batch.

    The host draws all rows and keeps the array itself, so that batches and checkpoints are the same with and without a
    copy.
    """

    def __init__(self, array: Array, device: torch.device) -> None:
        self.array, self.tensor = array, torch.zeros(array.shape, dtype=torch_dtype(array.dtype), device=device)
        self._written: list[Array] = []  # indices of rows

    def follow(self, rows: Array) -> None:
        """Record that these rows have been written."""
        self._written.append(rows)
        if sum(map(len, self._written)) >= MOST_WAITING:
            self.gather({}, {})

    def gather(self, rows: Mapping[str, Array], arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        """The entries at each of `rows` [B] or [B, K], and other arrays, on the device."""
        given = {**arrays, **rows}
        if self._written:
            given["written"] = np.concatenate(self._written)
            given["values"] = self.array[given["written"]]
            self._written = []
        there = as_tensors(given, self.tensor.device)
        if "written" in there:
            self.tensor.index_copy_(0, there.pop("written"), there.pop("values"))
        return {name: self.tensor[x] if name in rows else x for name, x in there.items()}

    def reload(self, count: int) -> None:
        """Copy the first `count` rows."""
        self._written = []
        self.tensor[:count].copy_(torch.from_numpy(self.array[:count]))
