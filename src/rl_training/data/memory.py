"""Memory for experience: how much it needs, whether that is free, and the arrays (in memory or as mapped files)."""

from __future__ import annotations

import math
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.data.mapped import MappedFolder
from rl_training.errors import UserError

Array = NDArray[Any]
SHARE_OF_GPU = 0.5  # of its free memory, for data that the user did not ask to keep there
DType = Any  # "uint8", np.uint8, np.dtype("uint8") or torch.uint8


class ArraySpec(NamedTuple):
    """One array to allocate."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Its size, before it exists."""
        return math.prod(self.shape) * self.dtype.itemsize


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The numpy dtype of a numpy name, a numpy dtype or a torch dtype."""
    return np.dtype(str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype)


def rows_per_env(capacity: int, num_envs: int) -> int:
    """Rows of each environment's ring, out of `capacity`."""
    if num_envs < 1 or capacity < num_envs:
        raise UserError(f"buffer_capacity is {capacity}, but {num_envs} environments need room for one step each.")
    return capacity // num_envs


def step_specs(
    lead: tuple[int, int], obs_shape: Sequence[int], *, obs_dtype: DType = "float32",
    action_shape: Sequence[int] = (), continuous: bool = False,
) -> dict[str, ArraySpec]:  # fmt: skip
    """The arrays [*lead, ...] of steps, before any of them exists."""
    return {
        "obs": ArraySpec((*lead, *obs_shape), numpy_dtype(obs_dtype)),
        "actions": ArraySpec((*lead, *action_shape), np.dtype(np.float32 if continuous else np.int64)),
        "rewards": ArraySpec(lead, np.dtype(np.float32)),
        "terminated": ArraySpec(lead, np.dtype(bool)),
        "truncated": ArraySpec(lead, np.dtype(bool)),
    }


def replay_specs(
    capacity: int, num_envs: int = 1, *, obs_shape: Sequence[int], frame_stack: int = 1, mask_size: int = 0,
    **layout: Any,
) -> dict[str, ArraySpec]:  # fmt: skip
    """The arrays of a replay buffer, each [slots, num_envs, ...]; `layout` is for `step_specs`."""
    if frame_stack < 1 or (frame_stack > 1 and obs_shape[0] % frame_stack):
        raise UserError(f"frame_stack is {frame_stack}, which does not divide the {obs_shape[0]} channels of obs.")
    # One slot more than rows for the newest next observation, and k - 1 more for the oldest row's earlier frames.
    lead = (rows_per_env(capacity, num_envs) + frame_stack, num_envs)
    frame = (obs_shape[0] // frame_stack, *obs_shape[1:]) if frame_stack > 1 else tuple(obs_shape)
    specs = {**step_specs(lead, frame, **layout), "final_slots": ArraySpec(lead, np.dtype(np.int32))}
    if frame_stack > 1:
        specs["ages"] = ArraySpec(lead, np.dtype(np.uint8))
    if mask_size:
        specs["masks"] = ArraySpec((*lead, mask_size), np.dtype(bool))
    return specs


def available_memory() -> int | None:
    """Bytes that this process may still allocate (machine and control group); None if the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return None
    limit = _control_group_room(Path("/sys/fs/cgroup"))
    return free if limit is None else min(free, limit)


def _control_group_room(folder: Path) -> int | None:
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((folder / "memory.current").read_text())
        stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(stats.get("inactive_file", 0))  # the page cache is given back on demand
    except (OSError, ValueError):
        return None


def format_bytes(count: float) -> str:
    """`7.19 GB` (decimal)."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{int(count)} bytes"


def explain_bytes(specs: Mapping[str, ArraySpec]) -> str:
    """The arithmetic: `2.84 GB = obs (100001 x 1 x 4 x 84 x 84 uint8) 2.82 GB + actions ... + others 1 MB`."""
    parts = sorted(specs.items(), key=lambda item: -item[1].nbytes)
    shown = [f"{name} ({' x '.join(map(str, s.shape))} {s.dtype}) {format_bytes(s.nbytes)}" for name, s in parts[:2]]
    others = format_bytes(sum(spec.nbytes for _, spec in parts[2:]))
    return f"{format_bytes(sum(spec.nbytes for spec in specs.values()))} = {' + '.join(shown)} + others {others}"


def allocate(specs: Mapping[str, ArraySpec], folder: MappedFolder | None, what: str) -> dict[str, Array]:
    """Zeroed arrays, in memory or in files of `folder`; if they do not fit, the error shows the arithmetic."""
    need = sum(spec.nbytes for spec in specs.values())
    if folder is None:
        _refuse_too_large(need, available_memory(), "of memory", specs, what)
        return {name: np.zeros(spec.shape, spec.dtype) for name, spec in specs.items()}
    try:
        _refuse_too_large(need, shutil.disk_usage(folder.path).free, f"on the disk of {folder.path}", specs, what)
        return {name: folder.make_array(name, spec.shape, spec.dtype) for name, spec in specs.items()}
    except BaseException as error:
        folder.close()
        if not isinstance(error, OSError):
            raise
        raise UserError(
            f"{what} needs {explain_bytes(specs)}, which cannot be reserved in {folder.path.parent} "
            f"({error.strerror}); make room there, or lower buffer_capacity."
        ) from None


def _refuse_too_large(need: int, free: int | None, where: str, specs: Mapping[str, ArraySpec], what: str) -> None:
    if free is None or need <= free:
        return
    rows, envs, *_ = next(iter(specs.values())).shape
    fits = int(0.9 * rows * envs * max(free, 0) / need)
    fits -= fits % 10 ** max(0, len(str(fits)) - 2)  # two digits, rounded down: rounded up it may not fit
    raise UserError(
        f"{what} needs {explain_bytes(specs)}, but only {format_bytes(free)} {where} is free; "
        f"lower buffer_capacity to about {fits}, or set replay_folder to a folder on a larger disk."
    )


def fits_on_gpu(nbytes: int, device: str) -> bool:
    """Whether a GPU has room for this many bytes that the user did not ask to keep there; False for a CPU."""
    return device.startswith("cuda") and nbytes <= SHARE_OF_GPU * torch.cuda.mem_get_info(device)[0]


def as_tensors(arrays: Mapping[str, Array], device: torch.device) -> dict[str, Tensor]:
    """The arrays on a device: on the CPU the tensors share their memory, on others one transfer copies all of them."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    joined = join_arrays(list(arrays.values()), pinned=device.type == "cuda")
    return dict(zip(arrays, split_joined(joined.to(device, non_blocking=True), arrays.values()), strict=True))


def join_arrays(arrays: Sequence[Array], *, pinned: bool = False) -> Tensor:
    """The bytes of the arrays one after the other, each at a multiple of 16."""
    joined = torch.empty(sum(-(-array.nbytes // 16) * 16 for array in arrays), dtype=torch.uint8, pin_memory=pinned)
    begin, target = 0, joined.numpy()
    for array in arrays:
        target[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        begin += -(-array.nbytes // 16) * 16
    return joined


def split_joined(joined: Tensor, arrays: Iterable[Array]) -> Iterator[Tensor]:
    """The inverse of `join_arrays`: views of the bytes, on any device."""
    begin, whole = 0, {}
    for array in arrays:
        kind = torch_dtype(array.dtype)
        if kind not in whole:
            whole[kind] = joined.view(kind)
        yield whole[kind].narrow(0, begin // array.itemsize, array.size).view(array.shape)
        begin += -(-array.nbytes // 16) * 16


@cache
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The torch dtype of a numpy dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


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
    """Memory for arrays of these shapes, pinned on the host and on a device."""

    def __init__(self, arrays: Sequence[Array], device: torch.device) -> None:
        self.here = join_arrays(arrays, pinned=device.type == "cuda")
        self.there = torch.empty_like(self.here, device=device)
        self.views = [tensor.numpy() for tensor in split_joined(self.here, arrays)]
        self.tensors = list(split_joined(self.there, arrays))
        # looking the stream up takes longer than the transfer
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
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


def filled_parts(arrays: Mapping[str, Array], count: int) -> dict[str, Array]:
    """The first `count` rows of each, as views: a checkpoint writer streams them without a copy."""
    return {name: array if count >= len(array) else array[:count] for name, array in arrays.items()}


def restore_parts(arrays: Mapping[str, Array], stored: Mapping[str, Array]) -> None:
    """The inverse of `filled_parts`, for arrays of the same layout."""
    for name, array in arrays.items():
        array[: len(stored[name])] = stored[name]


def check_same_layout(stored: Mapping[str, Any], own: Mapping[str, Any], what: str) -> None:
    """Refuse a state that a buffer of another layout wrote, naming the first difference."""
    for name, value in own.items():
        found = stored.get(name)
        found = list(found) if isinstance(found, Sequence) and not isinstance(found, str) else found
        if found != value:
            raise UserError(f"the stored {what} has {name} {found}, this one {value}; resume with the same settings.")
