"""Memory for experience: how much it needs, whether that is free, the arrays, and their way to the device that learns.

Arrays are in memory or in mapped files. A batch goes to a GPU in one transfer and in reused memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.errors import UserError
from rl_training.safe_files import host_name

try:
    import fcntl
except ImportError:  # Windows, where folders of killed runs stay
    fcntl = None  # type: ignore[assignment]

Array = NDArray[Any]
DType = Any  # "uint8", np.uint8, np.dtype("uint8") or torch.uint8
SHARE_OF_GPU = 0.5  # of its free memory, for data that the user did not ask to keep there
MOST_WAITING = 256  # written rows that wait for the next batch


class ArraySpec(NamedTuple):
    """One array to allocate."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Its size, before it exists."""
        return math.prod(self.shape) * self.dtype.itemsize


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
    name = str(obs_dtype).removeprefix("torch.") if isinstance(obs_dtype, torch.dtype) else obs_dtype
    return {
        "obs": ArraySpec((*lead, *obs_shape), np.dtype(name)),
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
    frame = (obs_shape[0] // frame_stack, *obs_shape[1:]) if frame_stack > 1 else obs_shape
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
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # there is no control group, or its limit is "max"
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stats.get("inactive_file", 0)))  # the page cache is given back on demand
    return free


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
    if folder is None:
        _refuse_too_large(available_memory(), "of memory", specs, what)
        return {name: np.zeros(spec.shape, spec.dtype) for name, spec in specs.items()}
    try:
        _refuse_too_large(shutil.disk_usage(folder.path).free, f"on the disk of {folder.path}", specs, what)
        return {name: folder.make_array(name, spec) for name, spec in specs.items()}
    except BaseException as error:
        folder.close()
        if not isinstance(error, OSError):
            raise
        raise UserError(
            f"{what} needs {explain_bytes(specs)}, which cannot be reserved in {folder.path.parent} "
            f"({error.strerror}); make room there, or lower buffer_capacity."
        ) from None


def allocate_on(device: torch.device, specs: Mapping[str, ArraySpec], what: str) -> dict[str, torch.Tensor]:
    """Zeroed tensors in the memory of a device; if they do not fit, the error shows the arithmetic."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    _refuse_too_large(free, f"on {device}", specs, what, "set replay_memory to host")
    kinds = {name: torch.from_numpy(np.empty(0, spec.dtype)).dtype for name, spec in specs.items()}
    return {name: torch.zeros(spec.shape, dtype=kinds[name], device=device) for name, spec in specs.items()}


def _refuse_too_large(
    free: int | None, where: str, specs: Mapping[str, ArraySpec], what: str,
    otherwise: str = "set replay_folder to a folder on a larger disk",
) -> None:  # fmt: skip
    need = sum(spec.nbytes for spec in specs.values())
    if free is None or need <= free:
        return
    rows, envs, *_ = next(iter(specs.values())).shape
    fits = int(0.9 * rows * envs * max(free, 0) / need)
    fits -= fits % 10 ** max(0, len(str(fits)) - 2)  # two digits, rounded down: rounded up it may not fit
    raise UserError(
        f"{what} needs {explain_bytes(specs)}, but only {format_bytes(free)} {where} is free; "
        f"lower buffer_capacity to about {fits}, or {otherwise}."
    )


class MappedFolder:
    """A new subfolder of `parent` for the files of one buffer, removed with `close`, or when the process ends.

    A locked file in it shows that its process is alive; subfolders left by killed processes of this host are removed.
    """

    def __init__(self, parent: str | os.PathLike[str]) -> None:
        prefix = f"replay-{host_name()}-"
        try:
            Path(parent).mkdir(parents=True, exist_ok=True)
            for stale in Path(parent).glob(f"{prefix}*-*"):
                with contextlib.suppress(OSError):
                    lock = os.open(stale / "lock", os.O_RDWR)
                    if _try_lock(lock):
                        shutil.rmtree(stale)
                    os.close(lock)
            # It gets the name that others look for only once its lock is held.
            new = Path(tempfile.mkdtemp(prefix=f".{prefix}{os.getpid()}-", dir=parent))
            lock = os.open(new / "lock", os.O_CREAT | os.O_RDWR)
            _try_lock(lock)
            self.path = new.rename(new.with_name(new.name[1:]))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"replay_folder is {os.fspath(parent)!r}, where no files can be made: {reason}.") from None
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def make_array(self, name: str, spec: ArraySpec) -> Array:
        """A zeroed array whose memory is the file `<name>.npy`, every byte of it reserved on the disk.

        With a file that has holes, a full disk would kill the process with SIGBUS.
        """
        path = self.path / f"{name}.npy"
        array = np.lib.format.open_memmap(path, mode="w+", dtype=spec.dtype, shape=spec.shape)
        _reserve(path)
        return array

    def remove(self, name: str) -> None:
        """Remove the file of an array that is no longer used."""
        (self.path / f"{name}.npy").unlink()

    def close(self) -> None:
        """Remove the folder; closing twice is harmless."""
        self._end()


def _reserve(path: Path) -> None:
    size = path.stat().st_size
    with open(path, "r+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:  # macOS, Windows: what is not there yet is zeros
            for start in range(0, size, 1 << 24):
                file.seek(start)
                part = file.read(1 << 24)
                file.seek(start)
                file.write(part)


def _try_lock(descriptor: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        return False
    return True


def _remove(path: Path, lock: int, process: int) -> None:
    if os.getpid() == process:  # not in a fork
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def check_same_layout(stored: Mapping[str, Any], own: Mapping[str, Any], what: str) -> None:
    """Refuse a state that a buffer of another layout wrote, naming the first difference."""
    for name, value in own.items():
        if (found := stored.get(name)) != value:
            raise UserError(f"the stored {what} has {name} {found}, this one {value}; resume with the same settings.")


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
