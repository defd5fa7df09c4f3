"""The stores of recorded data: alone (BC), or in every batch of a replay store (RLPD); and finding the data."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Array, Batch
from rl_training.data import TransitionDataset, load_transition_dataset
from rl_training.data.loading import find_npz
from rl_training.data.replay_store import ReplayStore
from rl_training.data.store import Request, Store, StoreContext
from rl_training.envs.factory import EnvRecipe, make_env
from rl_training.envs.spaces import EnvSpaces, in_words
from rl_training.errors import UserError
from rl_training.validation import StrictModel

MOST_HELDOUT = 1024  # held-out rows per evaluation
READERS = {"dataset_path": ("npz", "checkpoint", "minari"), "dataset_id": ("minari",)}  # kinds that read a field


def find_dataset(
    params: Any, recipe: EnvRecipe, spaces: EnvSpaces, *, recordings: Any = None, prefix: str = ""
) -> TransitionDataset:
    """The recorded data as a policy sees it: encoded observations, actions in [-1, 1] or as choices.

    Error messages put `prefix` before the names of fields.
    """
    refuse_unread(params, READERS, "dataset_kind")
    path = params.dataset_path
    if params.dataset_kind == "checkpoint":  # already as a policy sees it, unlike the other kinds
        return read_replay(path, spaces, params.dataset_size, recordings)
    if params.dataset_kind == "npz" and path is not None:
        refuse_missing(f"{prefix}dataset_path", find_npz(path), "an npz file, or the name of a packaged one")
    dataset = load_transition_dataset(
        params.dataset_kind, path=path, dataset_id=params.dataset_id, env_id=recipe.env_id, size=params.dataset_size,
        seed=params.dataset_seed, make_env=lambda: make_env(recipe), prefix=prefix,
    )  # fmt: skip
    return fit_dataset(dataset, spaces)


def find_data_of(context: StoreContext) -> TransitionDataset:
    """The recorded data that the parameters of a run name."""
    return find_dataset(context.params, context.recipe, context.spaces, recordings=context.recordings)


def refuse_unread(params: StrictModel, readers: Mapping[str, Sequence[str]], kind_field: str) -> None:
    """Refuse a field that names data that the kind does not read, because the run would use other data.

    This is not a validator, because a finished run whose config has such a field can still predict.
    """
    kind = getattr(params, kind_field)
    for name, kinds in readers.items():
        if getattr(params, name) is not None and kind not in kinds:
            raise UserError(
                f"{name} is {getattr(params, name)!r}, but {kind_field} is {kind!r}, which does not read it; "
                f"set {kind_field} to {' or '.join(kinds)}, or {name} to null."
            )


def refuse_missing(name: str, path: str | os.PathLike[str], wanted: str) -> None:
    """Refuse a path that does not exist."""
    if not os.path.exists(path):
        raise UserError(f"{name} is {path}, which does not exist; it must be {wanted}.")


def describe_origin(params: Any, dataset: TransitionDataset, env_id: str, checkpoint: str | None = None) -> str:
    """Where the data comes from, printed when a run starts; `checkpoint` says what was read of one, if not its replay.

    The note about another id is for a version, a variant, or a mistake.
    """
    named = {
        "random": "random play",
        "npz": params.dataset_path,
        "minari": f"the Minari data set {params.dataset_id}",
        "checkpoint": checkpoint or f"the replay in {params.dataset_path}",
    }
    there = dataset.metadata.get("env_id")
    note = f" (note: recorded in {there}, not in {env_id})" if there not in (None, env_id) else ""
    return f"{named[params.dataset_kind]}{note}"


def fit_dataset(dataset: TransitionDataset, spaces: EnvSpaces) -> TransitionDataset:
    """Convert the environment's own observations and actions to what a policy sees; refuse data that does not fit."""
    dataset = replace(dataset, truncated=dataset.truncated & ~dataset.terminated)  # at once: termination wins
    report = dataset.check(observation_space=spaces.row_space, action_space=spaces.action_space)
    if report["problems"]:
        raise UserError(f"the recorded data does not fit {spaces.env_id}: {report['problems'][0]}")
    return dataset.map(obs=spaces.encode, actions=spaces.unmap_actions)


def read_replay(path: str | None, spaces: EnvSpaces, size: int | None, recordings: Any) -> TransitionDataset:
    """The replay buffer inside a checkpoint, or its newest `size` rows if it has more."""
    if path is None:
        raise UserError("dataset_kind is 'checkpoint', which needs dataset_path.")
    refuse_missing("dataset_path", path, "a checkpoint of a replay algorithm")
    dataset: TransitionDataset
    dataset, stored = recordings.read_policy_replay(path)
    for name in ("observation_space", "action_space"):
        there, here = getattr(stored, name), getattr(spaces, name)
        if there != here:
            raise UserError(
                f"{path} was made in {stored.env_id}, whose spaces are not those of {spaces.env_id}: its {name} is "
                f"{in_words(there)}, here it is {in_words(here)}."
            )
    return dataset if size is None or size >= len(dataset) else dataset.take(slice(len(dataset) - size, None))


class PriorReplayStore(ReplayStore):
    """Replay in which exactly `offline_batch_ratio` of every batch is prior data."""

    counters: ClassVar[tuple[str, ...]] = ("credit", "pretrain_updates_done")
    recorded = {"dataset": "prior data"}

    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        ratio, size = self.params.offline_batch_ratio, self.params.batch_size
        self.offline_batch_size = round(ratio * size)
        self.dataset = find_data_of(context) if self.needs_data else None
        self.pretrain_updates_done = 0

    @property
    def needs_data(self) -> bool:
        """Whether any batch holds prior data."""
        return bool(self.offline_batch_size or self.params.facts.pretrain_updates)

    def describe(self) -> str:
        """The replay buffer and the prior data."""
        if self.dataset is None:
            return super().describe()
        origin = describe_origin(self.params, self.dataset, self.spaces.env_id)
        return f"{super().describe()}, {len(self.dataset):,} transitions of {self.recorded['dataset']} from {origin}"

    @property
    def _pretrains(self) -> bool:
        return self.pretrain_updates_done < int(self.params.facts.pretrain_updates)

    @property
    def updates_per_turn(self) -> int:
        """Updates per turn of pretraining."""
        return int(self.params.gradient_updates_per_step)

    def request(self, step: int) -> Request:
        """No steps while pretraining; otherwise as in replay."""
        self.metrics = {
            "pretrain_updates_done": float(self.pretrain_updates_done),
            "offline_batch_size": float(self.offline_batch_size),
            "online_batch_size": float(self.params.batch_size - self.offline_batch_size),
        }
        return Request() if self._pretrains else super().request(step)

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """Yield batches of prior data alone while pretraining, one turn at a time; then mixed batches."""
        if not self._pretrains:
            yield from super().batches(algorithm, step)
            return
        for _ in range(self.updates_per_turn):
            if self._pretrains:
                self.pretrain_updates_done += 1
                yield "policy", self._offline(self.params.batch_size)

    def _offline(self, size: int) -> dict[str, Any]:
        assert self.dataset is not None
        return self.dataset.minibatch(self.rng, size, gamma=self.gamma, device=self.device)

    def sample(self) -> dict[str, Any]:
        """A batch whose first `offline_batch_size` rows are prior data."""
        online_size = self.params.batch_size - self.offline_batch_size
        if not self.offline_batch_size:
            return self._online(online_size)
        offline = self._offline(self.offline_batch_size)
        if not online_size:
            return offline
        online = self._online(online_size)
        return {name: torch.cat([offline[name], online[name]]) for name in offline if name in online}

    def _online(self, size: int) -> dict[str, Any]:
        return self.buffer.sample(size, self.rng)


class DatasetStore(Store):
    """One minibatch per turn, counted as one timestep; no environment is stepped.

    Whole episodes are held out; every `heldout_interval` updates a batch includes rows of them.
    """

    counters = ("updates",)
    recorded = {"dataset": "recorded data"}

    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        self.layout = context.layout(0)
        self.dataset = find_data_of(context)
        self.training, self.heldout = self.dataset.split(self.params.heldout_fraction, context.seed)
        self.updates = 0

    def describe(self) -> str:
        """The number of training and held-out rows and their origin, printed when a run starts."""
        origin = describe_origin(self.params, self.dataset, self.spaces.env_id)
        return f"{len(self.training):,} recorded transitions, {len(self.heldout):,} more held out, from {origin}"

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """One minibatch, with held-out rows when they are due."""
        batch = self._take(self.training, self.rng.integers(0, len(self.training), self.params.batch_size))
        if self.updates % self.params.heldout_interval == 0:
            heldout = self._take(self.heldout, self._heldout_rows())
            batch |= {f"heldout_{name}": value for name, value in heldout.items()}
        self.updates += 1
        yield "policy", batch

    def _heldout_rows(self) -> Array:
        """All held-out rows if there are few, otherwise a random sample."""
        count = len(self.heldout)
        # always drawn: later batches, and so recorded runs, depend on the generator's state
        drawn = self.rng.integers(0, count, min(MOST_HELDOUT, count))
        return np.arange(count) if count <= MOST_HELDOUT else drawn

    def _take(self, dataset: TransitionDataset, rows: Array) -> dict[str, Tensor]:
        arrays = {"obs": dataset.obs, "actions": dataset.actions}
        return {name: torch.from_numpy(array.take(rows, axis=0)).to(self.device) for name, array in arrays.items()}
