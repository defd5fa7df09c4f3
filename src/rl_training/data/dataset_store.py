"""The dataset store: minibatches of recorded data, without environment steps (BC)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Array, Batch, UpdateResult
from rl_training.data import TransitionDataset
from rl_training.data.experience import Experience, Request
from rl_training.data.prior_store import check_same_data, describe_origin, find_data_of
from rl_training.data.store import StoreContext

MOST_HELDOUT = 1024  # held-out rows per evaluation


class DatasetStore:
    """One minibatch per turn, counted as one timestep; no environment is stepped.

    Whole episodes are held out; every `heldout_interval` updates a batch includes rows of them.
    """

    def __init__(self, context: StoreContext) -> None:
        self.params, self.rng, self.device = context.params, context.rng, context.device
        self.layout = context.layout(0)
        self.metrics: dict[str, float] = {}
        self.dataset = find_data_of(context)
        self.training, self.heldout = self.dataset.split(self.params.heldout_fraction, context.seed)
        self.origin = describe_origin(self.params, self.dataset, context.spaces.env_id)
        self.updates = 0

    def describe(self) -> str:
        """The number of training and held-out rows and their origin, printed when a run starts."""
        return f"{len(self.training):,} recorded transitions, {len(self.heldout):,} more held out, from {self.origin}"

    def request(self, step: int) -> Request:
        """Request nothing."""
        return Request()

    def add(self, experience: Experience, step: int) -> int:
        """One timestep is one update."""
        return 1

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

    def feedback(self, batch: Batch, result: UpdateResult) -> None:
        """Recorded data needs no feedback."""

    def state_dict(self) -> dict[str, Any]:
        """Generator, count and the hash of the data."""
        return {"rng": self.rng.bit_generator.state, "updates": self.updates, "dataset_sha256": self.dataset.sha256}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """The inverse of `state_dict`; other data is refused."""
        check_same_data(state["dataset_sha256"], self.dataset, "recorded data")
        self.rng.bit_generator.state = state["rng"]
        self.updates = int(state["updates"])
        return []

    def close(self) -> None:
        """Nothing to close."""
