"""Recorded data in a run: how a dataset is found, and replay that mixes it into every batch (RLPD)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from rl_training.algorithms.base import Algorithm, Batch
from rl_training.data import TransitionDataset, load_transition_dataset
from rl_training.envs.factory import EnvRecipe, make_env
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError
from rl_training.runtime.recording import read_policy_replay, spaces_of
from rl_training.runtime.replay import ReplayParams, ReplaySource
from rl_training.runtime.spec import Collected, SourceContext
from rl_training.validation import StrictModel

DatasetKind = Literal["random", "npz", "minari", "checkpoint"]


class DatasetParams(StrictModel):
    """Hyper-parameters that name recorded data."""

    dataset_kind: DatasetKind = Field("random", description="Where the recorded data comes from.")
    dataset_path: str | None = Field(None, description="File of an npz dataset, or of a checkpoint with its replay.")
    dataset_id: str | None = Field(None, description="Name of a Minari dataset.")
    dataset_size: int | None = Field(None, ge=1, description="Transitions to generate, or to take of a larger set.")
    dataset_seed: int = Field(0, ge=0, description="Seed of generated data.")


class PriorDataParams(ReplayParams, DatasetParams):
    """Hyper-parameters of replay with prior data."""

    offline_batch_ratio: float = Field(0.5, ge=0, le=1, description="Share of every batch that is prior data.")
    offline_pretrain_updates: int = Field(0, ge=0, description="Updates on prior data alone before the first step.")

    @model_validator(mode="after")
    def _one_step_only(self) -> PriorDataParams:
        if self.n_step != 1 or self.prioritized:
            raise ValueError(
                f"n_step is {self.n_step} and prioritized {self.prioritized}; with prior data they must be 1 and false"
            )
        return self


def find_dataset(params: DatasetParams, recipe: EnvRecipe, spaces: EnvSpaces) -> TransitionDataset:
    """The recorded data as a policy sees it: encoded observations, actions in [-1, 1] or as choices."""
    if params.dataset_kind == "checkpoint":  # as a policy saw it already; the other kinds are the environment's own
        return read_replay(params.dataset_path, spaces, params.dataset_size)
    dataset = load_transition_dataset(
        params.dataset_kind, path=params.dataset_path, dataset_id=params.dataset_id, env_id=recipe.env_id,
        size=params.dataset_size, seed=params.dataset_seed, make_env=lambda: make_env(recipe),
    )  # fmt: skip
    return fit_dataset(dataset, recipe, spaces)


def fit_dataset(dataset: TransitionDataset, recipe: EnvRecipe, spaces: EnvSpaces) -> TransitionDataset:
    """Data with the environment's own observations and actions as a policy sees it; refused where it does not fit."""
    dataset = replace(dataset, truncated=dataset.truncated & ~dataset.terminated)  # at once: termination wins
    report = dataset.check(**spaces_of(recipe))
    if report["problems"]:
        raise UserError(f"the recorded data does not fit {spaces.env_id}: {report['problems'][0]}")
    return dataset.map(obs=spaces.encode, actions=spaces.unmap_actions)


def read_replay(path: str | None, spaces: EnvSpaces, size: int | None) -> TransitionDataset:
    """The replay buffer inside a checkpoint of ours; the newest `size` rows when there are more."""
    if path is None:
        raise UserError("dataset_kind is 'checkpoint', which needs dataset_path.")
    dataset, stored = read_policy_replay(path)
    if any(getattr(stored, name) != getattr(spaces, name) for name in ("obs_shape", "action_kind", "action_sizes")):
        raise UserError(f"{path} was made in {stored.env_id}, whose spaces are not those of {spaces.env_id}.")
    return dataset if size is None or size >= len(dataset) else dataset.take(slice(len(dataset) - size, None))


class PriorReplaySource(ReplaySource):
    """Replay in which exactly `offline_batch_ratio` of every batch is prior data."""

    params: PriorDataParams

    def __init__(self, context: SourceContext) -> None:
        super().__init__(context)
        self.device = context.device
        ratio, size = self.params.offline_batch_ratio, self.params.batch_size
        self.offline_batch_size = round(ratio * size)
        needs_data = self.offline_batch_size or self.params.offline_pretrain_updates
        self.dataset = find_dataset(self.params, context.recipe, self.spaces) if needs_data else None
        self.pretrain_updates_done = 0

    @property
    def _pretrains(self) -> bool:
        return self.pretrain_updates_done < self.params.offline_pretrain_updates

    def collect(self, algorithm: Algorithm, step: int) -> Collected:
        """No step while pretraining; else as replay does."""
        collected = Collected(0, []) if self._pretrains else super().collect(algorithm, step)
        metrics = {
            "pretrain_updates_done": float(self.pretrain_updates_done),
            "offline_batch_size": float(self.offline_batch_size),
            "online_batch_size": float(self.params.batch_size - self.offline_batch_size),
        }
        return collected._replace(metrics=metrics)

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """Pretraining on prior data alone, a turn's worth at a time; then mixed batches."""
        if not self._pretrains:
            yield from super().batches(algorithm, step)
            return
        for _ in range(self.params.gradient_updates_per_step):
            if self._pretrains:
                self.pretrain_updates_done += 1
                yield "policy", self._offline(self.params.batch_size)

    def _offline(self, size: int) -> dict[str, Any]:
        assert self.dataset is not None
        batch = self.dataset.minibatch(self.rng, size, gamma=self.params.gamma, device=self.device)
        batch.pop("behavior_logprobs", None)
        return batch

    def sample(self) -> dict[str, Any]:
        """A batch whose first `offline_batch_size` rows are prior data."""
        online_size = self.params.batch_size - self.offline_batch_size
        if not self.offline_batch_size:
            return super().sample()
        offline = self._offline(self.offline_batch_size)
        if not online_size:
            return offline
        online = self.buffer.sample(online_size, self.rng)
        return {name: torch.cat([offline[name], online[name]]) for name in offline}

    def state_dict(self) -> dict[str, Any]:
        """As replay's, with the hash of the prior data."""
        digest = None if self.dataset is None else self.dataset.sha256
        return super().state_dict() | {"pretrain_updates_done": self.pretrain_updates_done, "dataset_sha256": digest}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """The inverse of `state_dict`; other prior data is refused."""
        digest = None if self.dataset is None else self.dataset.sha256
        if state["dataset_sha256"] != digest:
            raise UserError("the prior data is not what the checkpoint was trained with (its hash differs).")
        self.pretrain_updates_done = state["pretrain_updates_done"]
        return super().load_state_dict(state)
