"""`TransitionDataset`: recorded transitions as arrays, for learning without an environment, or alongside one."""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.data.memory import Array, as_tensors, available_memory, format_bytes
from rl_training.data.replay import ReplayBuffer
from rl_training.errors import UserError
from rl_training.safe_files import open_regular, replacing

MOST_EXPANSION, SMALL = 100, 2**28  # a file may expand this many times, or to this many bytes
BINS = 10  # per action dimension, of which a data set visits some
REQUIRED = ("obs", "actions", "rewards", "next_obs", "terminated", "truncated")
# D4RL's names for the same arrays.
_ALIASES = {
    "observations": "obs", "next_observations": "next_obs", "terminals": "terminated", "timeouts": "truncated",
    "terminations": "terminated", "truncations": "truncated",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class TransitionDataset:
    """M transitions in time order, episode after episode.

    `obs`, `next_obs` [M, ...]; `actions` [M] or [M, D] in the environment's own range; `rewards` [M] float32;
    `terminated`, `truncated` [M] bool. An episode ends where either flag is set and at the last row; `next_obs` is the
    true successor there too.
    """

    obs: Array
    actions: Array
    rewards: Array
    next_obs: Array
    terminated: Array
    truncated: Array
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, dtype in (("rewards", np.float32), ("terminated", bool), ("truncated", bool)):
            object.__setattr__(self, name, np.asarray(getattr(self, name)).astype(dtype, copy=False))
        rows = {name: len(array) for name, array in self.arrays().items()}
        if len(set(rows.values())) != 1 or not rows["obs"]:
            raise UserError(f"a data set needs equally many rows in every array, at least one; found {rows}.")
        if self.obs.shape != self.next_obs.shape:
            raise UserError(f"obs has the shape {self.obs.shape}, but next_obs {self.next_obs.shape}; they must agree.")

    def __len__(self) -> int:
        return len(self.rewards)

    def arrays(self) -> dict[str, Array]:
        """The arrays by name."""
        return {name: getattr(self, name) for name in REQUIRED}

    # making and storing -----------------------------------------------------------------------------------------

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], source: str, **metadata: Any) -> TransitionDataset:
        """From arrays under our names or D4RL's; `source` names their origin in error messages."""
        named = {_ALIASES.get(name, name): array for name, array in arrays.items()}
        missing = [name for name in REQUIRED if name not in named]
        if missing:
            raise UserError(f"{source} holds no {', '.join(missing)}; a data set needs {', '.join(REQUIRED)}.")
        kept = {name: named[name] for name in REQUIRED}
        for name, array in kept.items():
            dtype = array.dtype
            if dtype.kind not in "biuf" or dtype.itemsize > 8 or array.ndim < 1:
                raise UserError(f"{name} in {source} is {dtype} {array.shape}, not rows of numbers.")
            kept[name] = array.astype(dtype.newbyteorder("="), copy=False)  # the only order that torch reads
            if name in ("rewards", "terminated", "truncated"):
                if array.size != len(array):
                    raise UserError(f"{name} in {source} has the shape {array.shape}; it must be one number per row.")
                kept[name] = kept[name].reshape(len(array))
        return cls(**kept, metadata=metadata)

    @classmethod
    def from_npz(cls, path: str | Path) -> TransitionDataset:
        """Read a file of `save_npz`, or any npz with those arrays; pickles are never opened."""
        arrays = read_npz(path)
        text = arrays.pop("metadata_json", None)
        try:
            metadata = {} if text is None else json.loads(str(text))
        except (ValueError, RecursionError):
            raise UserError(f"metadata_json in {path} is not JSON.") from None
        if not isinstance(metadata, dict):
            raise UserError(f"metadata_json in {path} is a {type(metadata).__name__}; it must be a mapping of names.")
        return replace(cls.from_arrays(arrays, str(path)), metadata=metadata)

    @classmethod
    def from_replay(cls, buffer: ReplayBuffer, **metadata: Any) -> TransitionDataset:
        """The transitions in a replay buffer; its actions are the policy's own, in [-1, 1] when continuous."""
        if not len(buffer):
            raise UserError("the replay buffer is empty; collect steps before making a data set of it.")
        return cls(**buffer.transitions(), metadata=metadata)

    def save_npz(self, path: str | Path, *, compress: bool = True) -> Path:
        """Write one npz file without pickles (`.npz` is appended to a name without it)."""
        target = Path(path) if str(path).endswith(".npz") else Path(f"{path}.npz")
        target.parent.mkdir(parents=True, exist_ok=True)
        write = np.savez_compressed if compress else np.savez
        with replacing(target) as file:
            write(file, metadata_json=np.array(json.dumps(self.metadata)), **self.arrays())  # type: ignore[arg-type]
        return target

    @cached_property
    def sha256(self) -> str:
        """A hash of names, shapes, dtypes and bytes of the arrays: the same data gives the same hash from any file."""
        digest = hashlib.sha256()
        for name, array in self.arrays().items():
            digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def check(self, *, observation_space: Any = None, action_space: Any = None) -> dict[str, Any]:
        """Counts, ranges, coverage and problems as plain data; see `check_dataset`."""
        return check_dataset(self, observation_space, action_space)

    # taking parts -----------------------------------------------------------------------------------------------

    def take(self, rows: slice | Array) -> TransitionDataset:
        """These rows, in this order."""
        parts: dict[str, Any] = {name: array[rows] for name, array in self.arrays().items()}
        return replace(self, **parts)

    def map(
        self, obs: Callable[[Array], Array] | None = None, actions: Callable[[Array], Array] | None = None
    ) -> TransitionDataset:
        """The transitions with obs or actions as a learner needs them (`EnvSpaces.encode`, `unmap_actions`)."""
        changed: dict[str, Any] = {}
        if obs is not None:
            changed |= {"obs": obs(self.obs), "next_obs": obs(self.next_obs)}
        if actions is not None:
            changed["actions"] = actions(self.actions)
        return replace(self, **changed)

    @cached_property
    def episode_ends(self) -> Array:
        """Rows [E] at which episodes end; the last row always does."""
        ends = self.terminated | self.truncated
        ends[-1] = True
        return np.flatnonzero(ends)

    @property
    def last_episode_is_open(self) -> bool:
        """Whether the last episode was not recorded to its end."""
        return not (self.terminated[-1] or self.truncated[-1])

    @property
    def episode_returns(self) -> Array:
        """Sum of rewards of each episode [E], the last one as far as it was recorded."""
        totals = np.cumsum(self.rewards, dtype=np.float64)[self.episode_ends]
        return np.diff(totals, prepend=0.0)

    @property
    def episode_lengths(self) -> Array:
        """Steps of each episode [E]."""
        return np.diff(self.episode_ends, prepend=-1)

    def split(self, heldout_fraction: float, seed: int) -> tuple[TransitionDataset, TransitionDataset]:
        """`(training, held out)`: whole episodes are held out, so that no neighbors leak (rows if only one exists)."""
        if not 0.0 < heldout_fraction < 1.0 or len(self) < 2:
            raise UserError(f"heldout_fraction is {heldout_fraction} of {len(self)} rows; both sides need some.")
        rng = np.random.default_rng(seed)
        lengths = self.episode_lengths
        groups = np.repeat(np.arange(len(lengths)), lengths) if len(lengths) > 1 else np.arange(len(self))
        count = groups[-1] + 1
        held = rng.permutation(count)[: min(count - 1, max(1, round(heldout_fraction * count)))]
        is_held = np.isin(groups, held)
        return self.take(np.flatnonzero(~is_held)), self.take(np.flatnonzero(is_held))

    def minibatch(
        self, rng: np.random.Generator, size: int, *, gamma: float | None = None, device: str | torch.device = "cpu"
    ) -> dict[str, Tensor]:
        """`size` rows, uniformly with replacement, under `ReplayBuffer.sample`'s keys (discounts with `gamma`)."""
        rows = rng.integers(0, len(self), size)
        batch = {name: array.take(rows, axis=0) for name, array in self.arrays().items()}
        batch["dones"] = batch["terminated"].astype(np.float32)
        if gamma is not None:
            batch["discounts"] = np.float32(gamma) * (1.0 - batch["dones"])
        return {**as_tensors(batch, torch.device(device)), "indices": torch.from_numpy(rows)}


def read_npz(path: str | Path) -> dict[str, Array]:
    """Every array of an npz file; a missing, damaged, pickled or oversized file is refused with one sentence."""
    try:
        open_regular(path).close()  # anything else is an error here
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        if isinstance(loaded, np.lib.npyio.NpzFile):
            with loaded as archive:
                refuse_too_large(path, sum(_claimed_bytes(archive.zip, name) for name in archive.zip.namelist()))
                return {name: archive[name] for name in archive.files}
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the path of an npz file.") from None
    except Exception as error:  # a damaged zip can fail in any way, and numpy takes every other file for a pickle
        pickled = "Object arrays" in str(error)
        reason = "it holds pickled objects, which could run code" if pickled else "damaged, or of another kind"
        raise UserError(f"{path} cannot be read as npz ({reason}).") from None
    raise UserError(f"{path} is a single array, not an npz file of named ones.")


def _claimed_bytes(archive: zipfile.ZipFile, name: str) -> int:
    """Bytes that reading an array would take, by the zip's directory or the array's header, whichever is larger."""
    with archive.open(name) as member:
        version = np.lib.format.read_magic(member)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(member)
    return max(archive.getinfo(name).file_size, math.prod(shape) * dtype.itemsize)


def refuse_too_large(path: str | Path, claimed: int, share: float = 1.0) -> None:
    """Before reading, refuse data far larger than its file, or data whose `share` does not fit in memory."""
    held, free = os.path.getsize(path), available_memory()
    if claimed > max(SMALL, MOST_EXPANSION * held):
        raise UserError(
            f"{path} has {format_bytes(held)} and would expand to {format_bytes(claimed)}; "
            f"more than {MOST_EXPANSION} times its size, above {format_bytes(SMALL)}, is refused."
        )
    if free is not None and share * claimed > free:
        needed = format_bytes(share * claimed)
        raise UserError(f"{path} needs {needed} of memory, but only {format_bytes(free)} is free.")


def check_dataset(dataset: TransitionDataset, observation_space: Any, action_space: Any) -> dict[str, Any]:
    """Counts, returns, ranges, coverage, and `problems`: one sentence for each (an empty list means none).

    The spaces are those of the Gymnasium environment that the data set should fit.
    """
    returns, lengths = dataset.episode_returns, dataset.episode_lengths
    bad = {name: int(np.count_nonzero(~np.isfinite(array))) for name, array in dataset.arrays().items()}
    not_finite = {name: count for name, count in bad.items() if count}
    breaks, both = _count_breaks(dataset), int((dataset.terminated & dataset.truncated).sum())
    problems = [f"{name} holds {count} values that are NaN or infinite." for name, count in not_finite.items()]
    if both:
        problems.append(f"{both} rows are marked terminated and truncated at once; terminated wins.")
    if breaks:
        problems.append(
            f"{breaks} rows are followed by another observation than their next_obs without an end being marked "
            "(shuffled rows, or truncations that were not recorded)."
        )
    problems += _space_problems("obs", dataset.obs, observation_space)
    problems += _space_problems("actions", dataset.actions, action_space)
    return {
        "transitions": len(dataset),
        "episodes": len(returns),
        "terminated": int(dataset.terminated.sum()),
        "truncated": int((dataset.truncated & ~dataset.terminated).sum()),
        "last_episode_is_open": dataset.last_episode_is_open,
        "episode_return": _summary(returns),
        "episode_length": _summary(lengths),
        "reward": _summary(dataset.rewards),
        "obs": _describe(dataset.obs),
        "actions": _describe(dataset.actions),
        "coverage": _coverage(dataset.actions, action_space),
        "not_finite": not_finite,
        "breaks": breaks,
        "sha256": dataset.sha256,
        "metadata": dict(dataset.metadata),
        "problems": problems,
    }


def _summary(values: Array) -> dict[str, float]:
    return {name: float(getattr(np, name)(values)) for name in ("min", "mean", "max", "std")}


def _describe(array: Array) -> dict[str, Any]:
    """Kind and range: one per dimension for short vectors, one overall for everything else."""
    axis = 0 if array.ndim == 2 and array.shape[1] <= 64 else None
    ranges = {"min": np.min(array, axis=axis).tolist(), "max": np.max(array, axis=axis).tolist()}
    return {"shape": list(array.shape[1:]), "dtype": str(array.dtype), **ranges}


def _coverage(actions: Array, space: Any) -> dict[str, Any]:
    """How often each whole-number action occurs, or the share of ten equal bins that each dimension visits."""
    if actions.dtype.kind in "biu":
        values, counts = np.unique(actions, axis=0, return_counts=True)
        if len(values) > 256:
            return {"distinct_actions": len(values)}
        return {"action_counts": [[value.tolist(), int(count)] for value, count in zip(values, counts, strict=True)]}
    flat = actions.reshape(len(actions), -1)
    low, high = (np.ravel(limit) for limit in (getattr(space, "low", ()), getattr(space, "high", ())))
    if len(low) != flat.shape[1] or not np.isfinite([low, high]).all():
        low, high = flat.min(axis=0), flat.max(axis=0)
    bins = np.clip((flat - low) / np.where(high > low, high - low, 1.0) * BINS, 0, BINS - 1).astype(np.int64)
    return {"visited_bins": [len(np.unique(column)) / BINS for column in bins.T]}


def _count_breaks(dataset: TransitionDataset) -> int:
    """Rows whose successor is not the next row's observation although no end is marked there."""
    going = np.flatnonzero(~(dataset.terminated | dataset.truncated)[:-1])
    differs = dataset.next_obs[going] != dataset.obs[going + 1]
    return int(differs.any(axis=tuple(range(1, differs.ndim))).sum())


def _space_problems(name: str, array: Array, space: Any) -> list[str]:
    """Shape, kind and bounds of rows against a Gymnasium space; spaces without one shape are not compared."""
    if space is None or space.shape is None:
        return []
    shape, wanted = tuple(array.shape[1:]), tuple(space.shape)
    if int(np.prod(shape)) != int(np.prod(wanted)):
        return [f"{name} has rows of shape {shape}, but the environment's space is {space}."]
    if np.issubdtype(space.dtype, np.floating) and array.dtype.kind in "biu" and name == "actions":
        return [f"{name} are {array.dtype}, but the environment's space {space} wants real numbers, not choices."]
    if hasattr(space, "low"):
        low, high = space.low, space.high
    elif hasattr(space, "start"):
        low, high = space.start, space.start + getattr(space, "nvec", getattr(space, "n", None)) - 1
    else:
        return []
    if np.issubdtype(space.dtype, np.integer) and array.dtype.kind == "f" and name == "actions":
        return [f"{name} are {array.dtype}, but the environment's space {space} wants whole numbers."]
    flat = array.reshape(len(array), -1)
    outside = int(((flat < np.ravel(low)) | (flat > np.ravel(high))).any(axis=1).sum())
    return [f"{outside} rows of {name} lie outside the environment's space {space}."] if outside else []
